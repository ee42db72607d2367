"""Token confidence and self-certainty against float64, and rows that end by a low one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.engine.state import FINISHED_CONFIDENCE, FINISHED_LENGTH
from entropix_jax.sampler.metrics import MOST_LIKELIEST, measure_confidence
from entropix_jax.sampler.presets import load_sampler
from tests.support.logit_strategies import VOCABULARIES, rows_of
from tests.support.properties import examples
from tests.support.samplers import (
    LITERAL,
    PLAIN,
    Job,
    Line,
    generate,
    params_of,
    tiny_model,
    used_of,
)

MODEL = tiny_model()
measured = jax.jit(
    lambda logits, number: measure_confidence(jax.nn.log_softmax(logits, axis=-1), number)
)


@st.composite
def distributions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Logits [B, V] of one of the vocabularies, and how many of the likeliest count, [B]."""
    vocab = draw(st.sampled_from(sorted(VOCABULARIES)))
    rows = VOCABULARIES[vocab]
    number = st.integers(2, MOST_LIKELIEST)
    return (
        np.stack([draw(rows_of(vocab)) for _ in range(rows)]),
        np.array(draw(st.lists(number, min_size=rows, max_size=rows)), np.int32),
    )


@examples(40)
@given(distributions())
def test_measures(drawn: tuple[np.ndarray, np.ndarray]) -> None:
    """Also where logits are impossible, or as far apart as float32 goes: the measures are finite,
    as large as that. Both are lowest where all tokens are equally likely."""
    logits, numbers = drawn
    found = jax.device_get(measured(jnp.asarray(logits), jnp.asarray(numbers)))
    for row, number, confidence, certainty in zip(logits, numbers, *found, strict=True):
        z = row.astype(np.float64) - row.max().astype(np.float64)
        log_probs = np.maximum(z - np.log(np.exp(z).sum()), -1e30)
        top = np.sort(log_probs)[::-1][:number]
        np.testing.assert_allclose(confidence, -top.mean(), rtol=1e-5, atol=2e-5)
        wanted = -(log_probs + np.log(row.size)).mean()
        np.testing.assert_allclose(certainty, wanted, rtol=2e-5, atol=5e-5)
        assert np.isfinite([confidence, certainty]).all()
        assert confidence >= np.log(len(top)) - 1e-5
        assert certainty >= -5e-5


def test_values_by_hand() -> None:
    """Of p = 1/2, 1/4, 1/8, 1/8: the two likeliest, and the divergence from 1/4 of each."""
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
    confidence, certainty = measured(logits, jnp.array([2]))
    assert float(confidence[0]) == pytest.approx(1.5 * np.log(2), abs=1e-6)
    assert float(certainty[0]) == pytest.approx(0.25 * np.log(2), abs=1e-6)


# The end

BUDGET = 24


def job(number: int, preset: str = "temperature", window: int = 4, threshold: float = 0.0) -> Job:
    end = {"confidence.window": window, "confidence.threshold": threshold}
    changes = {**(PLAIN if preset == "temperature" else {"branch.max_share": 0.5}), **end}
    return Job([5, 6, number], params_of(preset, changes), budget=BUDGET, row_id=str(number))


def groups(lines: list[Line], window: int) -> list[float]:
    """After each line, the mean confidence of the last `window` tokens; infinite before that. What
    was retracted has been replaced."""
    confidence: dict[int, float] = {}
    found, start = [], lines[0].position
    for line in lines:
        for position, record in enumerate(line.records, line.position):
            confidence[position] = float(record.choice.observation.token_confidence)
        end = line.position + len(line.records)
        last = [confidence[position] for position in range(max(end - window, start), end)]
        found.append(float(np.mean(last)) if len(last) == window else np.inf)
    return found


@pytest.mark.parametrize("preset", ["temperature", LITERAL, "document-004"])
@pytest.mark.parametrize("window", [1, 4, 9])
def test_a_row_ends_with_the_first_low_group(preset: str, window: int) -> None:
    """At exactly that token, each row of a batch at its own, and as alone; what it wrote before is
    what it writes without an end. A line that commits a branch ends nothing."""
    jobs = [job(number, preset, window) for number in range(6)]
    whole = generate(MODEL, jobs)
    lows = [groups(lines, window) for lines in whole]
    # Bounds halfway between two groups, so that rounding decides nothing.
    steps = np.unique(np.concatenate(lows))
    bounds = (steps[:-1] + np.diff(steps) / 2)[np.isfinite(steps[1:])]
    threshold = float(bounds[len(bounds) // 3])
    asked = [job(number, preset, window, threshold if number else 0.0) for number in range(6)]
    ended = generate(MODEL, asked)
    ends = 0
    for number, (full, low, found) in enumerate(zip(whole, lows, ended, strict=True)):
        low_lines = (i for i, at in enumerate(low) if at < threshold and not full[i].branches)
        stop = next(low_lines, len(full) - 1) if number else len(full) - 1
        assert [line.tokens for line in found] == [line.tokens for line in full[: stop + 1]]
        last = FINISHED_CONFIDENCE if stop < len(full) - 1 else FINISHED_LENGTH
        assert found[-1].finish == last
        ends += last == FINISHED_CONFIDENCE
    assert ends > 0
    alone = generate(MODEL, [asked[3]])[0]
    assert [line.tokens for line in alone] == [line.tokens for line in ended[3]]
    assert alone[-1].finish == ended[3][-1].finish


def test_the_last_token_of_the_budget_ends_a_row_for_that_reason() -> None:
    always = generate(MODEL, [replace(job(0, window=5, threshold=1e6), budget=5), job(1)])
    assert [lines[-1].finish for lines in always] == [FINISHED_LENGTH] * 2
    cut = generate(MODEL, [job(0, window=5, threshold=1e6)])[0]
    assert (len(cut), cut[-1].finish) == (5, FINISHED_CONFIDENCE)


def test_the_step_has_it_where_a_row_uses_it() -> None:
    def used(**values: Any) -> frozenset[str]:
        sampler = load_sampler("temperature").with_values(values)
        return used_of(sampler)

    assert "confidence" not in used()
    assert "confidence" in used(**{"confidence.threshold": 1.0})
