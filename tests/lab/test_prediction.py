"""The regression, its bootstrap and its measures against slow, direct computations in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from entropix_jax.lab import prediction
from entropix_jax.lab.outcomes import MEASURES
from entropix_jax.lab.prediction import (
    ADDITIONS,
    BASE,
    CLAIMS,
    FOLDS,
    Ridge,
    Tokens,
    association,
    compare_claims,
    compare_predictors,
    spearman,
    weighted_ranks,
)
from tests.support.reference import auroc

Floats = NDArray[np.float64]


def make_tokens(prompts: int, seed: int) -> Tokens:
    """Returns about ten tokens per prompt. The strength depends only on varentropy, index and
    noise."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(6, 15, prompts)
    count = int(sizes.sum())
    columns = {name: rng.random(count) for name in (*BASE, *MEASURES, "margin")}
    columns["heads"] = rng.random(count * 3)
    columns["index"] = np.concatenate([np.arange(size) for size in sizes]).astype(float)
    signal = columns["index"] / 5 + 3 * columns["varentropy"] + rng.normal(size=count) / 2
    columns["strength"] = np.maximum(signal - 1.5, 0)
    columns["excess"] = columns["strength"] - 0.1
    columns["pivot"] = (signal > 2).astype(float)
    columns["mistake"] = np.zeros(count)
    columns["end"] = np.concatenate([np.arange(1, size + 1) == size for size in sizes]).astype(
        float
    )
    return Tokens(columns, np.repeat(np.arange(prompts), sizes))


def lstsq(features: Floats, penalties: Floats, targets: Floats) -> Floats:
    """Solves ridge regression as least squares with an extra row for each penalty."""
    rows = np.concatenate([features, np.diag(np.sqrt(penalties))])
    zeros = np.zeros((len(penalties), targets.shape[1]))
    return np.linalg.lstsq(rows, np.concatenate([targets, zeros]), rcond=None)[0]


def direct_predictions(
    features: Floats, penalties: Floats, targets: Floats, folds: NDArray[np.int64]
) -> Floats:
    predicted = np.empty(targets.shape)
    for fold in range(FOLDS):
        own = folds == fold
        predicted[own] = features[own] @ lstsq(features[~own], penalties, targets[~own])
    return predicted


def test_features_are_standardised_with_their_logarithms() -> None:
    tokens = make_tokens(10, 0)
    features, penalties = tokens.features([BASE, ("heads",)])
    assert features.shape == (len(tokens.prompts), 1 + 6 + 3)
    np.testing.assert_allclose(features[:, 1:].mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(features[:, 1:].std(axis=0), 1)
    values = np.log(tokens.columns["p1"] + 0.01)
    expected = (values - values.mean()) / values.std()
    assert min(np.abs(features - expected[:, None]).max(axis=0)) < 1e-12
    np.testing.assert_array_equal(penalties[1:], [6] * 6 + [3] * 3)


def test_predictions_equal_ridge_regressions_on_other_folds() -> None:
    tokens = make_tokens(17, 1)
    features, penalties = tokens.features([BASE, ("varentropy",)])
    targets = np.stack([tokens.columns["pivot"], tokens.columns["strength"]], axis=1)
    (found,) = Ridge(features, penalties, targets, tokens).predict(np.ones((1, 17)))
    expected = direct_predictions(features, penalties, targets, tokens.folds)
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_ranks_and_associations_of_repeated_values() -> None:
    rng = np.random.default_rng(4)
    values, target = rng.integers(0, 9, 40).astype(float), rng.integers(0, 6, 40).astype(float)
    weights = rng.integers(0, 4, 40).astype(float)
    copies = np.repeat(np.arange(40), weights.astype(int))
    ranks = weighted_ranks(values, weights)
    np.testing.assert_allclose(ranks[copies], stats.rankdata(values[copies]))
    positive = (target > 3).astype(float)
    found = association(ranks, positive, weights, binary=True)
    assert found == pytest.approx(auroc(values[copies], positive[copies] > 0), abs=1e-12)
    found = association(ranks, weighted_ranks(target, weights), weights, binary=False)
    expected = stats.spearmanr(values[copies], target[copies]).statistic
    assert found == pytest.approx(expected, abs=1e-12)
    assert spearman(values, target) == pytest.approx(stats.spearmanr(values, target).statistic)
    assert np.isnan(association(ranks, np.zeros(40), weights, binary=True))
    assert np.isnan(spearman(values, np.ones(40)))


def test_the_bootstrap_refits_with_all_copies_of_a_prompt_in_its_fold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prediction, "_RESAMPLES", 23)
    tokens = make_tokens(15, 5)
    targets = {name: tokens.columns[name] for name in ("pivot", "strength")}
    wanted = np.stack([*targets.values()], axis=1)
    features, penalties = tokens.features([BASE, ("entropy",)])
    weights = prediction._resamples(15)
    ridge = Ridge(features, penalties, wanted, tokens)
    found = prediction._associations(ridge, tokens, targets, weights)
    assert found.shape == (2, 24)
    np.testing.assert_array_equal(weights[0], 1)
    for resample, counts in enumerate(weights):
        rows = [
            np.flatnonzero(tokens.prompts == p) for p in range(15) for _ in range(int(counts[p]))
        ]
        drawn = np.concatenate(rows)
        predicted = direct_predictions(
            features[drawn], penalties, wanted[drawn], tokens.folds[drawn]
        )
        # Predictions of copies differ only by rounding, and get equal ranks.
        predicted = predicted.round(9)
        area = auroc(predicted[:, 0], wanted[drawn, 0] > 0)
        rho = stats.spearmanr(predicted[:, 1], wanted[drawn, 1]).statistic
        np.testing.assert_allclose(found[:, resample], [area, rho], atol=1e-6)


def test_additions_are_compared_with_the_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "_RESAMPLES", 100)
    tasks = {"one": make_tokens(40, 6), "two": make_tokens(9, 7)}
    table, omitted = compare_predictors(tasks)
    size, (mistake, two) = len(tasks["one"].prompts), omitted
    assert mistake.startswith(f"one, mistake: positive at 0 of {size} tokens")
    assert two == "two: 9 answers, at least 10 are needed"
    assert set(table["target"]) == {"pivot", "F", "F excess"}
    by_name: dict[tuple[str, str], Any] = {
        (row.target, row.predictors): row for row in table.itertuples()
    }
    for target in ("pivot", "F"):
        base = by_name[target, "index + p1 + p2"]
        assert base.difference is None or np.isnan(base.difference)
        for name in ADDITIONS:
            added = by_name[target, f"base + {name}"]
            assert added.difference.value == pytest.approx(added.value - base.value)
            assert (added.difference.verdict == "higher") == ("u" in name.split())
        beyond = by_name[target, "u beyond base + h"].difference
        more, less = (by_name[target, f"base + {name}"].value for name in ("h and u", "h"))
        assert beyond.value == pytest.approx(more - less)
    assert by_name["F", "u only"].value > by_name["F", "h only"].value + 0.2


def test_labels_of_the_claims() -> None:
    """Two answers. The second one has no end token."""
    columns = {name: np.arange(7.0) for name in (*BASE, "entropy", "varentropy")}
    columns |= {"pivot": np.array([1.0, 0, 1, 0, 0, 1, 0]), "end": np.eye(7)[3]}
    tokens = Tokens(columns, np.array([0, 0, 0, 0, 1, 1, 1]))
    found = {name: own.columns[name].tolist() for name, own in tokens.claims()}
    assert found == {
        "end": [0, 0, 0, 1, 0, 0, 0],
        "before": [0, 0, 1, 0, 0, 0],
        "settled": [0, 0, 0, 1, 0, 0, 1],
    }


def test_claims_are_compared_by_aurocs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each resample of the answers."""
    monkeypatch.setattr(prediction, "_RESAMPLES", 5)
    tokens = make_tokens(40, 8)
    table, omitted = compare_claims({"one": tokens, "two": make_tokens(9, 9)})
    assert set(omitted[-3:]) == {"two: 9 answers, at least 10 are needed"}
    rows = {row["token"]: row for row in table.to_dict("records")}
    for name, own in [*tokens.claims()][:2]:
        row, label = rows[CLAIMS[name]], own.columns[name] > 0
        u, h = (-own.columns[measure] for measure in ("varentropy", "entropy"))
        known = auroc(u, label), auroc(u, label) - auroc(h, label)
        assert (row["low u"].value, row["low u - low h"].value) == pytest.approx(known)
        lowest = np.argsort(-u)[: -(-len(u) // 10)]
        assert row["share, lowest tenth by u"] == pytest.approx(label[lowest].mean())
        resampled = prediction._separations(own, {name: own.columns[name]})["low u"]
        for value, counts in zip(resampled, prediction._resamples(40), strict=True):
            drawn = np.repeat(np.arange(len(u)), counts.astype(int)[own.prompts])
            assert value == pytest.approx(auroc(u[drawn], label[drawn]))
