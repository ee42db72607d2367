"""Two hundred random rows that think, branch and take tokens back, side by side and alone."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.branching import LANES
from entropix_jax.engine.state import FINISHED_EOS, DecodeState
from entropix_jax.model.cache import init_cache
from entropix_jax.model.params import Params
from entropix_jax.sampler.mechanisms import ACTIONS
from tests.support.models import fill_unused, logits_of, run, teacher_forced
from tests.support.samplers import BATCH, CAPACITY, Job, Line, generate
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


def check_rows(
    jobs: Sequence[Job], lines: Sequence[Sequence[Line]], texts: Sequence[Sequence[int]]
) -> None:
    """Texts, positions and counts, told again from the tokens alone; and each token's
    log-probability, in one pass over the text."""
    padded = np.zeros((len(jobs), CAPACITY), np.int32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    log_probs = jax.nn.log_softmax(teacher_forced(PARAMS, CONFIG, padded)[0], axis=-1)
    for job, steps, text, said in zip(jobs, lines, texts, np.asarray(log_probs), strict=True):
        tokens, forwards = list(job.prompt), 0
        logprobs: list[float] = []
        for line in steps:
            forwards += (len(tokens) > len(job.prompt)) + line.rolled_out
            if line.action == "backspace":
                del tokens[-1], logprobs[-1]
            assert line.position == len(tokens)
            assert line.forwards == forwards
            tokens += line.tokens
            logprobs += line.logprobs
        assert tokens == text
        expected = said[np.arange(len(job.prompt), len(text)) - 1, tokens[len(job.prompt) :]]
        np.testing.assert_allclose(logprobs, expected, rtol=1e-4, atol=1e-4)


# Rows side by side


@dataclass
class Batch:
    jobs: list[Job]
    ends: list[int]  # tokens that end a row
    lines: list[list[Line]]


@functools.cache
def batch(number: int) -> Batch:
    """Ten of the rows, side by side; their caches are checked whenever the host looks."""
    rng = np.random.default_rng(number)
    jobs = [random_job(rng, f"{number}/{i}") for i in range(BATCH)]
    ends = rng.integers(0, CONFIG.vocab_size, 2).tolist() if number % 2 else [-1, -1]
    texts: list[list[int]] = []

    def look(state: DecodeState) -> None:
        check_caches(state)
        history, cached = jax.device_get((state.history, state.cache.length))
        texts[:] = [row[: n + 1].tolist() for row, n in zip(history, cached, strict=True)]

    lines = generate(MODEL, jobs, eos_ids=ends, chunks=random_chunks(rng), look=look)
    check_rows(jobs, lines, texts)
    return Batch(jobs, ends, lines)


@functools.cache
def ties(number: int) -> int:
    """Compares each row of a batch with itself alone. Returns how many are told apart by rounding,
    each of which is shown to be."""
    found, many = 0, batch(number)
    for job, lines in zip(many.jobs, many.lines, strict=True):
        (alone,) = play_alone(job, many.ends, number)
        pairs = [*zip(lines, alone, strict=False)]
        at = next((i for i, pair in enumerate(pairs) if not alike(*pair)), None)
        if at is None:
            assert len(lines) == len(alone)
        else:
            assert is_tie(job, many.ends, lines[at], alone[at], at), pairs[at]
            found += 1
    return found


def play_alone(
    job: Job, ends: Sequence[int], seed: int, params: Params = PARAMS
) -> list[list[Line]]:
    chunks = random_chunks(np.random.default_rng(seed))
    return generate((CONFIG, params), [job], eos_ids=ends, chunks=chunks, rows=1)


def alike(one: Line, other: Line) -> bool:
    return one.exact == other.exact and np.allclose(
        one.numbers, other.numbers, rtol=1e-4, atol=1e-5
    )


def is_tie(job: Job, ends: Sequence[int], one: Line, other: Line, at: int) -> bool:
    """Whether rounding may turn step `at` of a row either way: so do weights that differ in the
    fifth decimal."""
    outcomes = []
    for seed in range(16):
        noise = np.random.default_rng(seed).normal(size=PARAMS.unembedding.shape)
        head = np.asarray(PARAMS.unembedding) * (1 + 1e-5 * noise).astype(np.float32)
        params = replace(PARAMS, head=jnp.asarray(head))
        (lines,) = play_alone(job, ends, seed, params)
        outcomes += lines[at : at + 1]
    return all(any(alike(line, outcome) for outcome in outcomes) for line in (one, other))


@pytest.mark.parametrize("number", range(ROWS // BATCH))
def test_a_row_is_itself_whatever_runs_beside_it(number: int) -> None:
    """And however its steps are cut into chunks; its cache is the text's at each of them."""
    assert ties(number) <= 1


def test_hardly_any_row_hangs_on_rounding() -> None:
    assert sum(map(ties, range(ROWS // BATCH))) <= 2


def test_everything_happens_often() -> None:
    """The comparison would prove little where nothing happens."""
    happened: Counter = Counter()
    for number in range(ROWS // BATCH):
        for lines in batch(number).lines:
            happened.update(line.action for line in lines)
            happened.update(f"{a.action}, {b.action}" for a, b in itertools.pairwise(lines))
            happened["long branch"] += sum(len(line.tokens) > 1 for line in lines)
            happened["more branches than lanes"] += sum(line.branching > LANES for line in lines)
            happened["end token"] += lines[-1].finish == FINISHED_EOS
            happened["end of the cache"] += lines[-1].position == CAPACITY - 1
    sometimes = ["backspace, backspace", "backspace, inject", "backspace, branch", "branch, inject"]
    rarely = ["more branches than lanes", "end token", "end of the cache"]
    for least, names in ((200, ACTIONS), (100, ["long branch"]), (10, sometimes), (5, rarely)):
        assert [name for name in names if happened[name] < least] == []
    assert happened["inject, backspace"] == happened["branch, backspace"] == 0
