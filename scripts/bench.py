"""Measures speed, compared with the machine's limits and other installed engines.

    python scripts/bench.py step     decode steps, the sampler without a model, the model without it
    python scripts/bench.py prefill  prompts
    python scripts/bench.py batch    prompts and budgets of many lengths through slots
    python scripts/bench.py search   continuations that fork beside independent ones
    python scripts/bench.py start    from the command to the first token

With `--tree FOLDER --tree FOLDER` before the command it runs in each of these checkouts in turn.
`1b` is Llama-3.2-1B's shape with random weights, the default of `step` and `prefill`; the others
take `tiny`. Any other MODEL is a name, a folder, a GGUF file or a hub id. Contestants take turns;
figures are medians, a spread is (max - min) / median, ratios are medians of the rounds' ratios.
The floor of a step or prompt is the time that the machine needs to read or to multiply what it has
to. `forward + argmax` is the model without the sampler. A failing engine is skipped with a note.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from llama_1b import LLAMA_3_2_1B
from peers import Peer, Transformers, find_peers
from timing import WHERE, Figures, Timed, describe_machine, seconds_of
from tiny.weights import init_params

from entropix_jax.cli.options import EXIT_OK, run_command
from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.methods import METHODS
from entropix_jax.engine.prefill import prefill
from entropix_jax.engine.programs import decode_for_backend
from entropix_jax.engine.prompts import TOGETHER, may_join
from entropix_jax.engine.request import Request
from entropix_jax.engine.search import Method, recording_for, run_searches
from entropix_jax.engine.shapes import (
    MAX_PREFILL,
    MAX_STEPS,
    MIN_CAPACITY,
    PREFILL_WINDOW,
    bucket,
    chunk_size,
)
from entropix_jax.engine.slots import Layout, empty_slots
from entropix_jax.engine.state import RUNNING, DecodeState, Program
from entropix_jax.errors import UserError
from entropix_jax.host.compile_cache import use_compilation_cache
from entropix_jax.host.heap import reuse_memory
from entropix_jax.model.cache import KVCache, cache_dtype, init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.find import TINY
from entropix_jax.model.linear import Weight, arranged, quantized
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.loading import load
from entropix_jax.model.params import Params
from entropix_jax.model.precision import ACTIVATIONS, AUTO, INT8, Precision, choose_precision
from entropix_jax.sampler.calibration import generic_calibration
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.presets import choose_sampler, load_sampler
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import Parts, SamplerSettings

RANDOM_1B = "1b"
DEFAULT, GREEDY, MIN_P = "entropix", "greedy", "min-p"
TYPES = ("bfloat16", "float32", INT8)


@dataclass(frozen=True)
class Model:
    """Weights and how they are computed with; `source` is None if they are random."""

    config: ModelConfig
    params: Params
    precision: Precision
    source: Path | None = None

    @classmethod
    def named(cls, name: str, weights: str, activations: str) -> "Model":
        """Returns a model, its weights in a type of memory."""
        if name == RANDOM_1B:
            return cls.random(LLAMA_3_2_1B, weights, activations)
        model = load(name, weights, precision=activations)
        return cls(model.config, model.params, model.precision, model.folder)

    @classmethod
    def random(cls, config: ModelConfig, weights: str, activations: str = AUTO) -> "Model":
        """Returns random weights of a shape."""
        precision = choose_precision(weights, activations=activations)
        dtype = precision.activations if weights == INT8 else precision.weights

        def weight(array: jax.Array) -> Weight:
            if weights == INT8 and array.ndim == 2:
                array = quantized(array)
            return arranged(array) if jax.default_backend() == "cpu" else array

        params = jax.tree.map(weight, init_params(config, jax.random.key(0), dtype))
        return cls(config, params, precision)

    def floor(self, machine: Mapping[str, Any], rows: int, context: int, tokens: int = 1) -> float:
        """Returns the fewest seconds that `tokens` more tokens of each row can take: every weight
        and the used cache is read once, and every product is computed."""
        config = self.config
        slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        size = sum(x.nbytes for x in jax.tree.leaves(self.params))
        size += rows * context * slot * cache_dtype(self.precision.activations).itemsize
        matrices = sum(x.size for x in jax.tree.leaves(self.params) if x.ndim == 2)
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
        operations = rows * tokens * (2 * matrices + attention)
        rate = machine[str(self.precision.activations)]
        return max(size / machine["read"], operations / rate)

    def state(self, sampler: Sampler, batch: int, context: int, capacity: int) -> DecodeState:
        """Returns rows with `context` random tokens each, none of them cached."""
        tokens = np.random.default_rng(0).integers(0, self.config.vocab_size, (batch, context))
        state = empty_slots(
            self.config,
            Layout(batch, 0, 1),
            self._settings(sampler),
            mechanisms=MECHANISMS,
            capacity=capacity,
            dtype=self.precision.activations,
        )
        return replace(
            state,
            history=state.history.at[:, :context].set(tokens),
            prompt_length=jnp.full_like(state.prompt_length, context),
            budget=jnp.full_like(state.budget, capacity - context),
            status=jnp.full_like(state.status, RUNNING),
        )

    def decode(self, name: str, batch: int, context: int, steps: int) -> Timed:
        """Times a step with a preset, whose rows explore where they would branch."""
        preset, *changes = name.split()
        sampler = choose_sampler(preset, changes).with_values({"branch.per_row": 0})
        capacity = bucket(context + steps, 256)
        used = sampler.parts(self._settings(sampler)).used
        program = Program(Parts(MECHANISMS, used), capacity)
        run = partial(decode_for_backend(), config=self.config, max_steps=max(MAX_STEPS, steps))

        def seconds() -> float:
            state = self.state(sampler, batch, context, capacity)
            state = replace(state, cache=_filled(state.cache, jnp.int32(context - 1)))
            state = jax.block_until_ready(state)
            started = time.perf_counter()
            done = run(self.params, state, jnp.int32(steps), program=program)
            _, records, _ = jax.block_until_ready(done)
            elapsed = time.perf_counter() - started
            ran = int(np.asarray(records.live).any(axis=1).sum())
            if ran < steps:
                raise UserError(f"only {ran} of {steps} steps ran: give --steps {ran}")
            return elapsed / steps

        return seconds

    def bare(self, batch: int, context: int, steps: int, *, stats: bool = False) -> Timed:
        """Times a step of the model and an argmax, with or without attention's statistics."""
        capacity = bucket(context + steps, 256)
        config = self.config

        @partial(jax.jit, donate_argnums=1)
        def run(params: Params, cache: KVCache, token: jax.Array) -> Any:
            def step(_: int, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
                token, cache = carry
                count = jnp.ones_like(token)
                hidden, attention, cache = forward(
                    params, config, token[:, None], count, cache, window=capacity
                )
                logits = unembed(params, hidden[:, 0])
                if stats:
                    logits += 1e-30 * sum(map(jnp.sum, jax.tree.leaves(attention)))
                return jnp.argmax(logits, -1).astype(jnp.int32), cache

            return lax.fori_loop(0, steps, step, (token, cache))

        def seconds() -> float:
            cache = init_cache(config, batch, capacity, self.precision.activations)
            cache = jax.block_until_ready(_filled(cache, jnp.int32(context - 1)))
            token = jnp.arange(batch, dtype=jnp.int32)
            return seconds_of(lambda: run(self.params, cache, token)) / steps

        return seconds

    def prefill(self, tokens: int, rows: int = 1) -> Timed:
        """Times one of `rows` prompts that are read together, in the engine's parts."""
        capacity = bucket(tokens + 1, PREFILL_WINDOW)
        size = min(bucket(tokens, PREFILL_WINDOW), chunk_size(self.config, tokens, 1, MAX_PREFILL))
        slots = None if rows == 1 else jnp.arange(rows, dtype=jnp.int32)

        def seconds() -> float:
            state = self.state(load_sampler(DEFAULT), rows, tokens, capacity)
            text = np.zeros((rows, -tokens // size * -size), np.int32)
            text[:, :tokens] = state.history[:, :tokens]

            def read(state: DecodeState) -> DecodeState:
                for start in range(0, tokens, size):
                    count = jnp.full(rows, min(size, tokens - start), jnp.int32)
                    window = min(bucket(start + size, PREFILL_WINDOW), capacity)
                    given = self.params, state, text[:, start : start + size], count, slots
                    state = prefill(*given, config=self.config, window=window)
                return state

            return seconds_of(partial(read, jax.block_until_ready(state))) / rows

        return seconds

    def _settings(self, sampler: Sampler) -> SamplerSettings:
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


def ask_peers(peers: Sequence[Peer], ask: Callable[[Peer], Timed | None]) -> dict[str, Timed]:
    """Returns what `ask` returns for each engine, without those that return None."""
    return {peer.name: timed for peer in peers if (timed := ask(peer)) is not None}


def measure_steps(args: argparse.Namespace, figures: Figures, scratch: Path) -> None:
    """Measures steps of every type of weights, batch and context, then the sampler alone."""
    on_cpu = figures.machine["platform"] == "cpu"
    narrow = replace(LLAMA_3_2_1B, width=8, mlp_width=8, head_dim=8)
    narrow = replace(narrow, num_layers=1, num_heads=1, num_kv_heads=1)
    for weights in args.weights:
        model = Model.named(args.model or RANDOM_1B, weights, args.precision)
        peers = [*find_peers(model.config, weights, model.source, scratch)]
        points = [(batch, args.context[0]) for batch in args.batch]
        points += [(args.batch[0], context) for context in args.context[1:]]
        for batch, context in points:
            if context + args.steps > model.config.max_positions:
                continue
            steps = max(2, args.steps // max(1, batch // 4)) if on_cpu else args.steps
            own = {name: model.decode(name, batch, context, steps) for name in args.samplers}
            own["forward + argmax"] = model.bare(batch, context, steps)
            own["with attention's statistics"] = model.bare(batch, context, steps, stats=True)
            others = ask_peers(peers, lambda peer: peer.decode(batch, context, steps))  # noqa: B023
            floor = model.floor(figures.machine, batch, context)
            what = {"kind": "step", "weights": weights, "batch": batch, "context": context}
            figures.measure(own, others, tokens=batch, floor=floor, **what)
        narrow = replace(narrow, vocab_size=model.config.vocab_size)
        del model, peers, own, others
        gc.collect()
    # The sampler's share of a step: a step of a very small model.
    model = Model.random(narrow, "float32")
    for batch in args.batch:
        own = {name: model.decode(name, batch, 128, args.steps) for name in args.samplers}
        figures.measure(own, kind="sampler alone", batch=batch, context=128)


def measure_prompts(args: argparse.Namespace, figures: Figures, scratch: Path) -> None:
    """Measures prompts of every type of weights and length."""
    for weights in args.weights:
        model = Model.named(args.model or RANDOM_1B, weights, args.precision)
        peers = [*find_peers(model.config, weights, model.source, scratch)]
        for tokens in args.tokens:
            own = {"entropix_jax": model.prefill(tokens)}
            if may_join(tokens, bucket(tokens, PREFILL_WINDOW)):
                own[f"{TOGETHER} in one call, each"] = model.prefill(tokens, TOGETHER)
            others = ask_peers(peers, lambda peer: peer.prefill(tokens))  # noqa: B023
            floor = model.floor(figures.machine, 1, tokens // 2, tokens)
            what = {"kind": "prompt", "weights": weights, "batch": 1, "context": tokens}
            figures.measure(own, others, tokens=tokens, floor=floor, **what)
        del model, peers, own, others
        gc.collect()


def measure_batch(args: argparse.Namespace, figures: Figures, scratch: Path) -> None:
    """Measures random prompts and budgets through slots, the first of them one by one, and
    `transformers` in static batches, which wait for their longest row."""
    weights = args.weights[0] if args.weights else "float32"
    model = load(args.model or TINY, weights, precision=args.precision)
    rng = np.random.default_rng(0)
    samplers = [calibrate_sampler(load_sampler(name), model) for name in args.samplers]
    requests = [
        Request(
            rng.integers(0, model.tokenizer.vocab_size, rng.integers(8, 513)).tolist(),
            samplers[0],
            row_id=str(i),
            max_new_tokens=int(rng.integers(4, 257)),
        )
        for i in range(args.records)
    ]
    first = requests[:16]
    used: dict[str, float] = {}

    def run(work: Sequence[Request], slots: int, name: str) -> float:
        started = time.perf_counter()
        engine = Engine(model, slots=slots, capacity=1024)
        for _ in engine.run(work):
            pass
        used[name] = engine.used
        return time.perf_counter() - started

    for slots, some, title in ((args.slots, requests, "slots"), (1, first, "one by one")):
        own: dict[str, Timed] = {}
        for sampler in samplers:
            work = [replace(request, sampler=sampler) for request in some]
            own[sampler.name] = partial(run, work, slots, f"{sampler.name}, {title}")
        peers = find_peers(model.config, weights, model.folder, scratch) if slots > 1 else ()
        static = {p.name: p.batches(some, slots) for p in peers if isinstance(p, Transformers)}
        # No request has an end token.
        tokens = sum(request.max_new_tokens for request in some)
        figures.measure(own, static, tokens=tokens, kind=title, weights=weights, batch=slots)
    for name, share in used.items():
        print(f"{name}: {share:.1%} of the slots' steps had a running row")


def measure_search(args: argparse.Namespace, figures: Figures, scratch: Path) -> None:
    """Measures searches of eight continuations for each of 24 questions, in 32 slots: the time of
    a token position that they evaluate."""
    model = load(args.model or TINY, "float32", precision=args.precision)
    sampler = calibrate_sampler(load_sampler(MIN_P), model)
    prompts = (f"Tell me what you know about the number {number}." for number in range(24))
    requests = [
        Request(model.tokenizer.encode(prompt, add_bos=True), sampler, 32, row_id=prompt)
        for prompt in prompts
    ]
    capacity = bucket(max(len(request.prompt) for request in requests) + 32, MIN_CAPACITY)

    def run(method: Method) -> float:
        searches = [method.search(request, 8) for request in requests]
        engine = Engine(model, slots=32, capacity=capacity, recording=recording_for(method, 8))
        started = time.perf_counter()
        ended = [one.outcome(lambda text: text) for one in run_searches(engine, searches)]
        return (time.perf_counter() - started) / sum(outcome.forwards for outcome in ended)

    methods = ("self-consistency", "dts", "eager")
    own: dict[str, Timed] = {name: partial(run, METHODS[name]) for name in methods}
    figures.measure(own, tokens=1, kind="search", batch=32)


def measure_start(args: argparse.Namespace, figures: Figures, scratch: Path) -> None:
    """Measures the command, with an empty compile cache and with a filled one."""
    model, memory = args.model or TINY, dict[str, list[int]]()

    def run(state: str) -> float:
        with tempfile.TemporaryDirectory(dir=scratch) as empty:
            cache = Path(empty) if state == "empty" else scratch
            first, peak = run_generate(model, args.weights, cache, Path(empty) / "trace.jsonl")
        memory.setdefault(state, []).append(peak)
        return first

    states = {f"{state} cache": partial(run, state) for state in ("empty", "filled")}
    figures.measure(states, kind=f"first token of {model}")
    for state, peaks in memory.items():
        print(f"{state} cache: peak anonymous memory {max(peaks[1:]) / 1e9:.2f} GB")


def run_generate(
    model: str, weights: Sequence[str] | None, cache: Path, trace: Path
) -> tuple[float, int]:
    """Runs the generate command. Returns the seconds to its first token, and the peak of its
    anonymous memory in bytes (0 if there is no /proc)."""
    command = [sys.executable, "-m", "entropix_jax.main", "--model", model, "--no-chat"]
    command += ["--prompt", "Once upon a time", "--ignore-eos", "--max-new-tokens", "32"]
    command += ["--trace", str(trace), *(["--dtype", weights[0]] if weights else [])]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    first, peak, status = 0.0, 0, Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
        peak = max(peak, *(1024 * int(x.split()[1]) for x in lines if x.startswith("RssAnon")), 0)
        # The trace's second line is the first token.
        if not first and trace.exists() and trace.read_bytes().count(b"\n") > 1:
            first = time.perf_counter() - started
        time.sleep(0.02)
    if process.returncode:
        said = process.communicate()[1].strip()
        raise UserError(f"the command failed with status {process.returncode}: {said}")
    return first or time.perf_counter() - started, peak


def compare_trees(trees: Sequence[Path], arguments: Sequence[str], figures: Figures) -> None:
    """Runs the script of each checkout in turns, in processes of their own."""
    seconds: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "figures.json"
        for turn in range(figures.repeats):
            for tree in trees:
                print(f"round {turn + 1} of {figures.repeats}: {tree}", file=sys.stderr)
                command = [sys.executable, str(tree / "scripts" / "bench.py"), *arguments]
                command += ["--repeats", "1", "--json", str(file)]
                environment = {**os.environ, "PYTHONPATH": str(tree)}
                ran = subprocess.run(command, env=environment, capture_output=True, text=True)
                if ran.returncode:
                    said = ran.stderr.strip()[-2000:]
                    raise UserError(
                        f"{tree}: the script ended with status {ran.returncode}: {said}"
                    )
                for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
                    key = (*map(row.get, WHERE), row["engine"])
                    seconds.setdefault(key, {}).setdefault(str(tree), []).append(row["seconds"])
    for (*where, engine), by_tree in seconds.items():
        # Not of what is in one tree only, or was skipped in a round.
        if [len(times) for times in by_tree.values()] == [figures.repeats] * len(trees):
            named = {f"{engine}, {tree}": times for tree, times in by_tree.items()}
            figures.add(named, **dict(zip(WHERE, where, strict=True)))


# What each command runs, and its rounds.
COMMANDS = {
    "step": (measure_steps, 5),
    "prefill": (measure_prompts, 5),
    "batch": (measure_batch, 1),
    "search": (measure_search, 3),
    "start": (measure_start, 3),
}


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", help="see above")
    common.add_argument("--weights", nargs="+", choices=TYPES, help="types in memory")
    common.add_argument("--precision", choices=ACTIVATIONS, default=AUTO, help="of hidden states")
    common.add_argument("--repeats", type=int, help="rounds after the first, which is not timed")
    common.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, action="append", metavar="FOLDER", help="a checkout")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="COMMAND")
    step, prompt, batch, *_ = (kinds.add_parser(name, parents=[common]) for name in COMMANDS)
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
    presets = "presets, each with its settings: 'entropix sampler.dry.multiplier=0'"
    step.add_argument("--samplers", nargs="+", default=[DEFAULT, GREEDY, MIN_P], help=presets)
    prompt.add_argument("--tokens", nargs="+", type=int, default=[128, 512])
    batch.add_argument("--slots", type=int, default=32)
    batch.add_argument("--records", type=int, default=400, help="prompts")
    batch.add_argument("--samplers", nargs="+", default=[DEFAULT, GREEDY], help="presets")
    return parser


def main() -> int:
    """The command line."""
    args = _parser().parse_args()
    measure, rounds = COMMANDS[args.kind]
    figures = Figures(args.repeats or rounds)
    if args.tree:
        compare_trees(args.tree, sys.argv[sys.argv.index(args.kind) :], figures)
    else:
        if args.kind != "start":
            reuse_memory()
            use_compilation_cache()
        if args.kind in ("step", "prefill"):
            figures.machine = describe_machine()
            args.weights = args.weights or TYPES[: 1 + (figures.machine["platform"] == "cpu")]
        with tempfile.TemporaryDirectory() as scratch:
            measure(args, figures, Path(scratch))
    figures.print_table()
    if args.json:
        text = json.dumps({"machine": figures.machine, "rows": figures.rows}, indent=2)
        args.json.write_text(text, encoding="utf-8")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
