"""The memory that a batch says it will take, beside what it does take, at Llama-3.2-1B's shape."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from benchmarks.shape import LLAMA_3_2_1B, write_config
from benchmarks.start_up import anonymous_bytes
from rich.console import Console
from rich.table import Table
from tiny.tokenizer import tokenizer_config, tokenizer_json

from entropix_jax.checkpoint import save_params
from entropix_jax.config import load_model_config
from entropix_jax.memory import plan_memory
from entropix_jax.params import init_params
from entropix_jax.precision import choose_precision
from entropix_jax.resources import resource_folder
from verification.findings import Line

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("bfloat16:1:2048", "bfloat16:8:2048", "bfloat16:16:4096", "float32:4:2048")
WITHIN = 0.1
_NEW_TOKENS = 4
_SAMPLE_SECONDS = 0.01
# Each regime branches, so that a step takes all that it can.
_BRANCHING = [f"sampler.arms.{regime}=branch" for regime in ("lelv", "helv", "lehv", "hehv", "mid")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument(
        "--settings",
        nargs="+",
        default=list(SETTINGS),
        metavar="TYPE:SLOTS:CONTEXT",
        help="weights' type, rows side by side, and cache slots of each",
    )


def run(args: argparse.Namespace, folder: Path) -> list[Line]:
    """Measures the settings that have not been, and gives a line for all. The random weights (2.5
    GB) are removed at the end."""
    place = folder / "memory"
    model = place / "model"
    found: dict[str, dict[str, int]] = {}
    state = place / "measured.json"
    if state.exists():
        found = json.loads(state.read_text(encoding="utf-8"))
    try:
        for setting in args.settings:
            if setting in found:
                continue
            if not (model / "tokenizer.json").exists():
                _write_model(model)
            weights, slots, context = setting.split(":")
            small = _taken(place, None, weights, int(slots), int(context))
            runtime = small["peak"] - small["planned"]
            large = _taken(place, model, weights, int(slots), int(context))
            found[setting] = {
                "planned": large["planned"],
                "measured": large["peak"] - runtime,
                "runtime": runtime,
            }
            state.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(model, ignore_errors=True)
    chosen = {setting: found[setting] for setting in args.settings}
    _print(chosen)
    off = [
        {"setting": setting, **numbers}
        for setting, numbers in chosen.items()
        if abs(numbers["planned"] / numbers["measured"] - 1) > WITHIN
    ]
    ratios = [numbers["planned"] / numbers["measured"] for numbers in chosen.values()]
    return [
        Line(
            what="memory that a batch plans, of what it takes at its peak (1B's shape)",
            tried=len(chosen),
            unit="settings",
            failures=len(off),
            wanted=f"within {WITHIN:.0%}",
            note=f"planned / measured {min(ratios):.2f} to {max(ratios):.2f}",
            details=off,
        )
    ]


def _print(found: dict[str, dict[str, int]]) -> None:
    table = Table("weights, slots, context", "planned, GB", "measured, GB", "ratio", "runtime, GB")
    for setting, numbers in found.items():
        planned, measured, runtime = (numbers[name] for name in ("planned", "measured", "runtime"))
        table.add_row(
            setting.replace(":", ", "),
            f"{planned / 1e9:.2f}",
            f"{measured / 1e9:.2f}",
            f"{planned / measured:.2f}",
            f"{runtime / 1e9:.2f}",
        )
    Console(width=100).print(table)


def _taken(
    place: Path, model: Path | None, weights: str, slots: int, context: int
) -> dict[str, int]:
    """What a batch plans, and the most anonymous memory that it has held, in bytes. It is run
    twice: the compiler of the first run takes memory, too."""
    place.mkdir(parents=True, exist_ok=True)
    records, output = place / "in.jsonl", place / "out.jsonl"
    # Words of the embedded model's tokenizer, a token each: a row that fills its slots.
    long = "Anna" + " and" * (context - 4 * _NEW_TOKENS)
    with records.open("w", encoding="utf-8") as file:
        for number in range(slots):
            prompt = long if number == 0 else "and " * number
            file.write(json.dumps({"prompt": prompt}) + "\n")
    command = [sys.executable, "-m", "entropix_jax.batch", "--input", str(records)]
    command += ["--output", str(output), "--weights", weights, "--slots", str(slots)]
    command += ["--context", str(context), "--max-new-tokens", str(_NEW_TOKENS), "--ignore-eos"]
    command += ["--no-chat", "--set", *_BRANCHING, "--model", str(model or "tiny")]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(place / "cache"),
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    peak = 0
    for _ in range(2):
        for path in (output, output.with_name(f"{output.name}.run.json")):
            path.unlink(missing_ok=True)
        peak = _peak(command, environment)
    config = load_model_config(model or resource_folder("weights") / "tiny")
    plan = plan_memory(config, choose_precision(weights), slots=slots, capacity=context)
    return {"planned": plan.total, "peak": peak}


def _peak(command: list[str], environment: dict[str, str]) -> int:
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(_SAMPLE_SECONDS)
    if process.returncode:
        message = process.stderr.read().decode() if process.stderr else ""
        raise RuntimeError(f"the command failed with status {process.returncode}: {message}")
    return peak


def _write_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_config(LLAMA_3_2_1B, folder)
    random = init_params(LLAMA_3_2_1B, jax.random.key(0), jnp.dtype("bfloat16"))
    save_params(folder, random, LLAMA_3_2_1B)
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    about = json.dumps(tokenizer_config(LLAMA_3_2_1B.max_positions))
    (folder / "tokenizer_config.json").write_text(about, encoding="utf-8")
