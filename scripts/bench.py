"""Measures speed, beside what the machine allows and the other engines that are installed.

    python scripts/bench.py step     decode steps, and the sampler alone
    python scripts/bench.py prefill  prompts
    python scripts/bench.py batch    prompts and budgets of many lengths through slots
    python scripts/bench.py sweep    64 settings side by side, and one after another
    python scripts/bench.py start    from the command to the first token; compiling; loading

`1b` is Llama-3.2-1B's shape with random weights, the default of `step` and `prefill`; the others
take `tiny`. Any other MODEL is a name, a folder, a GGUF file or a hub id. Contestants take turns;
figures are medians, a spread is (max - min) / median, ratios are medians of the rounds' ratios.
The floor of a step or prompt is the time that the machine needs to read or to multiply what it has
to. `forward + argmax` is the model alone. `greedy` runs the sampler's whole program.
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from llama_1b import LLAMA_3_2_1B
from peers import Peer, find_peers, require_transformers
from rich.console import Console
from rich.table import Table
from start_up import loading, run_generate, write_model
from timing import Figures, Timed, describe_machine, seconds_of, take_turns

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.engine.decode import decode_here, prefill
from entropix_jax.engine.engine import Engine
from entropix_jax.engine.preparation import (
    DECODE_WINDOW,
    MAX_STEPS,
    PREFILL_WINDOW,
    bucket,
    calibrate_sampler,
)
from entropix_jax.engine.prompts import TOGETHER, may_join
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.state import DecodeState, Recording, init_state
from entropix_jax.errors import UserError
from entropix_jax.host.compile_cache import use_compilation_cache
from entropix_jax.model.cache import KVCache, cache_dtype, init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.linear import Weight, arranged, quantized
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.loading import TINY, LanguageModel, default_model, load
from entropix_jax.model.params import PACKED, Params, init_params, pack
from entropix_jax.model.precision import ACTIVATIONS, INT8, Precision, choose_precision
from entropix_jax.names import BOXES
from entropix_jax.sampler.calibration import generic_calibration
from entropix_jax.sampler.keys import row_key
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler

RANDOM_1B = "1b"
DEFAULT, GREEDY, MIN_P, BARE = "entropix", "greedy", "min-p", "forward + argmax"
TYPES = ("bfloat16", "float32", INT8)
NOBODY = np.full(1, -1, np.int32)  # no token ends a row


# Steps and prompts of this package.


@dataclass(frozen=True)
class Model:
    """Weights and how they are computed with; `source` is None where they are random."""

    config: ModelConfig
    params: Params
    precision: Precision
    source: Path | None = None

    @classmethod
    def of(cls, name: str, weights: str | None, activations: str | None = None) -> "Model":
        """A model by its name, its weights in a type of memory."""
        if name == RANDOM_1B:
            return cls.random(LLAMA_3_2_1B, weights or "bfloat16", activations)
        model = load(name, weights, precision=activations)
        return cls(model.config, model.params, model.precision, model.folder)

    @classmethod
    def random(cls, config: ModelConfig, weights: str, activations: str | None = None) -> "Model":
        """Random weights of a shape."""
        precision = choose_precision(weights, activations=activations)
        dtype = precision.activations if weights == INT8 else precision.weights

        def weight(array: jax.Array) -> Weight:
            small = quantized(array) if weights == INT8 and array.ndim == 2 else array
            return arranged(small) if jax.default_backend() == "cpu" else small

        params = jax.tree.map(weight, init_params(config, jax.random.key(0), dtype))
        if jax.default_backend() in PACKED:
            params = replace(params, layers=tuple(map(pack, params.layers)))
        return cls(config, params, precision)

    def floor(self, machine: dict[str, Any], rows: int, context: int, tokens: int = 1) -> float:
        """The fewest seconds that `tokens` more tokens of each row can take: every weight and the
        used cache is read once, and every product is computed."""
        config = self.config
        slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        size = sum(x.nbytes for x in jax.tree.leaves(self.params))
        size += rows * context * slot * cache_dtype(self.precision.activations).itemsize
        matrices = sum(x.size for x in jax.tree.leaves(self.params) if x.ndim == 2)
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
        operations = rows * tokens * (2 * matrices + attention)
        rate = machine[str(self.precision.activations)]
        return max(size / machine["read"], operations / rate)

    def state(
        self, rows: Sequence[Sampler], context: int, capacity: int, lanes: int = 0
    ) -> DecodeState:
        """Rows with `context` random tokens each, none of them cached."""
        batch = len(rows)
        tokens = np.random.default_rng(0).integers(0, self.config.vocab_size, (batch, context))
        return init_state(
            self.config,
            tokens.tolist(),
            [capacity - context] * batch,
            np.stack([row_key(0, str(row)) for row in range(batch)]),
            jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(self._settings, rows)),
            NOBODY,
            capacity=capacity,
            dtype=self.precision.activations,
            lanes=lanes,
        )

    def decode(
        self,
        rows: Sequence[Sampler],
        context: int,
        steps: int,
        capacity: int | None = None,
        lanes: int = 0,
    ) -> Timed:
        """Times a step of rows that each have a sampler, on a device with so many lanes."""
        capacity = capacity or bucket(context + steps, 256)
        run = partial(
            decode_here(),
            config=self.config,
            window=min(bucket(context + steps, DECODE_WINDOW), capacity),
            max_steps=max(MAX_STEPS, steps),
            recording=Recording(),
        )

        def seconds() -> float:
            state = self.state(rows, context, capacity, lanes)
            state = jax.block_until_ready(
                replace(state, cache=_filled(state.cache, jnp.int32(context - 1)))
            )
            ran, forked = 0, False
            started = time.perf_counter()
            for _ in range(2 * steps):  # a call may find that the lanes are needed, or are not
                state, packed, needs_lanes = jax.block_until_ready(
                    run(self.params, state, jnp.int32(steps - ran), lanes=forked)
                )
                records = jax.device_get(packed).unpack()
                ran, forked = ran + int(records.live.any(axis=1).sum()), bool(needs_lanes)
                if ran == steps:
                    return (time.perf_counter() - started) / steps
            raise UserError(f"only {ran} of {steps} steps ran: give --steps {ran}")

        return seconds

    def bare(self, batch: int, context: int, steps: int) -> Timed:
        """Times a step of the model alone, with the most likely token as the next one."""
        capacity = bucket(context + steps, 256)
        window, config = min(bucket(context + steps, DECODE_WINDOW), capacity), self.config

        @partial(jax.jit, donate_argnums=1)
        def run(params: Params, cache: KVCache, token: jax.Array) -> Any:
            def step(_: int, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
                token, cache = carry
                count = jnp.ones_like(token)
                hidden, _attention, cache = forward(
                    params, config, token[:, None], count, cache, window=window
                )
                return jnp.argmax(unembed(params, hidden[:, 0]), -1).astype(jnp.int32), cache

            return lax.fori_loop(0, steps, step, (token, cache))

        def seconds() -> float:
            cache = init_cache(config, batch, capacity, self.precision.activations)
            cache = jax.block_until_ready(_filled(cache, jnp.int32(context - 1)))
            token = jnp.arange(batch, dtype=jnp.int32)
            return seconds_of(lambda: run(self.params, cache, token)) / steps

        return seconds

    def prefill(self, tokens: int, rows: int = 1) -> Timed:
        """Times the reading of a prompt into an empty cache, as one of so many that are read in
        one call."""
        capacity = bucket(tokens + 1, PREFILL_WINDOW)
        count = jnp.full(rows, tokens, jnp.int32)
        window = min(bucket(tokens, PREFILL_WINDOW), capacity)
        slots = None if rows == 1 else jnp.arange(rows, dtype=jnp.int32)

        def seconds() -> float:
            state = jax.block_until_ready(
                self.state([load_sampler(DEFAULT)] * rows, tokens, capacity)
            )
            prompts = jnp.asarray(state.history[:, :tokens])
            where = {"config": self.config, "window": window}
            call = partial(prefill, self.params, state, prompts, count, slots, **where)
            return seconds_of(call) / rows

        return seconds

    def products(self, batch: int) -> Timed:
        """Times the products of `batch` vectors with every matrix, and nothing else."""
        matrices = [x for x in jax.tree.leaves(self.params) if x.ndim == 2]
        dtype = self.precision.activations

        @jax.jit
        def multiply(matrices: list[jax.Array]) -> list[jax.Array]:
            ones = {x.shape[1]: jnp.ones((batch, x.shape[1]), dtype) for x in matrices}
            return [
                jnp.dot(ones[x.shape[1]], x.astype(dtype).T, preferred_element_type=jnp.float32)
                for x in matrices
            ]

        return lambda: seconds_of(lambda: multiply(matrices))

    def compile(self) -> float:
        """Seconds to trace, lower and compile a step and the reading of a prompt."""
        jax.clear_caches()
        return self.decode([load_sampler(DEFAULT)], 128, 1)() + self.prefill(128)()

    def _settings(self, sampler: Sampler) -> Any:
        return sampler.resolve(generic_calibration()).settings(
            num_layers=self.config.num_layers,
            epsilon=2.0**-23,
            encode=lambda text: [1, 2, 3],
            token_texts=list,
            vocab_size=self.config.vocab_size,
        )


@partial(jax.jit, donate_argnums=0)
def _filled(cache: KVCache, length: jax.Array) -> KVCache:
    """Rows that hold `length` tokens each: random numbers, which cost what true ones would."""
    keys = iter(jax.random.split(jax.random.key(1), 2 * len(cache.keys)))

    def noise(like: jax.Array) -> jax.Array:
        return jax.random.normal(next(keys), like.shape, like.dtype)

    return replace(
        cache,
        keys=tuple(map(noise, cache.keys)),
        values=tuple(map(noise, cache.values)),
        length=jnp.full_like(cache.length, length),
    )


def without_branches(name: str) -> Sampler:
    """A preset whose rows explore where they would branch."""
    return load_sampler(name).with_values({"branch.per_row": 0})


def branching(everywhere: bool, depth: int, width: int) -> Sampler:
    """A sampler whose rows branch at every step, or never."""
    return load_sampler(DEFAULT).with_values(
        {
            **{f"regimes.{box}": ["entropy < -1"] for box in BOXES},
            **({"regimes.lehv": ["entropy > -1"]} if everywhere else {}),
            "arms.mid": "sample",
            "loop.max_period": 0,
            "branch.commit_all": False,
            "branch.max_share": 1e6,
            "branch.depth": depth,
            "branch.width": width,
            "branch.min_p": 0.0,
            "branch.top_p": 1.0,
        }
    )


def measure_steps(args: argparse.Namespace, figures: Figures, scratch: Path) -> None:
    """Steps of every type of weights, batch and context, then the sampler alone."""
    for weights in args.weights:
        model = Model.of(args.model or RANDOM_1B, weights, args.precision)
        peers = list(find_peers(model.config, weights, model.source, scratch))
        points = [(batch, args.context[0]) for batch in args.batch]
        if not args.branching:
            points += [(args.batch[0], context) for context in args.context[1:]]
        for batch, context in points:
            if context + args.steps > model.config.max_positions:
                continue
            on_cpu = figures.machine["platform"] == "cpu"
            steps = max(2, args.steps // max(1, batch // 4)) if on_cpu else args.steps
            if args.branching:
                rows = [branching(True, args.depth, args.width)] * args.branching
                others = [branching(False, args.depth, args.width)] * (batch - len(rows))
                lanes = len(rows) * (args.width - 1)
                none = [branching(False, args.depth, args.width)] * batch
                contestants = {
                    "none branches": model.decode(none, context, steps, lanes=lanes),
                    f"{len(rows)} branch": model.decode(rows + others, context, steps, lanes=lanes),
                    "those alone": model.decode(rows, context, steps, lanes=lanes),
                }
            else:
                contestants = step_contestants(model, peers, batch, context, steps)
            floor = model.floor(figures.machine, batch, context)
            what = {"kind": "step", "weights": weights, "batch": batch, "context": context}
            figures.measure(contestants, tokens=batch, floor=floor, **what)
            del contestants
            gc.collect()
        if args.slots:
            contestants = {
                f"{DEFAULT}, {slots} slots": model.decode(
                    [without_branches(DEFAULT)], 128, 8, slots
                )
                for slots in args.slots
            }
            figures.measure(contestants, kind="slots", weights=weights, batch=1, context=128)
        peers.clear()
        vocabulary = model.config.vocab_size
        del model
        gc.collect()
    if args.branching:
        return
    # All of a step but the model: that of a model which is next to nothing.
    narrow = replace(
        LLAMA_3_2_1B,
        vocab_size=vocabulary,
        width=8,
        mlp_width=8,
        head_dim=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
    )
    model = Model.random(narrow, "float32")
    for batch in args.batch:
        contestants = step_contestants(model, [], batch, 128, args.steps)
        figures.measure(contestants, kind="sampler alone", batch=batch, context=128)


def step_contestants(
    model: Model, peers: Sequence[Peer], batch: int, context: int, steps: int
) -> dict[str, Timed]:
    """This package's steps, the model alone, and the other engines'."""
    contestants: dict[str, Timed] = {
        name: model.decode([without_branches(name)] * batch, context, steps)
        for name in (DEFAULT, GREEDY, MIN_P)
    }
    contestants[BARE] = model.bare(batch, context, steps)
    if batch > 1 and model.precision.weights == model.precision.activations:
        contestants["products alone"] = model.products(batch)
    for peer in peers:
        if timed := peer.decode(batch, context, steps):
            contestants[peer.name] = timed
    return contestants


def measure_prompts(args: argparse.Namespace, figures: Figures, scratch: Path) -> None:
    """Prompts of every type of weights and length."""
    for weights in args.weights:
        model = Model.of(args.model or RANDOM_1B, weights, args.precision)
        peers = list(find_peers(model.config, weights, model.source, scratch))
        for tokens in args.tokens:
            contestants = {"entropix_jax": model.prefill(tokens)}
            if may_join(tokens, bucket(tokens, PREFILL_WINDOW)):
                contestants[f"{TOGETHER} in one call, each"] = model.prefill(tokens, TOGETHER)
            for peer in peers:
                if timed := peer.prefill(tokens):
                    contestants[peer.name] = timed
            floor = model.floor(figures.machine, 1, tokens // 2, tokens)
            what = {"kind": "prompt", "weights": weights, "batch": 1, "context": tokens}
            figures.measure(contestants, tokens=tokens, floor=floor, **what)
        del model, peers, contestants
        gc.collect()


# Batches and sweeps.


@dataclass(frozen=True)
class Ran:
    """What became of some requests."""

    seconds: float
    rows: list[Row]
    used: float  # share of slot-steps that had a running row

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


def run_rows(model: LanguageModel, work: Sequence[Request], slots: int, capacity: int) -> Ran:
    """Runs requests through so many slots."""
    rows = [Row(request) for request in work]
    started = time.perf_counter()
    engine = Engine(model, slots=slots, capacity=capacity)
    for _ in engine.run(rows):
        pass
    return Ran(time.perf_counter() - started, rows, engine.used)


def measure_batch(args: argparse.Namespace) -> dict[str, Any]:
    """Random prompts and budgets through slots, some of them one by one, and `transformers` in
    static batches, which wait for their longest row."""
    if args.transformers:
        require_transformers()
    model = load(args.model or TINY, args.weights[0] if args.weights else "float32")
    rng = np.random.default_rng(0)
    greedy, default = (calibrate_sampler(load_sampler(name), model) for name in (GREEDY, DEFAULT))
    requests = [
        Request(
            rng.integers(0, model.tokenizer.vocab_size, rng.integers(8, 513)).tolist(),
            greedy,
            row_id=str(i),
            max_new_tokens=int(rng.integers(4, 257)),
        )
        for i in range(args.records)
    ]
    found: dict[str, Any] = {}
    table = Table("", "seconds", "tokens", "tok/s", "useful slot-steps", title=str(model.folder))

    def add(label: str, seconds: float, tokens: int, used: float) -> None:
        found[label] = {"seconds": seconds, "tokens": tokens, "used": used}
        rate = f"{tokens / seconds:.0f}"
        table.add_row(label, f"{seconds:.1f}", str(tokens), rate, f"{used:.1%}")

    for sampler in (default, greedy):
        for slots, some in ((args.slots, requests), (1, requests[:16])):
            work = [replace(request, sampler=sampler) for request in some]
            run_rows(model, work, slots, 1024)  # compiles for each length
            ran = run_rows(model, work, slots, 1024)
            label = f"{slots} slots" if slots > 1 else f"{len(some)} one by one"
            add(f"{sampler.name}, {label}", ran.seconds, ran.tokens, ran.used)
    if args.transformers:
        label = f"transformers, batches of {args.slots}"
        add(label, *_static_batches(model.folder, requests, args.slots))
    Console().print(table)
    return found


def _static_batches(
    folder: Path, requests: Sequence[Request], size: int
) -> tuple[float, int, float]:
    """Seconds, tokens, and the share of steps that were of use, of `transformers` in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    started, steps = time.perf_counter(), 0
    for first in range(0, len(requests), size):
        batch = requests[first : first + size]
        longest = max(len(request.prompt) for request in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, request in enumerate(batch):
            ids[i, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[i, longest - len(request.prompt) :] = 1
        new = max(request.max_new_tokens for request in batch)
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=new, **options)
        steps += new * len(batch)
    tokens = sum(request.max_new_tokens for request in requests)
    return time.perf_counter() - started, tokens, tokens / steps


def measure_sweep(args: argparse.Namespace) -> dict[str, Any]:
    """A grid of 8 x 8 settings, one row of each: in one batch, and row after row."""
    model = load(args.model or TINY, args.weights[0] if args.weights else "float32")
    prompt = model.tokenizer.encode("Once upon a time", add_bos=True)
    grid = itertools.product(np.linspace(5, 60, 8), np.linspace(0, 0.6, 8))
    base, work = load_sampler(DEFAULT), []
    for percent, weight in grid:
        values = {"thresholds.h1": f"{percent:.4g}%", "adaptive.temperature_logits": float(weight)}
        sampler = calibrate_sampler(base.with_values(values), model)
        work.append(Request(prompt, sampler, max_new_tokens=args.tokens, row_id="row"))
    capacity = -(-(len(prompt) + args.tokens) // 64) * 64
    rows: dict[str, list[Row]] = {}

    def together() -> float:
        ran = run_rows(model, work, len(work), capacity)
        rows["together"] = ran.rows
        return ran.seconds

    def alone() -> float:
        runs = [run_rows(model, [one], 1, capacity) for one in work]
        rows["alone"] = [row for ran in runs for row in ran.rows]
        return sum(ran.seconds for ran in runs)

    alone()
    programs = -decode_here()._cache_size()
    together()
    programs += decode_here()._cache_size()
    seconds = take_turns({"side by side": together, "one by one": alone}, args.repeats)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    faster = statistics.median(
        a / b for a, b in zip(seconds["one by one"], seconds["side by side"], strict=True)
    )
    same = sum(
        [t.token_id for t in a.tokens] == [t.token_id for t in b.tokens]
        for a, b in zip(rows["together"], rows["alone"], strict=True)
    )
    for name, median in medians.items():
        print(f"{len(work)} settings, {args.tokens} tokens each, {name}: {median:.2f} s")
    print(f"times as fast side by side: {faster:.1f}; programs compiled for it: {programs}")
    print(f"rows with the same tokens both ways: {same} of {len(work)}")
    return {"seconds": medians, "times_as_fast": faster, "programs": programs, "same": same}


# Start-up.


def measure_start(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Of each model: the command with an empty compile cache and with a filled one; compiling a
    step and a prompt; and loading weights, beside reading their file."""
    table = Table("model", "compile cache", "first token, s", "whole run, s", "peak memory, GB")
    for name in ("compiling, s", "loading, s", "reading the file, s"):
        table.add_column(name)
    names = [args.model] if args.model else list(dict.fromkeys((TINY, default_model())))
    found: list[dict[str, Any]] = []
    jax.config.update("jax_compilation_cache_dir", str(scratch / "own"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    for name in names:
        weights = args.weights[0] if args.weights else None
        model = Model.of(name, weights)
        folder = model.source
        if folder is None:
            folder = scratch / "random"
            write_model(folder, model.params, model.config)
        load_seconds, read_seconds = loading(model.config, folder)
        cache = scratch / f"cache-{len(found)}"
        for number, state in enumerate(("empty", "filled")):
            row: dict[str, Any] = {"model": name, "cache": state, "compiling": model.compile()}
            row |= run_generate(str(folder) if name == RANDOM_1B else name, weights, cache)
            row |= {"loading": load_seconds, "reading": read_seconds} if not number else {}
            found.append(row)
            table.add_row(
                *(name, state, f"{row['first_token']:.2f}", f"{row['seconds']:.2f}"),
                *(f"{row['peak_bytes'] / 1e9:.2f}", f"{row['compiling']:.1f}"),
                *(f"{row[key]:.2f}" if row.get(key) else "" for key in ("loading", "reading")),
            )
        del model
        gc.collect()
    Console(width=120).print(table)
    return found


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", help="see above")
    common.add_argument("--weights", nargs="+", choices=TYPES, help="types in memory")
    common.add_argument("--precision", choices=ACTIVATIONS, help="of hidden states and cache")
    common.add_argument("--repeats", type=int, default=5, help="rounds")
    common.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    step, prompt, batch, sweep, _ = (
        kinds.add_parser(name, parents=[common])
        for name in ("step", "prefill", "batch", "sweep", "start")
    )
    step.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 64], help="rows")
    step.add_argument(
        "--context",
        nargs="+",
        type=int,
        default=[128, 1024, 4096, 16000],
        help="tokens of a row; all batches have the first number, the first batch the others",
    )
    step.add_argument(
        "--steps", type=int, default=128, help="of one timing; on a CPU fewer of many rows"
    )
    step.add_argument("--slots", nargs="+", type=int, help="also compare caches of such sizes")
    step.add_argument("--branching", type=int, metavar="N", help="let N rows branch all the time")
    step.add_argument("--depth", type=int, default=8, help="tokens of a branch")
    step.add_argument("--width", type=int, default=4, help="branches of a row")
    prompt.add_argument("--tokens", nargs="+", type=int, default=[128, 512])
    batch.add_argument("--slots", type=int, default=32)
    batch.add_argument("--records", type=int, default=400, help="prompts")
    batch.add_argument("--transformers", action="store_true", help="needs the extra 'parity'")
    sweep.add_argument("--tokens", type=int, default=100, help="that each row generates")
    return parser


def main() -> int:
    """The command line."""
    args = _parser().parse_args()
    if args.kind != "start":
        use_compilation_cache()
    with tempfile.TemporaryDirectory() as scratch:
        if args.kind in ("step", "prefill"):
            figures = Figures(args.repeats, describe_machine())
            both = figures.machine["platform"] == "cpu"
            args.weights = args.weights or TYPES[: 2 if both else 1]
            measure = measure_steps if args.kind == "step" else measure_prompts
            measure(args, figures, Path(scratch))
            figures.console.print(figures.table())
            found: Any = {"machine": figures.machine, "rows": figures.rows}
        elif args.kind == "start":
            found = measure_start(args, Path(scratch))
        else:
            found = (measure_batch if args.kind == "batch" else measure_sweep)(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
