"""Log-likelihoods of given continuations, compared with float64, one by one and in batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entropix_jax.engine import score as scoring
from entropix_jax.engine.score import check_context
from entropix_jax.engine.shapes import PREFILL_WINDOW
from entropix_jax.errors import UserError
from entropix_jax.lab.likelihood import log_likelihoods
from entropix_jax.model.loading import LanguageModel, load
from tests.support import reference
from tests.support.model_folders import MAX_POSITIONS, poisoned, write_model

Pair = tuple[list[int], list[int]]


def ids(number: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, number).tolist()


def scores(model: LanguageModel, pairs: Sequence[Pair], **options: Any) -> list[tuple[float, bool]]:
    found = sorted(log_likelihoods(model, pairs, **options))
    assert [index for index, *_ in found] == [*range(len(pairs))]
    return [(score, is_greedy) for _, score, is_greedy in found]


def expected(model: LanguageModel, before: list[int], after: list[int]) -> tuple[float, bool]:
    return reference.continuation(model.params, model.config, before, after)


def greedy(model: LanguageModel, before: list[int], number: int) -> list[int]:
    tokens = list(before)
    for _ in range(number):
        logits, _ = reference.forward(model.params, model.config, np.array(tokens))
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(before) :]


@pytest.fixture(scope="module")
def pairs(model: LanguageModel) -> list[Pair]:
    """Long and short pairs that a batch could mix up: shared contexts, continuations that differ in
    their last token or not at all, and a context that contains another pair's continuation."""
    shared, best = ids(40, 1), greedy(model, ids(40, 1), 4)
    return [
        (ids(1, 2), ids(1, 3)),
        (ids(90, 4), ids(30, 5)),
        *[(shared, [token]) for token in (7, 8, 9, 8)],
        (shared, best),
        (shared, best[:1]),
        ([*shared, *best[:2]], best[2:]),
        (shared, [*best[:3], best[3] + 1]),
        *[(ids(n, n), ids(3 + n % 5, n + 1)) for n in range(2, 60, 4)],
        (ids(3, 6), ids(100, 7)),
    ]


def test_log_likelihoods_equal_float64(model: LanguageModel, pairs: list[Pair]) -> None:
    found = scores(model, pairs)
    want = [expected(model, *pair) for pair in pairs]
    np.testing.assert_allclose([n for n, _ in found], [n for n, _ in want], atol=1e-4, rtol=1e-6)
    assert [flag for _, flag in found] == [flag for _, flag in want]
    assert [flag for _, flag in want[6:10]] == [True, True, True, False]


def test_a_long_pair_is_truncated_at_its_start(model: LanguageModel) -> None:
    """`context` limits the tokens before each one. The last token of a pair is only a target."""
    for before, after, context in (
        (ids(200, 1), ids(20, 2), 40),
        (ids(3, 1), ids(40, 2), 40),
        (ids(200, 1), ids(20, 2), MAX_POSITIONS),
    ):
        kept = [*before, *after][-context - 1 :]
        want = expected(model, kept[: -len(after)], after)
        (found,) = scores(model, [(before, after)], context=context)
        assert found[0] == pytest.approx(want[0], abs=1e-4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Calls of `_score_chunk`: rows, tokens per row, candidates per token, capacity of the cache,
    and whether the tokens were scored."""
    made = []
    score = scoring._score_chunk

    def record(*arguments: Any, **named: Any) -> Any:
        cache, tokens, following = arguments[2:5]
        made.append((*tokens.shape, following.shape[-1], cache.keys[0].shape[2], named["scored"]))
        return score(*arguments, **named)

    monkeypatch.setattr(scoring, "_score_chunk", record)
    return made


def test_memory_is_bounded(
    model: LanguageModel,
    pairs: list[Pair],
    calls: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound holds for any number and length of texts, and does not change the scores."""
    together = [n for n, _ in scores(model, pairs)]
    apart = scores(model, pairs[::-1], batch=1)[::-1]
    np.testing.assert_allclose([n for n, _ in apart], together, atol=1e-4)
    row = PREFILL_WINDOW * 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes
    monkeypatch.setattr(scoring, "_CACHE_BYTES", 5 * row)
    monkeypatch.setattr(scoring, "_LOGITS_BYTES", 4 * 31 * 4 * model.config.vocab_size)
    calls.clear()
    np.testing.assert_allclose([n for n, _ in scores(model, pairs)], together, atol=1e-4)
    assert {(rows, capacity) for rows, *_, capacity, _ in calls} == {(4, PREFILL_WINDOW)}
    assert max(size for _, size, *_ in calls) == 16
    # If not even one row fits, rows are scored one by one.
    monkeypatch.setattr(scoring, "_CACHE_BYTES", 1)
    scores(model, pairs[:2])
    assert calls[-1][0] == 1


def test_only_needed_logits_are_computed(
    model: LanguageModel, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices of one token share one text. The logits of its long context are not computed."""
    monkeypatch.setattr(scoring, "_LIKELIHOOD_CHUNK", 16)
    scores(model, [(ids(100), [token]) for token in range(50, 54)])
    assert calls == [(1, 16, 4, PREFILL_WINDOW, scored) for scored in [False] * 6 + [True]]


def test_invalid_pairs_are_reported(model: LanguageModel, tmp_path: Path) -> None:
    good: Pair = (ids(4), ids(2, 1))
    for bad, complaint in (
        (([], [1]), "pair 1: the context is empty"),
        (([1], []), "pair 1: the continuation is empty"),
        (([1], ids(41)), "pair 1: the continuation has 41 tokens, the model sees 40"),
    ):
        with pytest.raises(UserError, match=complaint):
            log_likelihoods(model, [good, bad], context=40)
    assert check_context(load("tiny"), None) == 1024
    with pytest.raises(UserError, match=f"at most {MAX_POSITIONS}, not {MAX_POSITIONS + 1}"):
        log_likelihoods(model, [good], context=MAX_POSITIONS + 1)
    broken = load(str(write_model(tmp_path / "bad", poisoned(5))))
    with pytest.raises(UserError, match="pair 1: NaN or infinite logits at position 2"):
        scores(broken, [([1, 2], [3]), ([1, 5], [3])])
