"""Two hundred random rows that think, branch and take tokens back, side by side and alone."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.branching import LANES
from entropix_jax.engine.decode import decode
from entropix_jax.engine.state import (
    FINISHED_EOS,
    RUNNING,
    BranchLog,
    DecodeState,
    Recording,
    StepRecord,
)
from entropix_jax.model.cache import init_cache
from entropix_jax.model.params import Params
from entropix_jax.names import REGIMES
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.settings import RULES
from tests.support.models import fill_unused, logits_of, run, teacher_forced
from tests.support.samplers import ARMS, BATCH, Job, batch_of, params_of, start, tiny_model

ROWS, CAPACITY = 200, 64
CONFIG, PARAMS = tiny_model()
NATURAL = {
    "lelv": "argmax",
    "helv": "inject",
    "lehv": "branch",
    "hehv": "backspace",
    "mid": "adaptive",
}


# Schedules


def random_job(rng: np.random.Generator, row_id: str) -> Job:
    """A row of any length, under bounds that share out what this model's distributions are like."""
    prompt = rng.integers(0, CONFIG.vocab_size, rng.integers(1, 26)).tolist()
    longest = CAPACITY - len(prompt)
    budget = longest if rng.random() < 0.1 else int(rng.integers(1, min(longest, 32) + 1))
    return Job(
        prompt,
        params_of(
            "entropix",
            {**random_bounds(rng), **random_settings(rng)},
            encode=lambda text: [int(token) for token in text.split()],
        ),
        budget=budget,
        seed=int(rng.integers(3)),
        row_id=row_id,
    )


def random_bounds(rng: np.random.Generator) -> dict[str, Any]:
    h1, h2 = np.sort(rng.uniform(0.5, 3.5, 2)).round(3)
    u1, u2 = np.sort(rng.uniform(1.0, 4.5, 2)).round(3)
    bounds = {
        "lelv": [f"entropy < {h1}", f"varentropy < {u1}"],
        "helv": [f"entropy > {h1}", f"varentropy < {u2}"],
        "lehv": [f"entropy < {h2}", f"varentropy > {u2}"],
        "hehv": [f"entropy > {h2}", f"varentropy > {u1}"],
    }
    if rng.random() < 0.3:
        quantity, bound = (
            ("agreement", rng.uniform(0.3, 0.7)),
            ("attn_entropy_norm", rng.uniform(0.2, 0.8)),
        )[int(rng.integers(2))]
        bounds[str(rng.choice([*bounds]))].append(f"{quantity} > {bound:.3f}")
    arms = {
        f"arms.{regime}": arm if rng.random() < 0.7 else str(rng.choice(ARMS))
        for regime, arm in NATURAL.items()
    }
    return {f"regimes.{box}": bound for box, bound in bounds.items()} | arms


def random_settings(rng: np.random.Generator) -> dict[str, Any]:
    def often(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.6 else otherwise

    def number(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    thoughts = [
        " ".join(map(str, rng.integers(0, CONFIG.vocab_size, number(1, 5))))
        for _ in range(number(0, 3))
    ]
    return {
        "base.temperature": often(0.8, rng.choice([0.0, 0.4, 1.5, 4.0]).item()),
        "base.top_k": often(27, rng.choice([0, 3, 299]).item()),
        "base.top_p": often(0.9, rng.choice([0.3, 1.0]).item()),
        "base.min_p": often(0.03, rng.choice([0.0, 0.2]).item()),
        "truncation.rule": often("nucleus", str(rng.choice(RULES))),
        "metrics.layers": often("all", "last"),
        "metrics.noise_floor": often(False, True),
        "metrics.attn_entropy": often("normalised", "raw"),
        "draw.bans": often([], rng.integers(0, CONFIG.vocab_size, 5).tolist()),
        "repetition.penalty": often(1.0, 1.3),
        "loop.max_period": often(0, number(1, 4)),
        "loop.repeats": 2,
        "adaptive.draws": number(1, 16),
        "inject.thought": thoughts,
        "inject.cooldown": number(0, 6),
        "inject.per_row": often(1000, number(0, 3)),
        "inject.until_confident": often(False, True),
        "branch.width": number(1, 8),
        "branch.depth": number(1, 8),
        "branch.min_p": often(0.1, 0.0),
        "branch.noise": often(0.0, 0.5),
        "branch.rollout_temperature": often(0.0, 0.7),
        "branch.commit_all": often(True, False),
        "branch.per_row": often(1000, number(0, 4)),
        "backspace.per_position": often(2, number(0, 8)),
        "backspace.per_row": often(1000, number(0, 6)),
    }


def random_chunks(rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield int(rng.choice([1, 2, 3, 7, 32]))


# Runs


@dataclass
class Line:
    """What one step did to one row."""

    action: str
    entropy: float
    tokens: list[int]  # one, or a branch's
    logprobs: list[float]
    position: int
    forwards: int
    rolled_out: int
    finish: int
    branching: int  # rows that branched in the same step
    exact: tuple[Any, ...]  # all that must be the same wherever the row runs
    numbers: np.ndarray  # and all that may differ by rounding


def play(
    jobs: Sequence[Job],
    ends: Sequence[int],
    chunks: Iterator[int],
    look: Callable[[DecodeState], None] = lambda state: None,
    params: Params = PARAMS,
) -> list[list[Line]]:
    """Runs rows to their ends, some steps at a time, and looks at the state in between."""
    state = start(CONFIG, params, jobs, CAPACITY)
    sampler = batch_of(*(job.sampler for job in jobs))
    lines: list[list[Line]] = [[] for _ in jobs]
    look(state)
    while np.any(state.finish == RUNNING):
        state, records, log = decode(
            params,
            sampler,
            jnp.asarray(ends, jnp.int32),
            state,
            jnp.int32(next(chunks)),
            config=CONFIG,
            window=CAPACITY,
            max_steps=32,
            recording=Recording(),
        )
        records, log = jax.device_get((records, log))
        look(state)
        for step, row in zip(*np.nonzero(records.live), strict=True):
            one = jax.tree.map(lambda x, at=(step, row): x[at], records)
            branching = int(np.sum(records.branch[step] >= 0))
            lines[row].append(line_of(one, log, branching))
    return lines


def line_of(record: StepRecord, log: BranchLog, branching: int) -> Line:
    choice = record.choice
    tokens, logprobs, rolled_out = [int(choice.token)], [float(choice.logprob)], 0
    exact = [record.may_backspace, choice.observation.looping, choice.proposal.top_k]
    floats = jax.tree.leaves(choice)
    if record.branch >= 0:
        branches, count = log.branches, int(log.committed[record.branch])
        entry = jax.tree.map(lambda x: x[record.branch], branches)
        rolled_out = int(entry.length.sum())
        tokens = entry.tokens[entry.best, :count].tolist()
        logprobs = entry.logprobs[:count].tolist()
        exact += [entry.best, entry.ambiguous]
        exact += [path[:n].tolist() for path, n in zip(entry.tokens, entry.length, strict=True)]
        exact += entry.observation.regime[:count].tolist()
        told = (entry.observation, entry.logprobs, log.sequence_varentropy[record.branch])
        floats += [x[:count] for x in jax.tree.leaves(told)] + [entry.score]
    action = ACTIONS[choice.proposal.action]
    regime = REGIMES[choice.observation.regime]
    return Line(
        action=action,
        entropy=float(choice.observation.metrics.entropy),
        tokens=tokens,
        logprobs=logprobs,
        position=int(record.position),
        forwards=int(record.forwards),
        rolled_out=rolled_out,
        finish=int(record.finish),
        branching=branching,
        exact=(action, regime, tokens, record.position, record.forwards, record.finish, *exact),
        numbers=np.concatenate([np.ravel(x) for x in floats if x.dtype == np.float32]),
    )


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

    lines = play(jobs, ends, random_chunks(rng), look)
    check_rows(jobs, lines, texts)
    return Batch(jobs, ends, lines)


@functools.cache
def ties(number: int) -> int:
    """Compares each row of a batch with itself alone. Returns how many are told apart by rounding,
    each of which is shown to be."""
    found, many = 0, batch(number)
    for job, lines in zip(many.jobs, many.lines, strict=True):
        chunks = random_chunks(np.random.default_rng(number))
        (alone,) = play([job], many.ends, chunks)
        pairs = [*zip(lines, alone, strict=False)]
        at = next((i for i, pair in enumerate(pairs) if not alike(*pair)), None)
        if at is None:
            assert len(lines) == len(alone)
        else:
            assert is_tie(job, many.ends, lines[at], alone[at], at), pairs[at]
            found += 1
    return found


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
        (lines,) = play([job], ends, random_chunks(np.random.default_rng(seed)), params=params)
        outcomes += lines[at : at + 1]
    return all(any(alike(line, outcome) for outcome in outcomes) for line in (one, other))


@pytest.mark.parametrize("number", range(ROWS // BATCH))
def test_a_row_is_itself_whatever_runs_beside_it(number: int) -> None:
    """And however its steps are cut into chunks; its cache is the text's at each of them."""
    assert ties(number) <= 1


def test_hardly_any_row_hangs_on_rounding() -> None:
    assert sum(map(ties, range(ROWS // BATCH))) <= 2


def test_what_is_called_a_tie() -> None:
    """A bound that stands where an entropy does, and one that stands a little lower."""

    def job_of(bound: float) -> Job:
        changes = {
            **{f"regimes.{box}": ["entropy < -1"] for box in ("lelv", "helv", "lehv")},
            "regimes.hehv": [f"entropy > {bound:.7f}"],
            "arms.hehv": "resample",
            "arms.mid": "argmax",
            "loop.max_period": 0,
        }
        return Job([1, 2, 3], params_of("entropix", changes), budget=4)

    def first(bound: float) -> Line:
        (lines,) = play([job_of(bound)], (-1, -1), random_chunks(np.random.default_rng(0)))
        return lines[0]

    entropy = float(first(5.0).entropy)
    above, below = first(entropy + 0.01), first(entropy - 0.01)
    assert (above.action, below.action) == ("argmax", "resample")
    assert is_tie(job_of(entropy), (-1, -1), above, below, 0)
    for bound in (entropy - 0.01, entropy + 0.01):
        assert not is_tie(job_of(bound), (-1, -1), above, below, 0)


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
