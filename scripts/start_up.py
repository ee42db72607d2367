"""What the generate command takes to start, and a folder's weights to load."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
from llama_1b import transformers_config
from timing import seconds_of, take_turns
from tiny.tokenizer import tokenizer_config, tokenizer_json

from entropix_jax.errors import UserError
from entropix_jax.model.checkpoint import SINGLE_FILE, load_params, save_params
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.params import Params


def run_generate(model: str, weights: str | None, cache: Path) -> dict[str, float]:
    """Seconds of the command, to its first token and in all, and the most anonymous memory that it
    held, in bytes (0 where /proc does not say)."""
    trace = cache / "trace.jsonl"
    cache.mkdir(parents=True, exist_ok=True)
    trace.unlink(missing_ok=True)
    command = [sys.executable, "-m", "entropix_jax.main", "--model", model, "--no-chat"]
    command += ["--prompt", "Once upon a time", "--ignore-eos", "--max-new-tokens", "32"]
    command += ["--trace", str(trace), *(["--dtype", weights] if weights else [])]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    first, peak = None, 0
    while process.poll() is None:
        peak = max(peak, _anonymous_bytes(process.pid))
        # The trace's second line is the first token.
        if first is None and trace.exists() and trace.read_bytes().count(b"\n") > 1:
            first = time.perf_counter() - started
        time.sleep(0.02)
    seconds = time.perf_counter() - started
    if process.returncode:
        said = process.communicate()[1].strip()
        raise UserError(f"the command failed with status {process.returncode}: {said}")
    return {"first_token": first or seconds, "seconds": seconds, "peak_bytes": peak}


def _anonymous_bytes(pid: int) -> int:
    """The memory of a process that is not backed by a file (Linux's RssAnon)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def write_model(folder: Path, params: Params, config: ModelConfig) -> None:
    """Writes a folder with these weights and the embedded model's tokenizer."""
    folder.mkdir()
    texts = {
        "config.json": json.dumps({**transformers_config(config), "eos_token_id": None}),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": json.dumps(tokenizer_config(config.max_positions)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    save_params(folder, params, config)
    os.sync()  # else the disk is busy with it while the clock runs


def loading(config: ModelConfig, folder: Path) -> tuple[float, float]:
    """Seconds to load a folder's weights and to read their file, 0 where it is not safetensors."""
    file = folder / SINGLE_FILE
    if not file.exists():
        return 0.0, 0.0
    seconds = take_turns(
        {
            "load": lambda: seconds_of(
                lambda: jax.tree.leaves(load_params(folder, config, "bfloat16"))
            ),
            "read": lambda: seconds_of(file.read_bytes),
        },
        repeats=3,
    )
    return statistics.median(seconds["load"]), statistics.median(seconds["read"])
