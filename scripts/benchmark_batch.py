"""Measures batches: a step of many slots beside plain products of its shapes, and a whole run.

    python scripts/benchmark_batch.py [--slots N] [--context N] [--steps N] [--repeats N]
    python scripts/benchmark_batch.py --run [--model DIR] [--slots N] [--records N] [--transformers]

The first form takes random float32 weights in Llama-3.2-1B's shape. A step of one slot, a step of
all slots, and the same number of vectors times each of the model's matrices take turns; the matrix
rate is what the products alone reach. The second form runs random prompts of 8 to 512 tokens, each
with a budget of 4 to 256 new ones, through the slots, and prints how many slot-steps were of use;
beside it a part of them one at a time, and, if asked for, `transformers`' batched `generate`, which
waits for the longest row of each batch. Without --model it is the embedded model.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmark import LLAMA_3_2_1B, fresh_state, sampler_params
from rich.console import Console
from rich.table import Table

from entropix_jax.decode import decode, prefill
from entropix_jax.decode_state import Recording
from entropix_jax.engine import Engine
from entropix_jax.loading import LanguageModel, load
from entropix_jax.params import Params, init_params
from entropix_jax.precision import choose_precision
from entropix_jax.preparation import sampler_params as params_of
from entropix_jax.results import Request, Row
from entropix_jax.running import RunningRow, budget_of
from entropix_jax.sampler.presets import load_sampler

PROMPT, OUTPUT, CAPACITY = (8, 512), (4, 256), 1024
ALONE = 16  # records that are run one at a time, too


# One step.


def step_of(params: Params, slots: int, args: argparse.Namespace) -> Callable[[], float]:
    """A function that runs some steps of a batch and gives the seconds of one."""
    precision = choose_precision("float32")
    config = LLAMA_3_2_1B
    shape = argparse.Namespace(context=args.context, capacity=512, batch=slots)
    state, tokens = fresh_state(config, precision, shape)
    prompt = jnp.asarray(tokens[:, :-1], jnp.int32)
    count = jnp.full(slots, args.context - 1, jnp.int32)
    state = prefill(params, state, prompt, count, config=config, window=512)
    sampler = sampler_params(args.sampler, config, slots)
    run = partial(decode, config=config, window=512, max_steps=32, recording=Recording())
    none = jnp.full(1, -1, jnp.int32)

    def seconds() -> float:
        nonlocal state
        started = time.perf_counter()
        state, records, _ = run(params, sampler, none, state, jnp.int32(args.steps))
        steps = int(jnp.sum(jnp.any(records.live, axis=1)))
        return (time.perf_counter() - started) / steps

    seconds()  # compiles
    return seconds


def products_of(params: Params, rows: int) -> Callable[[], float]:
    """A function that multiplies `rows` vectors with each matrix, and gives the seconds."""
    matrices = [x for x in jax.tree.leaves(params) if x.ndim == 2]

    @jax.jit
    def multiply(matrices: list[jax.Array]) -> list[jax.Array]:
        ones = {x.shape[1]: jnp.ones((rows, x.shape[1]), x.dtype) for x in matrices}
        return [jnp.dot(ones[x.shape[1]], x.T) for x in matrices]

    def seconds() -> float:
        started = time.perf_counter()
        jax.block_until_ready(multiply(matrices))
        return time.perf_counter() - started

    seconds()
    return seconds


def compare_steps(args: argparse.Namespace) -> None:
    """A step of one slot, of all slots, and the products alone, in turns."""
    params = init_params(LLAMA_3_2_1B, jax.random.key(0), jnp.dtype("float32"))
    weights = sum(x.size for x in jax.tree.leaves(params) if x.ndim == 2)
    calls = {
        "one": step_of(params, 1, args),
        "all": step_of(params, args.slots, args),
        "products": products_of(params, args.slots),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.repeats):
        for name, call in calls.items():
            seconds[name].append(call())
    median = {name: statistics.median(times) for name, times in seconds.items()}

    def ratio(over: str, under: str) -> float:
        pairs = zip(seconds[over], seconds[under], strict=True)
        return statistics.median(a / b for a, b in pairs)

    table = Table("", "ms", "tok/s", "GFLOP/s", title="Llama-3.2-1B's shape, float32")
    for name, label, rows in (
        ("one", "a step of 1 slot", 1),
        ("all", f"a step of {args.slots} slots", args.slots),
        ("products", "the products alone", args.slots),
    ):
        speed = "" if name == "products" else f"{rows / median[name]:.1f}"
        rate = f"{2 * rows * weights / median[name] / 1e9:.0f}"
        table.add_row(label, f"{1000 * median[name]:.0f}", speed, rate)
    Console().print(table)
    print(f"share of the matrix rate: {ratio('products', 'all'):.2f}")
    print(f"tok/s of {args.slots} slots over one: {args.slots * ratio('one', 'all'):.1f}")


# A whole run.


def requests_of(model: LanguageModel, number: int) -> list[Request]:
    """Random prompts and budgets."""
    rng = np.random.default_rng(0)
    vocab = model.tokenizer.vocab_size
    return [
        Request(
            rng.integers(0, vocab, rng.integers(*PROMPT, endpoint=True)).tolist(),
            str(i),
            int(rng.integers(*OUTPUT, endpoint=True)),
        )
        for i in range(number)
    ]


def run_through(
    model: LanguageModel, requests: list[Request], slots: int, sampler_name: str
) -> tuple[float, int, float]:
    """Seconds, tokens, and the share of slot-steps that were of use."""
    sampler = load_sampler(sampler_name).calibrated(model.folder)
    params = params_of(model, sampler)
    engine = Engine(
        model, params, sampler.arms, slots=slots, capacity=CAPACITY, recording=Recording()
    )
    rows = [Row(request) for request in requests]

    def jobs() -> Iterator[RunningRow]:
        for i, row in enumerate(rows):
            budget = budget_of(model, row.request, CAPACITY)
            yield RunningRow(i, row, model, sampler, params, budget=budget, seed=0)

    started = time.perf_counter()
    for _ in engine.run(jobs()):
        pass
    seconds = time.perf_counter() - started
    tokens = sum(len(row.tokens) for row in rows)
    return seconds, tokens, engine.useful / (engine.steps * slots)


def run_transformers(
    model: LanguageModel, requests: list[Request], slots: int
) -> tuple[float, int, float]:
    """The same with `transformers`, batch after batch, each as long as its longest row."""
    import torch
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    started = time.perf_counter()
    steps = 0
    for first in range(0, len(requests), slots):
        batch = requests[first : first + slots]
        longest = max(len(request.prompt) for request in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, request in enumerate(batch):
            ids[i, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[i, longest - len(request.prompt) :] = 1
        new = max(request.max_new_tokens for request in batch)
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            theirs.generate(ids, attention_mask=mask, max_new_tokens=new, **options)
        steps += new * len(batch)
    tokens = sum(request.max_new_tokens for request in requests)
    return time.perf_counter() - started, tokens, tokens / steps


def compare_runs(args: argparse.Namespace) -> None:
    """The slots, one at a time, and `transformers`, on the same records."""
    model = load(args.model, "float32")
    requests = requests_of(model, args.records)
    table = Table("", "seconds", "tokens", "tok/s", "slot-steps of use", title=f"{model.folder}")

    def add(label: str, figures: tuple[float, int, float]) -> None:
        seconds, tokens, used = figures
        table.add_row(
            label, f"{seconds:.1f}", str(tokens), f"{tokens / seconds:.0f}", f"{used:.1%}"
        )

    for name in dict.fromkeys((args.sampler, "greedy")):
        for slots, some in ((args.slots, requests), (1, requests[:ALONE])):
            # The first run compiles for each length.
            run_through(model, some, slots, name)
            label = f"{name}, {slots} slots" if slots > 1 else f"{name}, {len(some)} one by one"
            add(label, run_through(model, some, slots, name))
    if args.transformers:
        add(f"transformers, batches of {args.slots}", run_transformers(model, requests, args.slots))
    Console().print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="a whole run, not one step")
    parser.add_argument("--model", help="of the run: a folder (default: the embedded model)")
    parser.add_argument("--sampler", default="entropix", help="a preset")
    parser.add_argument("--slots", type=int, help="default: 16, of a run 32")
    parser.add_argument("--context", type=int, default=128, help="tokens of each row of a step")
    parser.add_argument("--steps", type=int, default=4, help="between two looks at the clock")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--records", type=int, default=600, help="prompts of a run")
    parser.add_argument("--transformers", action="store_true", help="needs the extra 'parity'")
    args = parser.parse_args()
    args.slots = args.slots or (32 if args.run else 16)
    if args.run:
        compare_runs(args)
    else:
        compare_steps(args)


if __name__ == "__main__":
    main()
