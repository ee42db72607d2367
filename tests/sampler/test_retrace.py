"""Changes of traced values do not compile another program."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from entropix_jax.engine.decode import decode
from entropix_jax.engine.prefill import prefill
from entropix_jax.engine.slots import answer
from entropix_jax.names import QUANTITIES, REGIMES, SERVED
from entropix_jax.sampler.calibration import TABLES
from entropix_jax.sampler.presets import load_sampler
from tests.support.samplers import (
    ARMS,
    LITERAL,
    RULES,
    Job,
    generate,
    other_value,
    params_of,
    scalars,
    start,
    tiny_model,
)

MODEL = tiny_model()
BASE = Job([5, 6, 7], params_of(LITERAL), budget=12)


def programs(*functions: Any) -> list[int]:
    """Returns the number of compiled programs of functions, by default `decode` and `prefill`."""
    return [function._cache_size() for function in functions or (decode, prefill)]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> list[int]:
    """Two programs for the step, without and with lanes, and one for the prompt."""
    generate(MODEL, [BASE])
    assert programs() == [2, 1]
    return programs()


def test_other_rows_need_no_other_program(compiled: list[int]) -> None:
    """Other presets, chunks and end tokens share the program. A static value compiles another."""
    deep = {"branch.depth": 32, "branch.noise": 1.0}
    ends = {"confidence.threshold": 5.0, "confidence.window": 3, "confidence.likeliest": 7}
    doubts = {
        "wrong.table": [[0, 0, -9, 0, 5], [-1, 0.1], [1, 0.9]],
        "regimes.lelv": ["p_wrong < 0.5"],
    }
    follows = {"thresholds.dynamic": True, "thresholds.rate": 0.1, "thresholds.h1": "5%"}
    for job in (
        *(replace(BASE, sampler=params_of(name)) for name in ("document-001", "mirostat")),
        replace(BASE, sampler=params_of("entropix")),
        replace(BASE, sampler=params_of("entropix", follows)),
        replace(BASE, sampler=params_of(LITERAL, deep)),
        replace(BASE, sampler=params_of(LITERAL, ends)),
        replace(BASE, sampler=params_of(LITERAL, doubts)),
        replace(BASE, sampler=params_of(LITERAL, doubts | {"regimes.lelv": ["p_wrong > 0.2"]})),
        replace(BASE, sampler=params_of("temperature", {"base.temperature": 9.0})),
        replace(BASE, seed=99, row_id="a longer name", prompt=[1] * 20, budget=3),
    ):
        generate(MODEL, [job], chunks=(3, 1, 8), eos_ids=(17, 4))
        assert programs() == compiled
    start(*MODEL, [BASE], capacity=32)  # of one row
    assert programs() == [compiled[0], compiled[1] + 1]


QUADRANTS = load_sampler(LITERAL).values

TEXTS = """think_end.text budget_forcing.end budget_forcing.wait clarify.prompt lookup.before
    lookup.after""".split()

# Other values than the default's for every key of a sampler.
OTHER: dict[str, list[Any]] = {
    **{key: [other_value(key, QUADRANTS[key])] for key in scalars()},
    **{f"arms.{served}": [*ARMS] for served in SERVED},
    **{
        f"regimes.{box}": [
            *([], [f"{quantity} > 0.5" for quantity in QUANTITIES]),
            [f"{quantity} > {bound}" for quantity in TABLES for bound in ("40%", "h1")],
        ]
        for box in REGIMES[:-1]
    },
    **{
        f"thresholds.{name}": [number, percentile]
        for name, number, percentile in (
            *(("h1", 0.01, "0.5%"), ("h2", 3, "99%")),
            *(("u1", 0.5, "10%"), ("u2", 5, "80%")),
        )
    },
    "metrics.units": ["thresholds"],
    "metrics.attn_entropy": ["raw"],
    "metrics.agreement": ["published"],
    "metrics.layers": ["last", [0, 2.5]],
    "metrics.noise_floor": [True],
    "truncation.rule": [*RULES],
    "branch.until": ["depth", "punctuation", "sentence", "line"],
    "clarify.until": ["punctuation", "line"],
    "inject.thought": ["", "x" * 64, ["a", "bc", "def", "ghij"]],
    "inject.after": [".", [".", "?", "!", "\n"]],
    **{key: ["", "x" * 32] for key in TEXTS},
    "draw.bans": [[*range(16)]],
    "draw.bias": [[[5, 2]], [[i, -0.5] for i in range(64)]],
    "dry.breakers": ["", ["x" * 8] * 16],
    "surrogate.varentropy": ["permuted", "max_prob", "median"],
    "phrases.banned": ["abc", ["x" * 16] * 8],
    "wrong.table": [[[*range(5)], [-1, 0], [1, 1]], [[0.5] * 5, *([i, i / 32] for i in range(32))]],
}


def kinds_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.asarray(x).dtype), tree)


def test_settings_do_not_change_shapes_or_types() -> None:
    """No value of any key of a sampler thus needs another program."""
    assert set(OTHER) == set(QUADRANTS)
    for key, values in OTHER.items():
        for value in values:
            sampler = params_of(LITERAL, {key: value})
            assert kinds_of(sampler) == kinds_of(BASE.sampler), (key, value)


def test_answers_share_one_program() -> None:
    """The program does not depend on the row, the length or the action of an answer."""
    state = start(*MODEL, [BASE, replace(BASE, row_id="1")], 64)
    seen: set[int] = set()
    inject, branch = ARMS.index("inject"), ARMS.index("branch")
    for row, number, action in ((0, 0, inject), (1, 5, branch), (0, 64, inject)):
        tokens = jnp.arange(64, dtype=jnp.int32)
        values = (jnp.int32(x) for x in (number, action))
        state = answer(state, jnp.int32(row), tokens, *values)
        seen.add(*programs(answer))
    assert len(seen) == 1
