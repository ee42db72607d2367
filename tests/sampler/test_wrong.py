"""P(wrong) at each token against float64, as a quantity of conditions, and its table."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import entropix_jax
from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.score import score_tokens
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.mechanisms.wrong import estimate
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.wrong import GAP, KNOTS, MEASURES, WrongTable, find_table
from tests.support.samplers import EVERYTHING, LITERAL, context, metrics_of, params_of

ROWS: list[list[float]] = [[0.8, -0.1, -2.0, 3.0, -1.0], [-2, 0.1], [0, 0.3], [0.5, 0.8], [2, 0.95]]


def measures_of(tokens: Any) -> np.ndarray:
    return np.array([[getattr(token, name) for name in MEASURES] for token in tokens])


def check(tokens: Any, table: WrongTable) -> None:
    found = np.array([token.p_wrong for token in tokens], np.float64)
    np.testing.assert_allclose(found, table.probabilities(measures_of(tokens)), atol=1e-4)


def test_the_estimate_equals_float64_and_is_not_extrapolated() -> None:
    full = [ROWS[0], *([i / 10 - 2, (i / KNOTS) ** 2] for i in range(KNOTS))]
    sizes = np.array([-1e6, -30.0, *np.linspace(-9, 9, 300), 30.0, 1e6])
    for rows in (ROWS, full):
        settings = params_of(LITERAL, {"wrong.table": rows})
        one = lambda metrics: estimate(context(metrics, settings))  # noqa: E731, B023
        found = np.asarray(jax.vmap(one)(metrics_of(entropy=sizes)))
        means = np.zeros((len(sizes), 4))
        means[:, 0] = sizes
        table = find_table(rows, None)
        assert table is not None
        np.testing.assert_allclose(found, table.look_up(means), atol=1e-5)
        assert found.min() == np.float32(rows[1][1])
        assert found.max() <= np.float32(rows[-1][1])


def test_every_token_of_a_row(tiny: LanguageModel) -> None:
    """Also of rows that go back and branch. A condition holds where it holds for the record, and
    `score_tokens` equals the run."""
    bounds = {"regimes.lelv": ["p_wrong > 0.6"], "arms.lelv": "sample"}
    sampler = load_sampler("entropix").with_values(EVERYTHING | bounds | {"wrong.table": ROWS})
    calibrated = calibrate_sampler(sampler, tiny)
    table = calibrated.wrong_table
    assert table is not None
    rows = entropix_jax.generate(tiny, "Once upon a", calibrated, max_new_tokens=40, samples=4)
    assert {"branch", "backspace"} <= {token.action for row in rows for token in row.tokens}
    for row in rows:
        check(row.tokens, table)
        for token in row.tokens:
            assert token.p_wrong is not None
            assert (token.regime == "lelv") == (token.p_wrong > np.float32(0.6))
    text = tiny.tokenizer.encode("Guests: Anna", add_bos=True)
    check([*score_tokens(tiny, text, calibrated)], table)


def test_without_a_table(tiny: LanguageModel) -> None:
    """No condition on P(wrong) holds, and a note says so."""
    plain = load_sampler("min-p")
    bounded = plain.with_values({"regimes.lelv": ["p_wrong < 2"], "arms.lelv": "argmax"})
    assert not calibrate_sampler(plain, tiny).notes
    (note,) = calibrate_sampler(bounded, tiny).notes
    assert note.startswith("without a table no condition on p_wrong holds: `entropix-jax calibrate")
    with pytest.warns(UserWarning, match="no condition on p_wrong holds"):
        (row,) = entropix_jax.generate(tiny, "Once", bounded, max_new_tokens=12)
    (same,) = entropix_jax.generate(tiny, "Once", plain, max_new_tokens=12)
    assert row.text == same.text
    assert {token.p_wrong for token in row.tokens} == {None}
    assert "lelv" not in {token.regime for token in row.tokens}


@pytest.mark.parametrize(
    "table",
    [
        "none",
        ROWS[:2],
        [ROWS[0][:4], *ROWS[1:]],
        [ROWS[0], *ROWS[:0:-1]],
        [ROWS[0], [0, 0.5], [1, 0.4]],
        [ROWS[0], [0, 0.5], [GAP / 2, 0.6]],
        [ROWS[0], [0, -0.5], [1, 0.4]],
        [ROWS[0], [0, 0.5], [10**400, 0.6]],
        [ROWS[0], [0, 0.5], [1, 0.6, 2]],
        [[10.0**9] * 5, *ROWS[1:]],
        [ROWS[0], *([i, 0.5] for i in range(KNOTS + 1))],
    ],
)
def test_invalid_tables(table: Any) -> None:
    with pytest.raises(UserError, match=r'wrong\.table = .*: must be "model", or \[weights, knot'):
        load_sampler("min-p").with_values({"wrong.table": table})
