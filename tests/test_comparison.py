"""What tells a row from itself, and rounding from what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verification import comparison
from verification.comparison import ORDERS, Difference, compare, reordered

from entropix_jax.loading import LanguageModel, load
from entropix_jax.results import Row
from entropix_jax.sampler.presets import load_sampler
from tests.folders import token_ids, write_model
from tests.models import teacher_forced
from tests.runs import Spec, run_specs

pytestmark = pytest.mark.filterwarnings("ignore:.*never calibrated")
PLACE = 5  # of the token that is off


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    return load(str(folder))


@pytest.fixture(scope="module")
def row(model: LanguageModel) -> Row:
    request = Spec([token_ids()["<|begin_of_text|>"], 7, 9], "0", 10)
    (found,) = run_specs(model, [request], load_sampler("temperature"), ignore_eos=True).run()
    return found


def off(row: Row, **changes: Any) -> Row:
    """The row, its token at PLACE changed: floats by what is given, all else to it."""
    tokens = list(row.tokens)
    token = tokens[PLACE]
    for name, change in changes.items():
        value = getattr(token, name)
        token = replace(token, **{name: value + change if isinstance(value, float) else change})
    tokens[PLACE] = token
    return replace(row, tokens=tokens)


def against(
    monkeypatch: pytest.MonkeyPatch, one: Row, other: Row, *runs: Callable[[int], Row]
) -> Difference:
    """Compares, where `runs`, one for both or two, give the row in each order."""
    monkeypatch.setattr(comparison, "reordered", lambda model, seed: seed)
    here, there = runs * 2 if len(runs) == 1 else runs
    return compare(None, one, other, here, there)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["entropy", "varentropy", "logprob", "attn_entropy"])
def test_rounding_is_what_other_orders_show(
    monkeypatch: pytest.MonkeyPatch, row: Row, name: str
) -> None:
    scale = max(1.0, abs(getattr(row.tokens[PLACE], name)))
    noise = np.random.default_rng(0).normal(size=ORDERS)
    noise *= 1e-5 * scale / noise.std(ddof=1)

    def noisy(seed: int) -> Row:
        return off(row, **{name: float(noise[seed])})

    def found(by: float, *runs: Callable[[int], Row]) -> Difference:
        return against(monkeypatch, row, off(row, **{name: by * scale}), *runs)

    def exact(seed: int) -> Row:
        return row

    assert found(0.9e-5, lambda seed: pytest.fail("not needed")).rounded == 0
    for sign in (-1, 1):
        fine = found(sign * 5e-5, noisy)  # of 4 * sqrt(2) * 1e-5
        assert (fine.rounded, fine.parting) == (1, None)
        assert fine.largest == pytest.approx(5e-5, rel=1e-3)
        assert found(sign * 6e-5, noisy).parting is not None
        for runs in ((noisy, exact), (exact, noisy)):
            assert found(sign * 3.5e-5, *runs).parting is None
            assert found(sign * 4.5e-5, *runs).parting is not None
        assert found(sign * 2e-5, exact).parting is not None


def test_rounding_has_a_bound(monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    """However imprecise a model is."""

    def imprecise(seed: int) -> Row:
        return off(row, entropy=1e-2 * (-1) ** seed)

    assert against(monkeypatch, row, off(row, entropy=1e-2), imprecise).parting is not None


def test_orders_that_part_do_not_count(monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    own, scale = row.tokens[PLACE].token_id, max(1.0, row.tokens[PLACE].entropy)

    def changed(until: int) -> Callable[[int], Row]:
        def alone(seed: int) -> Row:
            noise = 2e-5 * scale * (-1) ** seed
            return off(row, entropy=noise, token_id=own + 1 if seed < until else own)

        return alone

    other = off(row, entropy=3e-5 * scale)
    assert against(monkeypatch, row, other, changed(ORDERS // 2)).parting is None
    assert against(monkeypatch, row, other, changed(ORDERS // 2 + 1)).parting is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"token_id": 1},
        {"action": "inject"},
        {"entropy": math.nan},
        {"top": [(1, "a", 0.5)]},
        {"forwards": 0},
    ],
)
def test_what_is_never_rounding(
    monkeypatch: pytest.MonkeyPatch, row: Row, changes: dict[str, Any]
) -> None:
    def noisy(seed: int) -> Row:
        return off(row, entropy=1e-5 * (-1) ** seed)

    assert against(monkeypatch, row, off(row, **changes), noisy).parting is not None


@pytest.mark.parametrize("changes", [{"text": "x"}, {"finish_reason": "eos"}, {"retracted": 1}])
def test_rows_that_are_others(
    monkeypatch: pytest.MonkeyPatch, row: Row, changes: dict[str, Any]
) -> None:
    found = against(monkeypatch, row, replace(row, **changes), lambda seed: row)
    assert found.parting is not None


def test_the_same_model_in_another_order(model: LanguageModel) -> None:
    """It says the same, to within rounding, and is not summed in the same order."""
    tokens = np.random.default_rng(0).integers(0, 300, (1, 40))
    expected = teacher_forced(model.params, model.config, tokens)[0]
    found = [
        teacher_forced(reordered(model, seed).params, model.config, tokens)[0] for seed in (1, 2)
    ]
    for one in found:
        np.testing.assert_allclose(one, expected, atol=1e-4)
        assert (one != expected).any()
    assert (found[0] != found[1]).any()
