"""Votes and choices among samples, and confidences as weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from entropix_jax.engine.results import Row
from entropix_jax.engine.search import vote
from entropix_jax.lab.votes import KINDS, Sample, rotate
from tests.support.runs import unrun


def test_votes() -> None:
    for given, winner in (
        (["a", "b", "b"], "b"),
        (["a", "b", "b", "a"], "a"),  # on a tie the first
        ([None, None, "c"], "c"),
        ([None, None], None),
        ([], None),
    ):
        assert vote(given) == winner
    answers = ["a", "b", "b", None, "a"]
    for k, winners in (
        (1, answers),
        (3, ["b", "b", "b", "a", "a"]),
        (5, ["a", "b", "b", "a", "a"]),
    ):
        assert [vote(run) for run in rotate(answers, k)] == winners


def test_weighted_votes() -> None:
    for answers, weights, winner in (
        (["a", "b", "a", None], [2.0, 3.5, 1.0, 9.0], "b"),  # 3.5 against 2 + 1
        (["a", "b", "a", None, "a"], [2.0, 3.5, 1.0, 9.0, 0.6], "a"),
        ([None], [1.0], None),
        (["b", "a"], [1.0, 1.0], "b"),
        (["a", "b", "a", "a"], [0.1, 0.6, 0.2, 0.3], "a"),  # sums are exact: on a tie the first
    ):
        assert vote(answers, weights) == winner


def test_scores_of_several_samples() -> None:
    """On a tie, the first sample is chosen."""
    samples = [
        Sample("a", 0.5, -3.0, 2.0),
        Sample("b", 1.0, -2.0, 1.0),
        Sample("c", 0.0, -2.0, 5.0),
        Sample("a", 0.5, -4.0, 2.0),
    ]
    found = {kind: choose(samples) for kind, choose in KINDS.items()}
    wanted = {"majority": 0.5, "weighted": 0.0, "best": 1.0, "likeliest": 1.0, "surest": 0.0}
    assert found == wanted
    assert KINDS["majority"]([Sample(None, 0.25, 0.0, 0.0)]) == 0.25


def row_of(*confidences: float) -> Row:
    """Returns a row with these token confidences. Groups have 16 tokens."""
    tokens: list[Any] = [SimpleNamespace(token_confidence=one) for one in confidences]
    return Row(unrun(), tokens=tokens)


def test_group_confidences() -> None:
    values = np.random.default_rng(0).uniform(5, 20, 60)
    wanted = [values[i : i + 16].mean() for i in range(45)]
    np.testing.assert_allclose(row_of(*values).group_confidences(), wanted, rtol=1e-12)
    # Fewer tokens than a group are one group.
    assert row_of(3.0, 6.0).group_confidences() == [4.5]
    assert row_of().group_confidences().size == 0
