"""What a user may change without compiling anything: all that is traced."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from entropix_jax.engine.decode import answer, decode, prefill
from entropix_jax.engine.state import Recording
from entropix_jax.names import QUANTITIES, REGIMES
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import scalars
from entropix_jax.sampler.settings import RULES, SamplerSettings
from tests.support.samplers import (
    ARMS,
    Job,
    batch_of,
    generate,
    other_value,
    params_of,
    start,
    tiny_model,
)

MODEL = tiny_model()
BASE = Job([5, 6, 7], params_of("entropix"), budget=12)


def programs() -> tuple[int, int]:
    """How many programs there are for the step, and for the prompt."""
    jitted: tuple[Any, Any] = (decode, prefill)
    return jitted[0]._cache_size(), jitted[1]._cache_size()


@pytest.fixture(scope="module")
def compiled() -> tuple[int, int]:
    """One program for the step and one for the prompt."""
    generate(MODEL, [BASE], rows=1)
    return programs()


def test_nothing_is_compiled_for_another_row(compiled: tuple[int, int]) -> None:
    """Nor for another preset, other chunks and end tokens."""
    deep = {"branch.depth": 32, "branch.noise": 1.0}
    for job in (
        *(replace(BASE, sampler=params_of(name)) for name in ("document-001", "mirostat")),
        replace(BASE, sampler=params_of("entropix", deep)),
        replace(BASE, sampler=params_of("temperature", {"base.temperature": 9.0})),
        replace(BASE, seed=99, row_id="a longer name", prompt=[1] * 20, budget=3),
    ):
        generate(MODEL, [job], chunks=(3, 1, 8), eos_ids=(17, 4), rows=1)
        assert programs() == compiled


ENTROPIX = load_sampler("entropix").values

# Every key of a sampler with another value than the default's.
OTHER: dict[str, list[Any]] = {
    **{key: [other_value(key, ENTROPIX[key])] for key in scalars()},
    **{f"arms.{regime}": [*ARMS] for regime in REGIMES},
    **{
        f"regimes.{box}": [[], [f"{quantity} > 0.5" for quantity in QUANTITIES]]
        for box in REGIMES[:-1]
    },
    "thresholds.h1": [0.01],
    "thresholds.h2": [3.0],
    "thresholds.u1": [0.5],
    "thresholds.u2": [5.0],
    "thresholds.calibrated": [False],
    "metrics.attn_entropy": ["raw"],
    "metrics.agreement": ["published"],
    "metrics.layers": ["last", [0, 2.5]],
    "metrics.noise_floor": [True],
    "truncation.rule": [*RULES],
    "inject.thought": ["", "x" * 64, ["a", "bc", "def", "ghij"]],
    "draw.bans": [[*range(16)]],
}


def test_nothing_is_compiled_for_any_setting(compiled: tuple[int, int]) -> None:
    """Every key that a sampler has, one after the other in the same compiled step."""
    assert set(OTHER) == set(ENTROPIX)
    config, params = MODEL
    base = jax.tree.map(lambda x: (jnp.shape(x), jnp.asarray(x).dtype), params_of("entropix"))

    def step(sampler: SamplerSettings) -> None:
        decode(
            params,
            batch_of(sampler),
            jnp.asarray((-1, -1), jnp.int32),
            start(config, params, [BASE], 64),
            jnp.int32(1),
            config=config,
            window=64,
            max_steps=32,
            recording=Recording(),
        )

    for key, values in OTHER.items():
        for value in values:
            sampler = params_of("entropix", {key: value})
            kinds = jax.tree.map(lambda x: (jnp.shape(x), jnp.asarray(x).dtype), sampler)
            assert kinds == base, (key, value)
            step(sampler)
            assert programs() == compiled, (key, value)


def test_the_guard_would_notice(compiled: tuple[int, int]) -> None:
    """What is static does compile."""
    start(*MODEL, [BASE], capacity=32)
    assert programs() == (compiled[0], compiled[1] + 1)


def test_nothing_is_compiled_for_an_answer() -> None:
    """Whichever row waits, whatever it is told."""
    config, params = MODEL
    jitted: Any = answer
    jobs = [BASE, replace(BASE, row_id="1")]
    state = start(config, params, jobs, 64)
    before = None
    inject, branch = ARMS.index("inject"), ARMS.index("branch")
    for row, number, action, cooldown in ((0, 0, inject, 1), (1, 5, branch, 8), (0, 64, inject, 0)):
        tokens = jnp.arange(64, dtype=jnp.int32)
        values = (jnp.int32(x) for x in (number, action, cooldown))
        state = answer(state, jnp.int32(row), tokens, *values)
        assert before in (None, jitted._cache_size())
        before = jitted._cache_size()
