"""Measures decode, prefill and start-up, beside what the machine's memory allows.

    python scripts/benchmark.py [--model DIR] [--dtype D] [--batch B] [--context N] [--capacity N]
                                [--prefill N] [--steps N] [--repeats N] [--json FILE]
    python scripts/benchmark.py --start-up [--model DIR] [--new-tokens N] [--json FILE]

Without --model the first form uses random weights in Llama-3.2-1B's shape, the second the embedded
model. The first form alternates the full sampler with greedy decoding and gives medians of a step,
with the spread as (max - min) / median. A step that branches commits several tokens of a row, one
that takes a token back none: tokens a second are those that were committed. The second form runs
the command itself, with an empty compile cache and with a filled one, and watches the anonymous
memory that it holds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from entropix_jax.config import ModelConfig, RopeScaling
from entropix_jax.decode import decode, prefill
from entropix_jax.decode_state import DecodeState, Recording, StepRecord, init_state
from entropix_jax.loading import load
from entropix_jax.params import Params, init_params
from entropix_jax.precision import Precision, choose_precision
from entropix_jax.sampler.keys import row_key
from entropix_jax.sampler.params import SamplerParams
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sample import init_sampler_state

LLAMA_3_2_1B = ModelConfig(
    vocab_size=128256,
    width=2048,
    mlp_width=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    max_positions=131072,
    norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    ),
    tied_head=True,
    dtype="bfloat16",
)
SAMPLERS = ("entropix", "greedy")
_BANDWIDTH_BYTES = 1 << 30
_SAMPLE_SECONDS = 0.02


# Steady state.


def read_bandwidth() -> float:
    """Bytes a second that a product of a 1 GiB float32 matrix and a vector reads: the best of 9."""
    matrix = jnp.ones((_BANDWIDTH_BYTES // 8192, 2048), jnp.float32)
    vector = jnp.ones(2048, jnp.float32)
    multiply = jax.jit(jnp.dot)
    seconds = [_seconds(lambda: multiply(matrix, vector)) for _ in range(10)]
    return _BANDWIDTH_BYTES / min(seconds[1:])


def sampler_params(name: str, config: ModelConfig, batch: int) -> SamplerParams:
    """A preset's parameters for each of `batch` rows; its thought is of any three tokens."""
    params = load_sampler(name).params(
        num_layers=config.num_layers, epsilon=2.0**-23, encode=lambda text: [1, 2, 3]
    )
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), params)


def fresh_state(
    config: ModelConfig, precision: Precision, args: argparse.Namespace
) -> tuple[DecodeState, np.ndarray]:
    """Rows with `context` random tokens each, none of them cached, and those tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (args.batch, args.context))
    state = init_state(
        config,
        tokens.tolist(),
        [args.capacity - args.context] * args.batch,
        np.stack([row_key(0, str(row)) for row in range(args.batch)]),
        capacity=args.capacity,
        dtype=precision.activations,
    )
    return state, tokens


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Decode and prefill of one shape."""
    if args.model:
        model = load(args.model, args.dtype)
        config, params, precision = model.config, model.params, model.precision
    else:
        config, dtype = LLAMA_3_2_1B, args.dtype or "bfloat16"
        params = init_params(config, jax.random.key(0), jnp.dtype(dtype))
        precision = choose_precision(dtype)
    bandwidth = read_bandwidth()
    results: dict[str, Any] = {
        "device": str(jax.devices()[0]),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "weights": str(precision.weights),
        "activations": str(precision.activations),
        "batch": args.batch,
        "context": args.context,
        "capacity": args.capacity,
    }
    window = min(args.capacity, 1 << (args.context + args.steps - 1).bit_length())
    state, tokens = fresh_state(config, precision, args)
    results["prefill"] = _prefill(params, config, precision, args)
    count = jnp.full(args.batch, args.context - 1, jnp.int32)
    prompt = jnp.asarray(tokens[:, :-1], jnp.int32)
    state = prefill(params, state, prompt, count, config=config, window=window)

    none = jnp.full(1, -1, jnp.int32)
    run = partial(decode, config=config, window=window, max_steps=32, recording=Recording())
    length = state.cache.length
    seconds: dict[str, list[float]] = {name: [] for name in SAMPLERS}
    tokens_a_step: dict[str, list[float]] = {name: [] for name in SAMPLERS}
    for repeat in range(args.repeats + 1):
        for name in SAMPLERS:
            # Back to the same context: the slots past it are free to be written again.
            state = _rewound(state, length)
            sampler = sampler_params(name, config, args.batch)
            started = time.perf_counter()
            state, records, _ = run(params, sampler, none, state, jnp.int32(args.steps))
            jax.block_until_ready(records)
            elapsed = time.perf_counter() - started
            if repeat:
                # Fewer steps than asked for where branches have filled the window.
                steps = _steps_run(records)
                seconds[name].append(elapsed / steps)
                committed = int(jnp.sum(state.cache.length - length))
                tokens_a_step[name].append(committed / steps)
            elif name == SAMPLERS[0]:
                results["compile_decode"] = elapsed
    bytes_read = sum(x.nbytes for x in jax.tree.leaves(params))
    slots = jax.tree.leaves((state.cache.keys, state.cache.values))
    bytes_read += sum(x.nbytes for x in slots) // args.capacity * args.context
    # Shared machines are faster at one moment than at another: the best that was seen counts.
    bandwidth = max(bandwidth, read_bandwidth())
    results["read_bandwidth"] = bandwidth
    floor = bytes_read / bandwidth
    results["floor"] = floor
    for name in SAMPLERS:
        figures = _figures(seconds[name], statistics.mean(tokens_a_step[name]))
        share = floor / statistics.median(seconds[name])
        results[f"decode_{name}"] = figures | {"share_of_bandwidth": share}
    return results


def _prefill(
    params: Params, config: ModelConfig, precision: Precision, args: argparse.Namespace
) -> dict[str, float]:
    size = args.prefill
    count = jnp.full(args.batch, size, jnp.int32)
    tokens = jnp.ones((args.batch, size), jnp.int32)
    window = min(args.capacity, max(size, 128))
    seconds = []
    for _ in range(args.repeats + 1):
        state, _ = fresh_state(config, precision, args)
        run = partial(prefill, params, state, tokens, count, config=config, window=window)
        seconds.append(_seconds(run))
    return _figures(seconds[1:], args.batch * size) | {"tokens": size}


def _rewound(state: DecodeState, length: jax.Array) -> DecodeState:
    cache = replace(state.cache, length=jnp.array(length, copy=True))
    sampler = init_sampler_state(*state.sampler.last.logits.shape)
    state = replace(state, cache=cache, sampler=sampler, finish=jnp.zeros_like(state.finish))
    return jax.block_until_ready(state)


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def _steps_run(records: StepRecord) -> int:
    return int(jnp.sum(jnp.any(records.live, axis=1)))


def _figures(seconds: list[float], tokens: float) -> dict[str, float]:
    median = statistics.median(seconds)
    return {
        "seconds": median,
        "spread": (max(seconds) - min(seconds)) / median,
        "tokens_per_second": tokens / median,
    }


def steady_table(results: dict[str, Any]) -> Table:
    """The figures for reading."""
    title = (
        f"{results['device']}, {results['cores']} cores; {results['weights']} weights, "
        f"batch {results['batch']}, context {results['context']} of {results['capacity']}; "
        f"memory reads {results['read_bandwidth'] / 1e9:.1f} GB/s"
    )
    table = Table("", "ms", "spread", "tok/s", "of bandwidth", title=title)
    for name in ("prefill", *(f"decode_{sampler}" for sampler in SAMPLERS)):
        row = results[name]
        label = f"prefill of {row['tokens']}" if name == "prefill" else name.replace("_", ", ")
        share = f"{row['share_of_bandwidth']:.0%}" if "share_of_bandwidth" in row else ""
        table.add_row(
            label,
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['spread']:.0%}",
            f"{row['tokens_per_second']:.1f}",
            share,
        )
    table.add_row("floor of a step", f"{results['floor'] * 1e3:.1f}", "", "", "100%")
    table.add_row("first decode call", f"{results['compile_decode'] * 1e3:.0f}", "", "", "")
    return table


# Start-up.


def start_up(args: argparse.Namespace) -> dict[str, Any]:
    """Time from command to first token and to the end, cold and warm, and peak anonymous memory."""
    with tempfile.TemporaryDirectory() as cache:
        runs = {name: _command(args, cache) for name in ("cold", "warm")}
    return {"model": args.model or "weights/tiny", "new_tokens": args.new_tokens, **runs}


def _command(args: argparse.Namespace, cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "entropix_jax.main", "--prompt", "Once upon a time"]
    command += ["--no-chat", "--ignore-eos", "--max-new-tokens", str(args.new_tokens)]
    command += ["--model", args.model] if args.model else []
    command += ["--dtype", args.dtype] if args.dtype else []
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
        peak = max(peak, _anonymous_bytes(process.pid))
        # The trace's second line is the first token.
        if first is None and trace.exists() and trace.read_bytes().count(b"\n") > 1:
            first = time.perf_counter() - started
        time.sleep(_SAMPLE_SECONDS)
    seconds = time.perf_counter() - started
    if process.returncode:
        message = process.stderr.read().decode() if process.stderr else ""
        sys.exit(f"the command failed with status {process.returncode}: {message}")
    return {"first_token": first or seconds, "seconds": seconds, "anonymous_bytes": peak}


def _anonymous_bytes(pid: int) -> int:
    """What a process holds that is not backed by a file (Linux's RssAnon)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


def start_up_table(results: dict[str, Any]) -> Table:
    """The figures for reading."""
    title = f"{results['model']}, {results['new_tokens']} tokens"
    table = Table("", "first token, s", "whole run, s", "peak RssAnon, GB", title=title)
    for name in ("cold", "warm"):
        run = results[name]
        table.add_row(
            f"{name} compile cache",
            f"{run['first_token']:.2f}",
            f"{run['seconds']:.2f}",
            f"{run['anonymous_bytes'] / 1e9:.2f}",
        )
    return table


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start-up", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--prefill", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = start_up(args) if args.start_up else benchmark(args)
    Console(width=110).print(start_up_table(results) if args.start_up else steady_table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
