"""Votes by confidence: by hand, against a plain recomputation, and against rows that really end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from entropix_jax.engine.results import Row
from entropix_jax.lab.votes import (
    CHOICES,
    VOTES,
    WARM_UP,
    Sample,
    early_vote,
    end_threshold,
    record_lows,
    weighted_vote,
)
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.runs import Spec, run_specs, unrun


def row_of(*confidences: float) -> Row:
    """A row with such tokens, each after two forwards; groups are of 16."""
    tokens: list[Any] = [
        SimpleNamespace(token_confidence=one, self_certainty=0.0, forwards=2 * i)
        for i, one in enumerate(confidences, 1)
    ]
    return Row(unrun(), tokens=tokens)


def sample(answer: str | None, *lows: float, forwards: int = 100) -> Sample:
    """A sample with such record lows, after 10, 20 and so on forwards."""
    return Sample(answer, forwards, [(low, 10 * i) for i, low in enumerate(lows, 1)])


def test_groups_and_record_lows() -> None:
    values = np.random.default_rng(0).uniform(5, 20, 60)
    row = row_of(*values)
    wanted = [values[i : i + 16].mean() for i in range(45)]
    np.testing.assert_allclose(row.group_confidences(), wanted, rtol=1e-12)
    lows = record_lows(row)
    expected = [w for i, w in enumerate(wanted) if w < min(wanted[:i], default=np.inf)]
    assert [low for low, _ in lows] == pytest.approx(expected)
    assert [cost for _, cost in lows] == [2 * (wanted.index(w) + 16) for w in expected]
    # Fewer tokens than a group are one group.
    assert record_lows(row_of(3.0, 6.0)) == [(4.5, 4)]
    assert record_lows(row_of()) == []
    assert row_of().group_confidences().size == 0


def test_weighted_votes_by_hand() -> None:
    samples = [sample("a", 5.0, 2.0), sample("b", 3.5), sample("a", 1.0), sample(None, 9.0)]
    assert [one.confidence for one in samples] == [2.0, 3.5, 1.0, 9.0]
    assert weighted_vote(samples) == ("b", 400)  # 3.5 against 2 + 1, where a majority would say a
    assert weighted_vote([*samples, sample("a", 0.6)]) == ("a", 500)
    assert weighted_vote(samples, 0.5) == ("b", 400)
    assert weighted_vote(samples, 0.1) == (None, 400)  # the surest has no answer
    assert weighted_vote([sample("b", 2.0), sample("a", 2.0)]) == ("b", 200)
    assert weighted_vote([Sample("a", 3, [])]) == ("a", 3)  # no tokens, no weight


def test_thresholds_that_a_share_passes() -> None:
    confidences = np.random.default_rng(1).uniform(5, 20, 101)
    for share in (0.1, 0.9):
        passed = np.mean(confidences >= end_threshold([*confidences], share))
        assert passed == pytest.approx(share, abs=0.01)


def test_an_early_end_by_hand() -> None:
    warm = [sample("a", low) for low in (1.0, 2.0, 3.0, 4.0, 5.0)]
    later = [sample("b", 9.0, 6.0), sample("c", 8.0, 4.0, 2.0), sample("b", 4.7)]
    assert len(warm) == WARM_UP
    # A tenth stays above 4.6: the last warm one, and two later ones. One ends after 20 of 100.
    assert early_vote([*warm, *later], 0.1) == ("b", 5 * 100 + 100 + 20 + 100)
    assert early_vote(warm, 0.1) == ("a", 500)
    # All but the first stay above 1.4.
    assert early_vote([*warm, *later], 0.9) == ("a", 800)


def test_one_sample_is_its_own_vote() -> None:
    for vote in VOTES.values():
        assert vote([sample("a", 7.0)]) == ("a", 100)
    for choose in CHOICES.values():
        assert choose([Sample("a", 9, [], score=0.25)]) == (0.25, 9)


def test_the_choice_of_one_sample() -> None:
    samples = [
        Sample("a", 10, [(7.0, 1), (3.0, 5)], score=0.0, logprob=-0.5),
        Sample("b", 20, [(4.0, 1)], score=0.5, logprob=-1.0),
        Sample("c", 30, [(3.5, 1)], score=1.0, logprob=-2.0),
        Sample(None, 40, [], score=0.0),  # without tokens: neither likely nor sure
    ]
    chosen = {kind: choose(samples) for kind, choose in CHOICES.items()}
    assert chosen == {"best": (1.0, 100), "likeliest": (0.0, 100), "surest": (0.5, 100)}
    equal = [Sample("a", 1, [(2.0, 1)], score=float(i), logprob=-1.0) for i in (1, 0)]
    assert [choose(equal)[0] for choose in CHOICES.values()] == [1.0, 1.0, 1.0]


def test_record_lows_tell_where_a_row_ends(tiny: LanguageModel) -> None:
    """The rows are generated again with a threshold: they end at the forwards that were told, with
    the same text up to there. The batch's other rows have none."""
    sampler = load_sampler("temperature").with_values({"confidence.window": 4})
    prompt = tiny.tokenizer.encode("Guests:", add_bos=True)
    specs = [Spec(prompt, str(number), 20) for number in range(8)]
    whole = run_specs(tiny, specs, sampler).run()
    samples = [Sample(None, row.to_json()["forwards"], record_lows(row)) for row in whole]
    threshold = end_threshold([one.confidence for one in samples], 0.5) + 1e-4
    ended = run_specs(tiny, specs, sampler.with_values({"confidence.threshold": threshold})).run()
    reasons = [row.finish_reason for row in ended]
    assert 2 <= reasons.count("confidence") <= 6
    for row, full, one in zip(ended, whole, samples, strict=True):
        assert row.to_json()["forwards"] == one.forwards_until(threshold)
        number = len(row.tokens)
        assert [t.token_id for t in row.tokens] == [t.token_id for t in full.tokens[:number]]
        low = one.confidence < threshold and number < len(full.tokens)
        assert row.finish_reason == ("confidence" if low else full.finish_reason)
        # What a row reports of itself, again in float64.
        told, values = row.to_json(), np.array([t.token_confidence for t in row.tokens])
        own = [values[i : i + 4].mean() for i in range(max(number - 3, 1))]
        assert told["mean_confidence"] == pytest.approx(values.mean())
        assert told["lowest_group_confidence"] == pytest.approx(min(own))
        assert told["tail_confidence"] == pytest.approx(own[-1])
        certainty = np.mean([t.self_certainty for t in row.tokens])
        assert told["mean_self_certainty"] == pytest.approx(certainty)
