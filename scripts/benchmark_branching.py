"""What branching costs in a batch: a few rows that branch among many, against those rows alone.

    python scripts/benchmark_branching.py [--model DIR] [--rows N] [--branching N] [--depth R]
                                          [--width W] [--steps N] [--repeats N]

Some rows branch at every step, for the whole depth; the others draw plainly. The same rows are then
run without the others, in turns. Without --model it is `tiny`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.commandline import EXIT_OK, run_command
from entropix_jax.decode import decode, prefill
from entropix_jax.decode_state import Recording, init_state
from entropix_jax.loading import LanguageModel, load
from entropix_jax.names import BOXES
from entropix_jax.preparation import sampler_params
from entropix_jax.sampler.keys import row_key
from entropix_jax.sampler.presets import load_sampler

CONTEXT, CAPACITY = 100, 512
NOWHERE, EVERYWHERE = ["entropy < -1"], ["entropy > -1"]


def seconds_of(
    model: LanguageModel, branching: int, plain: int, args: argparse.Namespace
) -> Callable[[], float]:
    """A function that runs some steps of such a batch and gives the seconds of one."""
    base = load_sampler("entropix").with_values(
        {
            **{f"regimes.{box}": NOWHERE for box in BOXES},
            "arms.mid": "sample",
            "branch.commit_all": False,
            "branch.depth": args.depth,
            "branch.width": args.width,
            "branch.min_p": 0.0,
            "branch.top_p": 1.0,
            "loop.max_period": 0,
        }
    )
    branches = base.with_values({"regimes.lehv": EVERYWHERE})
    rows = [branches] * branching + [base] * plain
    sampler = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *(sampler_params(model, row) for row in rows)
    )
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.tokenizer.vocab_size, (len(rows), CONTEXT))
    state = init_state(
        model.config,
        prompts.tolist(),
        [CAPACITY - CONTEXT] * len(rows),
        np.stack([row_key(0, str(i)) for i in range(len(rows))]),
        capacity=CAPACITY,
        dtype=model.precision.activations,
    )
    count = jnp.full(len(rows), CONTEXT - 1, jnp.int32)
    tokens = jnp.asarray(prompts, jnp.int32)
    state = prefill(model.params, state, tokens, count, config=model.config, window=CAPACITY)
    none = jnp.full(8, -1, jnp.int32)

    def run() -> float:
        nonlocal state
        started = time.perf_counter()
        state, _, log = decode(
            model.params,
            sampler,
            none,
            state,
            jnp.int32(args.steps),
            config=model.config,
            window=CAPACITY,
            max_steps=args.steps,
            recording=Recording(),
        )
        done = int(log.count)  # waits for the device
        assert done == branching * args.steps, done
        return (time.perf_counter() - started) / args.steps

    run()  # compiles
    return run


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--branching", type=int, default=3)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    model = load(args.model)
    plain = args.rows - args.branching
    together = seconds_of(model, args.branching, plain, args)
    alone = seconds_of(model, args.branching, 0, args)
    pairs = [(together(), alone()) for _ in range(args.repeats)]
    batch, few = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(one / other for one, other in pairs)
    print(f"{args.rows} rows, {args.branching} of which branch: {1000 * batch:.1f} ms a step")
    print(f"the {args.branching} alone: {1000 * few:.1f} ms a step; ratio {ratio:.2f}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(main))
