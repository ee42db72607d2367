"""CNTP and AdaDec, presets of `branch`, against their choice rules in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.sampler.draw import STREAM_CANDIDATE, STREAM_ROLLOUT, row_key
from entropix_jax.sampler.settings import MAX_WIDTH
from tests.support.draw_oracles import softmax, uniform_numbers
from tests.support.models import teacher_forced
from tests.support.samplers import (
    CAPACITY,
    Job,
    Line,
    attn_stats,
    batch_of,
    fresh_state,
    generate,
    params_of,
    tiny_model,
    token_texts,
)
from tests.support.steps import choose_jit, rows_of

MODEL = tiny_model()
ROWS, VOCAB, BUDGET = 500, 400, 30
ENDS = [i for i, text in enumerate(token_texts()) if text in ".,\n?!:;)]}"]


def nucleus(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """Returns the probabilities of tokens after temperature and top-p, float64 [V]."""
    p = softmax(logits.astype(np.float64), temperature)
    order = np.argsort(-p, kind="stable")
    count = int((np.cumsum(p[order]) < top_p).sum()) + 1
    kept = np.zeros_like(p)
    kept[order[:count]] = p[order[:count]]
    return kept / kept.sum()


def nats(p: np.ndarray) -> float:
    return -float(np.sum(p[p > 0] * np.log(p[p > 0])))


def token_at(p: np.ndarray, uniform: float) -> int:
    return int((np.cumsum(p) <= uniform).sum())


def width_of_cntp(q: np.ndarray) -> int:
    return int(1 + 9 * np.clip((nats(q) - 0.01) / 1.49, 0, 1))


def test_candidates_of_branches() -> None:
    """Checks the number and the first tokens of branches, on 500 random rows for each preset."""
    rng, batch = np.random.default_rng(8), 50
    count = {"cntp": 0, "adadec": 0}
    for number in range(ROWS // batch):
        scales = rng.choice([0.5, 2, 4, 8], size=(batch, 1))
        logits = (rng.normal(size=(batch, VOCAB)) * scales).astype(np.float32)
        for preset in count:
            histories = [[*range(number, number + 5)]] * batch
            step = choose_jit(
                jnp.asarray(logits),
                attn_stats(batch),
                batch_of(*[params_of(preset)] * batch),
                fresh_state(batch),
                rows_of(*histories),
            )[1]
            for row in range(batch):
                p = softmax(logits[row].astype(np.float64), 1.0)
                if preset == "cntp":
                    q = nucleus(logits[row], 0.8, 0.95)
                    width = width_of_cntp(q)
                    key = row_key(0, str(row))
                    numbers = uniform_numbers(key, 5, STREAM_CANDIDATE, MAX_WIDTH)
                    tokens = [token_at(q, u) for u in numbers[:width]] if width > 1 else []
                else:
                    is_high = nats(p) > 1.321
                    tokens = np.argsort(-p)[:3].tolist() if is_high else []
                found = np.asarray(step.candidates[row][: step.width[row]]).tolist()
                assert found == tokens, (preset, row)
                count[preset] += bool(tokens)
    assert min(count.values()) > ROWS // 4


def logits_after(text: Sequence[int], branches: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the logits before each token of branches of a text, float32 [branches, depth, V]."""
    config, params = MODEL
    tokens = np.zeros((MAX_WIDTH, CAPACITY), np.int32)
    for row, branch in zip(tokens, branches, strict=False):
        row[: len(text) + len(branch)] = [*text, *branch]
    return teacher_forced(params, config, tokens)[0][:, len(text) - 1 :]


def check_cntp(job: Job, text: list[int], line: Line, left: int) -> None:
    logits = logits_after(text, line.branches)
    means = []
    for number, (branch, rows) in enumerate(zip(line.branches, logits, strict=False)):
        scores = []
        for at, (token, row) in enumerate(zip(branch, rows, strict=False)):
            q = nucleus(row, 0.8, 0.95)
            stream = STREAM_ROLLOUT if at else STREAM_CANDIDATE
            key, position = row_key(job.seed, job.row_id), len(text) + at
            assert token == token_at(q, uniform_numbers(key, position, stream, MAX_WIDTH)[number])
            scores.append(np.log(q[token]))
        assert [token in ENDS for token in branch[:-1]] == [False] * (len(branch) - 1)
        assert branch[-1] in ENDS or len(branch) == left
        means.append(np.mean(scores))
    assert len(line.branches) == width_of_cntp(nucleus(logits[0, 0], 0.8, 0.95))
    np.testing.assert_allclose(line.scores, means, atol=1e-4)
    assert line.tokens == [*line.branches[int(np.argmax(means))]]


def check_adadec(job: Job, text: list[int], line: Line, left: int) -> None:
    logits = logits_after(text, line.branches).astype(np.float64)
    assert nats(softmax(logits[0, 0], 1.0)) > 1.321
    assert [b[0] for b in line.branches] == np.argsort(-logits[0, 0], kind="stable")[:3].tolist()
    own, means = job.sampler.own["branch"], []
    for branch, rows in zip(line.branches, logits, strict=False):
        assert len(branch) == min(int(own.depth), left)
        assert [*branch[1:]] == rows[1 : len(branch)].argmax(axis=-1).tolist()
        log_p = [np.log(softmax(row, 1.0)[token]) for token, row in zip(branch, rows, strict=False)]
        means.append(np.mean(log_p))
    np.testing.assert_allclose(line.scores, means, atol=1e-4)
    best = line.branches[int(np.argmax(means))]
    assert line.tokens == (best if own.commit_all else best[:1])


@pytest.mark.parametrize(
    ("preset", "check", "deep"),
    [("cntp", check_cntp, False), ("adadec", check_adadec, False), ("adadec", check_adadec, True)],
)
def test_ends_and_scores_of_branches(preset: str, check: object, deep: bool) -> None:
    """Checks the ends, scores and committed tokens of branches. Deep branches exceed the blocks of
    32 tokens in which the cache is copied, some reach its end, and rows that continue after one
    read the copy."""
    rng, found = np.random.default_rng(4), Counter[str]()
    changes = {"branch.depth": 40, "branch.commit_all": True} if deep else {}
    jobs = []
    for i in range(10):
        prompt = rng.integers(128, 300, 6 + 2 * i * deep).tolist()
        budget = CAPACITY - len(prompt) if deep else BUDGET
        jobs.append(Job(prompt, params_of(preset, changes), budget, row_id=str(i)))
    for job, lines in zip(jobs, generate(MODEL, jobs), strict=True):
        text, copied = [*job.prompt], False
        for line in lines:
            if line.branches:
                check(job, text, line, job.budget + len(job.prompt) - len(text))  # type: ignore[operator]
                found["forks"] += 1
                copied |= line.best > 0 and len(line.tokens) == 40
                found["end"] += line.best > 0 and 32 < CAPACITY - len(text) == len(line.tokens)
            elif deep:
                assert line.tokens == [logits_after(text, [line.tokens])[0, 0].argmax()]
                found["after"] += copied
            text += line.tokens
        assert len(text) == len(job.prompt) + job.budget
    assert found["forks"] > 10
    assert not deep or min(found.values()) > 0
