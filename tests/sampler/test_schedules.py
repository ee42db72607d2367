"""Two hundred random rows that think, branch and take tokens back, side by side and alone."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.state import EOS, DecodeState
from entropix_jax.model.cache import init_cache
from entropix_jax.names import QUANTITIES, REGIMES
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.settings import SamplerSettings
from tests.support.models import fill_unused, logits_of, run
from tests.support.samplers import (
    BATCH,
    CAPACITY,
    LITERAL,
    Job,
    Line,
    generate,
    params_of,
    tokens_of,
)
from tests.support.schedules import CONFIG, MODEL, PARAMS, random_job

ROWS = 200


def random_chunks(rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield int(rng.choice([1, 2, 3, 7, 32]))


def check_caches(state: DecodeState) -> None:
    """Each row's cache, junk past its length, gives what a pass over the row's tokens gives."""
    number, length = state.history.shape[0], state.cache.length
    junk = fill_unused(state.cache, np.nan)
    one = jnp.ones(number, jnp.int32)
    pending = jnp.take_along_axis(state.history, length[:, None], axis=1)
    hidden, stats, _ = run(PARAMS, CONFIG, pending, one, junk, window=CAPACITY)
    fresh = init_cache(CONFIG, number, CAPACITY, jnp.dtype(jnp.float32))
    whole, expected, _ = run(PARAMS, CONFIG, state.history, length + 1, fresh, window=CAPACITY)
    whole = jnp.take_along_axis(whole, length[:, None, None], axis=1)
    np.testing.assert_allclose(
        logits_of(PARAMS, hidden), logits_of(PARAMS, whole), rtol=1e-4, atol=1e-4
    )
    for a, b in zip(jax.tree.leaves(stats), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# Rows side by side


@functools.cache
def batch(number: int) -> tuple[list[Job], list[int], list[list[Line]]]:
    """Ten of the rows, side by side, and the tokens that end them; their caches are checked
    whenever the host looks."""
    rng = np.random.default_rng(number)
    jobs = [random_job(rng, f"{number}/{i}") for i in range(BATCH)]
    ends = rng.integers(0, CONFIG.vocab_size, 2).tolist() if number % 2 else [-1, -1]
    chunks = random_chunks(rng)
    return jobs, ends, generate(MODEL, jobs, eos_ids=ends, chunks=chunks, look=check_caches)


def alike(one: Line, other: Line) -> bool:
    return one.exact == other.exact and np.allclose(
        one.numbers, other.numbers, rtol=1e-4, atol=1e-5
    )


@functools.cache
def differing(number: int) -> int:
    """How many rows of a batch are not what they are alone."""
    found = 0
    jobs, ends, many = batch(number)
    for job, lines in zip(jobs, many, strict=True):
        chunks = random_chunks(np.random.default_rng(number))
        (alone,) = generate(MODEL, [job], eos_ids=ends, chunks=chunks, rows=1)
        same = len(lines) == len(alone) and all(map(alike, lines, alone))
        found += not same
    return found


@pytest.mark.parametrize("number", range(ROWS // BATCH))
def test_a_row_is_itself_whatever_runs_beside_it(number: int) -> None:
    """And however its steps are cut into chunks; its cache is the text's at each of them. Hardly
    any row hangs on rounding."""
    assert differing(number) <= 1
    assert sum(map(differing, range(number + 1))) <= 2


def regime_of(metrics: Metrics, sampler: SamplerSettings, drift: np.ndarray) -> tuple[str, bool]:
    """The regime under a row's thresholds, in float64, and whether rounding may change it."""
    h1, h2, u1, u2 = np.asarray(sampler.thresholds.values, np.float64) * np.exp(drift)
    thresholds = np.array([h1, max(h1, h2), u1, max(u1, u2)])
    point = np.array([float(getattr(metrics, name)) for name in QUANTITIES[:-1]])
    given = sampler.conditions
    bound = np.where(given.threshold < 0, given.bound, thresholds[given.threshold])
    gap = np.where(given.above, 1, -1) * (point[given.quantity] - bound)
    gap = np.where(given.quantity < 0, np.inf, gap)
    close = np.any(np.abs(gap) < 1e-3)
    inside = [*np.all(gap > 0, axis=1), True]
    return REGIMES[inside.index(True)], bool(close)


@pytest.mark.parametrize("number", range(ROWS // BATCH))
def test_regimes_follow_the_rows_own_tokens(number: int) -> None:
    """Those that it keeps: neither the ones that it took back, nor other branches'."""
    jobs, _, many = batch(number)
    moved = 0
    for job, lines in zip(jobs, many, strict=True):
        own = job.sampler.thresholds
        kept: list[np.ndarray] = []  # what each token was compared with
        for line in lines:
            del kept[line.position - len(job.prompt) :]
            for record in line.records:
                drift = np.zeros(4)
                for seen in kept if own.dynamic else []:
                    below = seen < np.asarray(own.values, np.float64) * np.exp(drift)
                    drift = drift + float(own.rate) * (own.quantiles - below)
                metrics = record.choice.observation.metrics
                regime, close = regime_of(metrics, job.sampler, drift)
                assert close or REGIMES[record.choice.observation.regime] == regime
                moved += regime != regime_of(metrics, job.sampler, np.zeros(4))[0]
                kept.append(np.array([metrics.entropy] * 2 + [metrics.varentropy] * 2, float))
    assert moved >= 5, "the thresholds move too little to show"


def test_everything_happens_often() -> None:
    """The comparison would prove little where nothing happens."""
    happened: Counter = Counter()
    for number in range(ROWS // BATCH):
        for lines in batch(number)[2]:
            happened.update(line.action for line in lines)
            happened.update(f"{a.action}, {b.action}" for a, b in itertools.pairwise(lines))
            happened["long branch"] += sum(len(line.tokens) > 1 for line in lines)
            happened["wait for lanes"] += sum(line.waited > 0 for line in lines)
            happened["end token"] += lines[-1].status == EOS
            happened["end of the cache"] += lines[-1].position == CAPACITY - 1
    pairs = ["backspace, backspace", "backspace, branch", "branch, inject"]
    rarely = [*pairs, "wait for lanes", "end token", "end of the cache"]
    often = [*({*ACTIONS} - {"phrases"}), "long branch"]
    for least, names in ((40, often), (5, rarely)):
        assert [name for name in names if happened[name] < least] == []
    assert happened["inject, backspace"] == happened["branch, backspace"] == 0


# Rows of fixed samplers

FORKED = {"branch.min_p": 0.0, "branch.depth": 3}
# A thought wherever one may be.
THINKING = {
    "regimes.lelv": ["entropy < -1"],
    "regimes.helv": ["entropy > 1.2"],
    "inject.thought": "abc",
    "inject.cooldown": 2,
    "inject.until_confident": False,
}


def jobs_of(branches: int) -> list[Job]:
    """Returns rows of different lengths that branch at most `branches` times."""

    def sampler(preset: str, changes: dict[str, Any]) -> Any:
        return params_of(preset, {**changes, "branch.per_row": branches})

    # At a high temperature each step draws from the whole vocabulary.
    hot = sampler("temperature", {"base.temperature": 3.0})
    return [
        Job([5, 6, 7], sampler(LITERAL, FORKED), budget=12, row_id="a"),
        Job([9] * 6 + [200, 3], hot, budget=16, seed=7, row_id="b"),
        Job([250], sampler("document-001", {}), budget=9, row_id="c"),
        Job([1, 2, 3, 4, 5], sampler(LITERAL, THINKING), budget=14, row_id="d"),
    ]


def test_chunks_equal_one_long_run() -> None:
    """Chunks of any length give the same bits."""
    jobs = jobs_of(branches=2)
    whole = generate(MODEL, jobs)
    for chunks in ([1] * 32, (7, 0, 25)):
        for lines, others in zip(whole, generate(MODEL, jobs, chunks=chunks), strict=True):
            assert [line.exact for line in lines] == [line.exact for line in others]
            for line, other in zip(lines, others, strict=True):
                np.testing.assert_array_equal(line.numbers, other.numbers)
    actions = [{line.action for line in lines} for lines in whole]
    assert {"inject", "adaptive", "sample"} <= {*actions[1], *actions[2], *actions[3]}
    assert actions[0] >= {"branch", "backspace", "explore", "adaptive"}


def test_an_end_token_in_the_last_place() -> None:
    """The status of a row is EOS if its last token is an end token, even where the budget ends too,
    or within a thought."""
    jobs = jobs_of(branches=0)
    *before, last = tokens_of(generate(MODEL, jobs)[1])[:4]
    assert last not in before
    jobs[1] = replace(jobs[1], budget=4)
    lines = generate(MODEL, jobs, eos_ids=(last, -1))[1]
    assert (len(lines), lines[-1].status) == (4, EOS)
    (lines,) = generate(MODEL, [jobs[3]], eos_ids=(ord("b"), -1))
    assert [line.token for line in lines[-2:]] == [*b"ab"]
    assert lines[-1].status == EOS
