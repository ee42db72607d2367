"""What tests/support/row_difference.py takes for rounding, and what it does not."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entropix_jax.engine.results import Row
from entropix_jax.model.loading import LanguageModel
from tests.support import row_difference
from tests.support.model_folders import token_ids
from tests.support.models import teacher_forced
from tests.support.row_difference import ORDERS, difference, reordered
from tests.support.runs import Spec, run_specs

pytestmark = pytest.mark.filterwarnings("ignore:.*never calibrated")
PLACE = 5  # of the token that is changed


@pytest.fixture(scope="module")
def row(model: LanguageModel) -> Row:
    request = Spec([token_ids()["<|begin_of_text|>"], 7, 9], "0", 10)
    return run_specs(model, [request], "temperature", ignore_eos=True).run()[0]


def changed(row: Row, **changes: Any) -> Row:
    """The row with its token at PLACE changed: floats by a difference, all else to a value."""
    tokens = list(row.tokens)
    for name, change in changes.items():
        value = getattr(tokens[PLACE], name)
        value = value + change if isinstance(value, float) else change
        tokens[PLACE] = replace(tokens[PLACE], **{name: value})
    return replace(row, tokens=tokens)


@pytest.fixture
def against(monkeypatch: pytest.MonkeyPatch, row: Row) -> Any:
    """Compares the row with another, where `runs` take the number of an equivalent model."""
    monkeypatch.setattr(row_difference, "reordered", lambda model, seed: seed)
    no_model: Any = None
    return lambda other, one, two=None: difference(no_model, row, other, one, two or one)


@pytest.mark.parametrize("name", ["entropy", "logprob"])
def test_rounding_is_four_deviations_of_the_scatter(against: Any, row: Row, name: str) -> None:
    scale = max(1.0, abs(getattr(row.tokens[PLACE], name)))
    noise = np.random.default_rng(0).normal(size=ORDERS)
    noise *= 1e-5 * scale / noise.std(ddof=1)

    def off(by: float) -> Row:
        return changed(row, **{name: by * scale})

    def noisy(seed: int) -> Row:
        return changed(row, **{name: float(noise[seed])})

    def exact(seed: int) -> Row:
        return row

    assert against(off(0.9e-5), lambda seed: pytest.fail("not needed")) is None
    for runs, least in (
        ((noisy, noisy), 4 * math.sqrt(2) * 1e-5),
        ((noisy, exact), 4e-5),
        ((exact, noisy), 4e-5),
        ((exact, exact), 1e-5),
    ):
        for sign in (-1, 1):
            assert against(off(sign * 0.95 * least), *runs) is None
            assert against(off(sign * 1.1 * least), *runs) is not None
    wild = [changed(row, **{name: 1e-2 * (-1) ** seed}) for seed in range(ORDERS)]
    assert against(off(1e-2), wild.__getitem__) is not None  # however imprecise the model is


def test_what_is_never_rounding(against: Any, row: Row) -> None:
    def noisy(seed: int) -> Row:
        return changed(row, entropy=1e-5 * (-1) ** seed)

    changes: list[dict[str, Any]] = [{"token_id": 1}, {"action": "inject"}, {"entropy": math.nan}]
    others = [changed(row, **one) for one in [*changes, {"top": [(1, "a", 0.5)]}]]
    others += [replace(row, text="x"), replace(row, retracted_tokens=row.tokens[:1])]
    assert None not in [against(other, noisy) for other in others]


def test_an_equivalent_model_sums_in_another_order(model: LanguageModel) -> None:
    tokens = np.random.default_rng(0).integers(0, 300, (1, 40))
    models = (model, reordered(model, 1), reordered(model, 2))
    found = [teacher_forced(one.params, model.config, tokens)[0] for one in models]
    for one, other in itertools.combinations(found, 2):
        np.testing.assert_allclose(one, other, atol=1e-4)
        assert (one != other).any()
