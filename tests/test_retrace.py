"""What a user may change without compiling anything: all that is traced."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import chex  # type: ignore[import-untyped]
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.decode import decode, prefill
from entropix_jax.sampler import draw
from entropix_jax.sampler.presets import preset_names
from entropix_jax.sampler.sample import choose, init_sampler_state
from tests.samplers import (
    Job,
    attn_stats,
    batch_of,
    generate,
    params_of,
    proposal_of,
    start,
    tiny_model,
)
from tests.test_sample import VOCAB, rows_of

MODEL = tiny_model()
BASE = Job([5, 6, 7], params_of("entropix"), budget=12)

CHANGES: dict[str, Callable[[], Job]] = {
    "preset": lambda: replace(BASE, sampler=params_of("document-000")),
    "thresholds": lambda: replace(BASE, sampler=params_of("entropix", {"thresholds.h1": 0.01})),
    "boxes": lambda: replace(BASE, sampler=params_of("entropix", {"regimes.helv": []})),
    "arms": lambda: replace(BASE, sampler=params_of("entropix", {"arms.mid": "argmax"})),
    "thought": lambda: replace(
        BASE, sampler=params_of("entropix", {"inject.thought": "much longer"})
    ),
    "bans": lambda: replace(BASE, sampler=params_of("entropix", {"draw.bans": [1, 2, 3]})),
    "penalty": lambda: replace(BASE, sampler=params_of("entropix", {"repetition.penalty": 1.3})),
    "noise floor": lambda: replace(
        BASE, sampler=params_of("entropix", {"metrics.noise_floor": True})
    ),
    "layers": lambda: replace(BASE, sampler=params_of("entropix", {"metrics.layers": "last"})),
    "loop guard": lambda: replace(BASE, sampler=params_of("entropix", {"loop.repeats": 2})),
    "deep draw": lambda: replace(BASE, sampler=params_of("temperature", {"base.temperature": 9.0})),
    "seed": lambda: replace(BASE, seed=99),
    "row id": lambda: replace(BASE, row_id="a longer name"),
    "prompt": lambda: replace(BASE, prompt=[200, 100, 9]),
    "length": lambda: replace(BASE, prompt=[1] * 20),
    "budget": lambda: replace(BASE, budget=3),
}


def programs() -> tuple[int, int]:
    """How many programs there are for the step, and for the prompt."""
    jitted: tuple[Any, Any] = (decode, prefill)
    return jitted[0]._cache_size(), jitted[1]._cache_size()


@pytest.fixture(scope="module")
def compiled() -> tuple[int, int]:
    """One program for the step and one for the prompt."""
    generate(MODEL, [BASE])
    return programs()


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_compiled_for(change: str, compiled: tuple[int, int]) -> None:
    generate(MODEL, [CHANGES[change]()])
    assert programs() == compiled


def test_nothing_is_compiled_for_other_chunks_and_end_tokens(compiled: tuple[int, int]) -> None:
    generate(MODEL, [BASE], chunks=(3, 1, 8), eos_ids=(17, 4))
    assert programs() == compiled


def test_the_guard_would_notice(compiled: tuple[int, int]) -> None:
    """What is static does compile."""
    start(*MODEL, [BASE], capacity=32)
    assert programs() == (compiled[0], compiled[1] + 1)


def test_choose_is_traced_once() -> None:
    traced = jax.jit(chex.assert_max_traces(choose, n=1))
    for i, preset in enumerate(preset_names()):
        logits = jnp.asarray(np.random.default_rng(i).normal(size=(2, VOCAB)), jnp.float32)
        rows = rows_of(2, list(range(1, 3 + i)), generated=i, remaining=50 - i, seed=i)
        traced(
            logits, attn_stats(2), batch_of(*[params_of(preset)] * 2), init_sampler_state(2), rows
        )


def test_the_draw_is_traced_once() -> None:
    """The head is left, or not, without leaving the program."""
    traced = jax.jit(chex.assert_max_traces(draw.truncated_draw, n=1))
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 300)), jnp.float32)
    uniforms = jnp.full((2, 1), 0.5)
    kept = [
        traced(logits, proposal_of(*rules), uniforms).kept.tolist()
        for rules in (
            ([1.0, 1.0], 0, 1.0, 0.0),
            ([0.0, 1.0], 5, 1.0, 0.0),
            ([1.0, 2.0], 0, 0.5, 0.1),
        )
    ]
    assert kept[:2] == [[300, 300], [1, 5]]
