"""From the command to the first token, with an empty compile cache and with a filled one, and from
a file to weights in memory."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from benchmarks.ours import Ours
from benchmarks.shape import write_config
from benchmarks.timing import Timed, seconds_of
from entropix_jax.checkpoint import SINGLE_FILE, load_params, save_params
from entropix_jax.config import ModelConfig
from entropix_jax.errors import UserError

_SAMPLE_SECONDS = 0.02


def start_up(model: str, new_tokens: int) -> dict[str, dict[str, float]]:
    """Seconds to the first token and to the end, and the peak of anonymous memory, cold and
    warm."""
    with tempfile.TemporaryDirectory() as cache:
        return {name: _command(model, new_tokens, cache) for name in ("cold", "warm")}


def write_random_model(ours: Ours, folder: Path) -> None:
    """A folder with a configuration and weights, and no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(ours.config, folder)
    save_params(folder, ours.params, ours.config)
    os.sync()  # else the disk is busy with it while the clock runs


def loading(config: ModelConfig, folder: Path) -> dict[str, Timed]:
    """Functions that load a folder's weights, and that read the same file into memory."""

    def read() -> float:
        started = time.perf_counter()
        (folder / SINGLE_FILE).read_bytes()
        return time.perf_counter() - started

    def load() -> float:
        return seconds_of(lambda: jax.tree.leaves(load_params(folder, config, "bfloat16")))

    return {"load": load, "read": read}


def _command(model: str, new_tokens: int, cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "entropix_jax.main", "--model", model]
    command += ["--prompt", "Once upon a time"]
    command += ["--no-chat", "--ignore-eos", "--max-new-tokens", str(new_tokens)]
    trace = Path(cache) / "trace.jsonl"
    trace.unlink(missing_ok=True)
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    started = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--trace", str(trace)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )
    first, peak = None, 0
    while process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid))
        # The trace's second line is the first token.
        if first is None and trace.exists() and trace.read_bytes().count(b"\n") > 1:
            first = time.perf_counter() - started
        time.sleep(_SAMPLE_SECONDS)
    seconds = time.perf_counter() - started
    if process.returncode:
        message = process.stderr.read().decode() if process.stderr else ""
        raise UserError(f"the command failed with status {process.returncode}: {message.strip()}")
    return {"first_token": first or seconds, "seconds": seconds, "anonymous_bytes": peak}


def anonymous_bytes(pid: int) -> int:
    """What a process holds that is not backed by a file (Linux's RssAnon)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(lines[0].split()[1]) * 1024 if lines else 0
