"""Measures speed beside what the machine allows and what a user would run instead, at
Llama-3.2-1B's shape with random weights or of a real model.

    python scripts/benchmark.py [--model MODEL] [--only KIND ...] [--weights TYPE ...]
                                [--batch B ...] [--context N ...] [--prefill N ...] [--steps N]
                                [--repeats N] [--gpt-fast DIR] [--entropix DIR] [--json FILE]
    python scripts/benchmark.py --start-up [--model MODEL] [--new-tokens N] [--json FILE]

The first form measures the machine's bandwidth and matrix rate, then, in turns with each other,
decoding with the full sampler (no branching) and greedily, prompts, the sampler alone, a step in a
large cache, compiling and loading; and, in the same turns, the peers that are there:
`transformers`, llama.cpp (a `llama-bench` on the path), and checkouts of gpt-fast and
xjdr-alt/entropix. Of a MODEL, which is a name, a folder, a GGUF file or a hub id, the peers are
`transformers` and, where it is a GGUF file, llama.cpp with the weights in it. Figures are medians,
spreads (max - min) / median, ratios medians of the rounds' ratios. At the end stand the goals that
the project has set itself.

The second form runs the command itself, with an empty compile cache and with a filled one, and
watches the anonymous memory that it holds. Without --model it is `tiny`.
"""

import argparse
import gc
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from benchmarks.goals import goals_at_1b, goals_of_model, goals_table
from benchmarks.machine import copy_bandwidth, describe, matrix_rate, read_bandwidth
from benchmarks.ours import Ours
from benchmarks.peers import Peer, peers_at, peers_of
from benchmarks.shape import LLAMA_3_2_1B
from benchmarks.start_up import loading, start_up, write_random_model
from benchmarks.timing import Timed, figures, ratio, take_turns
from rich.console import Console
from rich.table import Table

from entropix_jax.commandline import EXIT_OK, run_command
from entropix_jax.loading import TINY, load

KINDS = ("decode", "context", "prefill", "sampler", "capacity", "compile", "load")
FULL, GREEDY = "entropix", "greedy"
# A step in a short text is compared in caches of these sizes.
USED, SMALL, LARGE = 128, 256, 16384


class Benchmark:
    """The figures as they come, one row each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[dict[str, Any]] = []
        self.console = Console(width=110)
        self.machine = describe() | {
            "read_bandwidth": read_bandwidth(),
            "copy_bandwidth": copy_bandwidth(),
            "matrix_rate": {name: matrix_rate(name) for name in ("float32", "bfloat16")},
        }

    def measure(
        self,
        kind: str,
        contestants: dict[str, Timed],
        units: int,
        floor: float | None,
        **what: Any,
    ) -> None:
        """Times the contestants in turns; `units` are the tokens of one call, the ratios are over
        the first of them."""
        seconds = take_turns(contestants, self.args.repeats)
        first = next(iter(contestants))
        for name, times in seconds.items():
            row = {"kind": kind, **what, "engine": name, **figures(times)}
            row["tokens_per_second"] = units / row["seconds"]
            row["times_as_long"] = ratio(times, seconds[first])
            if floor is not None:
                row["floor"] = floor
                row["share_of_floor"] = floor / row["seconds"]
            self.rows.append(row)
            self.console.print(_line(row))

    def of_weights(self, weights: str, scratch: Path) -> None:
        """All kinds with weights of one type."""
        name = self.args.model
        ours = Ours.of(load(name, dtype=weights)) if name else Ours.random(LLAMA_3_2_1B, weights)
        dtype = str(ours.precision.activations)
        rate, bandwidth = self.machine["matrix_rate"][dtype], self.machine["read_bandwidth"]
        args = self.args

        def step_floor(batch: int, context: int) -> float:
            flops = batch * ours.token_flops(context)
            return max(ours.step_bytes(batch, context) / bandwidth, flops / rate)

        def engines(batch: int, context: int, steps: int) -> dict[str, Timed]:
            capacity = 1 << (context + args.steps).bit_length()
            return {
                name: ours.decode(name, batch, context, capacity, steps) for name in (FULL, GREEDY)
            }

        others: list[Peer] = []
        if {"decode", "context", "prefill"} & set(args.only):
            if ours.source is not None:
                others = list(peers_of(ours.source, weights))
            else:
                checkouts = {"gpt_fast": args.gpt_fast, "entropix": args.entropix}
                others = list(peers_at(ours.config, weights, scratch, **checkouts))

        def beside(measured: Callable[[Peer], Timed | None]) -> dict[str, Timed]:
            offered = {peer.name: measured(peer) for peer in others}
            return {name: timed for name, timed in offered.items() if timed is not None}

        points = [("decode", batch, args.context[0]) for batch in args.batch]
        points += [("context", 1, context) for context in args.context[1:]]
        longest = ours.config.max_positions - args.steps
        points = [point for point in points if point[2] <= longest]
        for kind, batch, context in points:
            if kind not in args.only:
                continue
            steps = max(2, args.steps // max(1, batch // 4))
            contestants = engines(batch, context, steps)
            contestants |= beside(lambda peer: peer.decode(batch, context, steps))  # noqa: B023
            if batch > 1 and ours.precision.weights == ours.precision.activations:
                contestants["products alone"] = ours.products(batch)
            what = {"weights": weights, "batch": batch, "context": context}
            self.measure(kind, contestants, batch, step_floor(batch, context), **what)
            del contestants
            gc.collect()
        for tokens in args.prefill if "prefill" in args.only else ():
            contestants = {"entropix_jax": ours.prefill(1, tokens)}
            contestants |= beside(lambda peer: peer.prefill(1, tokens))  # noqa: B023
            floor = max(tokens * ours.token_flops(tokens // 2) / rate, step_floor(1, 0))
            self.measure("prefill", contestants, tokens, floor, weights=weights, context=tokens)
            del contestants
        others.clear()
        gc.collect()
        if weights == args.weights[0]:
            self.once(ours, scratch)

    def once(self, ours: Ours, scratch: Path) -> None:
        """What does not depend on the weights' type."""
        args = self.args
        for batch in args.batch if "sampler" in args.only else ():
            contestants = {name: ours.sampler(name, batch) for name in (FULL, GREEDY)}
            self.measure("sampler", contestants, batch, None, batch=batch)
        if "capacity" in args.only:
            contestants = {
                f"{capacity} slots": ours.decode(
                    FULL, 1, USED, capacity, min(args.steps, SMALL - USED)
                )
                for capacity in (SMALL, LARGE)
            }
            self.measure("capacity", contestants, 1, None, batch=1, context=USED)
            del contestants
        if "load" in args.only and str(ours.precision.weights) == "bfloat16":
            folder = scratch / "random"
            write_random_model(ours, folder)
            size = sum(x.nbytes for x in jax.tree.leaves(ours.params))
            self.measure("load", loading(ours.config, folder), size, None, bytes=size)
            shutil.rmtree(folder)
        if "compile" in args.only:
            self.compiling(ours, scratch)

    def compiling(self, ours: Ours, scratch: Path) -> None:
        """A step and a prompt's reading: with an empty cache, then, in turns, from the cache."""
        jax.config.update("jax_compilation_cache_dir", str(scratch / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        compiling = ours.compiling(1, self.args.context[0], 128)
        runs = [compiling() for _ in range(1 + self.args.repeats)]
        for name, some in (("cold", runs[:1]), ("from the cache", runs[1:])):
            totals = [run["step"] + run["prefill"] for run in some]
            row = {"kind": "compile", "engine": name, **figures(totals), "parts": some[0]}
            self.rows.append(row)
            self.console.print(_line(row))
        jax.config.update("jax_enable_compilation_cache", False)
        parts = ("step", "prefill")
        taken = {part: int(runs[0][f"bytes of the {part}"]) for part in parts}
        self.machine["temporary_bytes"] = taken
        of = ", ".join(f"{taken[part] / 1e6:.0f} MB for a {part}" for part in parts)
        self.console.print(f"beside weights, cache and state: {of}")


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row[key]}" for key in ("kind", "weights") if key in row]
    parts += [f"{key} {row[key]}" for key in ("batch", "context") if key in row]
    text = f"{' · '.join(parts)} · {row['engine']}: {1e3 * row['seconds']:.1f} ms"
    return f"{text} (spread {row['spread']:.0%})"


def table_of(benchmark: Benchmark) -> Table:
    """All figures for reading."""
    machine = benchmark.machine
    rates = machine["matrix_rate"]
    title = (
        f"{machine['device']}, {machine['cores']} cores, JAX {machine['jax']}: reads "
        f"{machine['read_bandwidth'] / 1e9:.1f} GB/s, copies {machine['copy_bandwidth'] / 1e9:.1f} "
        f"GB/s, multiplies {rates['float32'] / 1e9:.0f} GFLOP/s in float32, "
        f"{rates['bfloat16'] / 1e9:.0f} in bfloat16"
    )
    columns = ("", "weights", "batch", "context", "engine", "ms", "spread", "tok/s", "of floor")
    table = Table(*columns, "times ours", title=title)
    last = None
    for row in benchmark.rows:
        where = tuple(row.get(key) for key in ("kind", "weights", "batch", "context"))
        if last is not None and where != last:
            table.add_section()
        last = where
        share = f"{row['share_of_floor']:.0%}" if "share_of_floor" in row else ""
        per_second = row["kind"] not in ("compile", "load", "capacity", "sampler")
        table.add_row(
            *(str(part) if part is not None else "" for part in where),
            row["engine"],
            f"{1e3 * row['seconds']:.1f}",
            f"{row['spread']:.0%}",
            f"{row['tokens_per_second']:.1f}" if per_second else "",
            share,
            f"{row['times_as_long']:.2f}" if "times_as_long" in row else "",
        )
    return table


def start_up_table(model: str, results: dict[str, dict[str, float]]) -> Table:
    """The figures for reading."""
    table = Table("", "first token, s", "whole run, s", "peak RssAnon, GB")
    table.title = model
    for name, run in results.items():
        table.add_row(
            f"{name} compile cache",
            f"{run['first_token']:.2f}",
            f"{run['seconds']:.2f}",
            f"{run['anonymous_bytes'] / 1e9:.2f}",
        )
    return table


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_cpu = jax.default_backend() == "cpu"
    both = ["bfloat16", "float32"]
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="what to measure")
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=[*both, "int8"],
        default=both if on_cpu else both[:1],
        help="their types in memory; transformers has none of 8 bits here",
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 64], help="rows")
    parser.add_argument(
        "--context",
        nargs="+",
        type=int,
        default=[128, 1024, 4096, 16000],
        help="tokens of a row; batches have the first number",
    )
    parser.add_argument("--prefill", nargs="+", type=int, default=[128, 512], help="tokens")
    parser.add_argument("--steps", type=int, default=8, help="between two looks at the clock")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--gpt-fast", type=Path, metavar="DIR", help="a checkout of it")
    parser.add_argument("--entropix", type=Path, metavar="DIR", help="a checkout of xjdr-alt's")
    parser.add_argument("--start-up", action="store_true", help="measure the command itself")
    parser.add_argument(
        "--model", help="instead of the random one; the default of --start-up is the embedded one"
    )
    parser.add_argument("--new-tokens", type=int, default=32, help="of --start-up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    if args.start_up:
        model = args.model or TINY
        results: Any = start_up(model, args.new_tokens)
        Console(width=110).print(start_up_table(model, results))
    else:
        benchmark = Benchmark(args)
        with tempfile.TemporaryDirectory() as scratch:
            for weights in args.weights:
                benchmark.of_weights(weights, Path(scratch))
        if args.model:
            goals = goals_of_model(benchmark.rows)
        else:
            goals = goals_at_1b(benchmark.machine, benchmark.rows)
        benchmark.console.print(table_of(benchmark))
        benchmark.console.print(goals_table(goals))
        results = {"machine": benchmark.machine, "rows": benchmark.rows, "goals": goals}
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
