"""The whole decode loop under a sampler, on a random model: rows, endings, chunks, thoughts."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.state import FINISHED_EOS, FINISHED_ERROR, FINISHED_LENGTH, RUNNING
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.params import Params
from tests.support.samplers import (
    Job,
    Step,
    changed,
    generate,
    params_of,
    tiny_model,
    tokens_of,
)

MODEL = tiny_model()

# Nothing truncated at a high temperature: each step draws from the whole vocabulary.
DEEP = params_of("temperature", {"base.temperature": 3.0})
# Branches twice, and from then on draws where it would have branched.
FORKED = params_of("entropix", {"branch.per_row": 2, "branch.min_p": 0.0, "branch.depth": 3})
# A thought at every chance, told by its bytes.
THINKING = params_of(
    "entropix",
    {
        "regimes.lelv": ["entropy < -1"],
        "regimes.helv": ["entropy > 1.2"],
        "inject.thought": "abc",
        "inject.cooldown": 2,
        "inject.until_confident": False,
    },
)

RAGGED = [
    Job([5, 6, 7], FORKED, budget=12, row_id="a"),
    Job([9] * 6 + [200, 3], DEEP, budget=16, seed=7, row_id="b"),
    Job([250], params_of("document-001"), budget=9, row_id="c"),
    Job([1, 2, 3, 4, 5], THINKING, budget=14, row_id="d"),
]
# The same, but nothing branches: what a rollout meets plays no part.
UNBRANCHED = [replace(job, sampler=changed(job.sampler, "branch", per_row=0)) for job in RAGGED]


def same(one: list[Step], other: list[Step]) -> None:
    """The same tokens for the same reasons; batch shapes may round differently."""
    assert tokens_of(one) == tokens_of(other)
    for a, b in zip(one, other, strict=True):
        assert (a.position, a.regime, a.action, a.finish) == (
            b.position,
            b.regime,
            b.action,
            b.finish,
        )
        assert a.forwards == b.forwards
        np.testing.assert_allclose(a.numbers(), b.numbers(), rtol=2e-3, atol=2e-4)


@pytest.fixture(scope="module")
def ragged() -> list[list[Step]]:
    return generate(MODEL, RAGGED)


@pytest.fixture(scope="module")
def unbranched() -> list[list[Step]]:
    return generate(MODEL, UNBRANCHED)


def until(steps: Sequence[Step], ends: Sequence[int]) -> list[Step]:
    """The steps up to the first token that ends the row; nothing takes that one back."""
    stop = next((i for i, step in enumerate(steps) if step.token in ends), len(steps) - 1)
    return [*steps[: stop + 1]]


def test_the_batch_reaches_what_it_should(ragged: list[list[Step]]) -> None:
    """The other tests would prove little where nothing happens."""
    actions = {step.action for steps in ragged for step in steps}
    drawing = {"explore", "resample", "adaptive", "sample"}
    assert {"inject", "branch", "backspace", *drawing} <= actions
    assert {step.action for step in ragged[0]} >= {"branch", "backspace", "explore", "resample"}


@pytest.mark.parametrize("chunks", [(1,) * 32, (7, 0, 25)])
def test_chunks_equal_one_long_run(ragged: list[list[Step]], chunks: tuple[int, ...]) -> None:
    """To the bit: streaming is the same program."""
    for one, other in zip(ragged, generate(MODEL, RAGGED, chunks=chunks), strict=True):
        same(one, other)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a.numbers(), b.numbers())


# Endings


def test_end_tokens(unbranched: list[list[Step]]) -> None:
    """The end token is committed, and its row alone stops; either of several ends a row."""
    ends = (tokens_of(unbranched[0])[4], tokens_of(unbranched[1])[2])
    found = generate(MODEL, UNBRANCHED, eos_ids=ends)
    for steps, whole in zip(found, unbranched, strict=True):
        expected = until(whole, ends)
        assert [(s.position, s.token) for s in steps] == [(s.position, s.token) for s in expected]
        last = FINISHED_EOS if expected[-1].token in ends else FINISHED_LENGTH
        assert [step.finish for step in steps] == [RUNNING] * (len(expected) - 1) + [last]
    assert {steps[-1].finish for steps in found} == {FINISHED_LENGTH, FINISHED_EOS}


def test_an_end_token_at_the_end_of_the_budget(unbranched: list[list[Step]]) -> None:
    """It is the model that ended the row, not the budget."""
    last = tokens_of(unbranched[1])[3]
    assert last not in tokens_of(unbranched[1])[:3]
    jobs = [UNBRANCHED[0], replace(UNBRANCHED[1], budget=4), *UNBRANCHED[2:]]
    steps = generate(MODEL, jobs, eos_ids=(last, -1))[1]
    assert steps[-1].finish == FINISHED_EOS
    assert len(steps) == 4


def test_an_end_token_within_a_thought() -> None:
    (steps,) = generate(MODEL, [RAGGED[3]], eos_ids=(ord("b"), -1))
    assert [step.token for step in steps[-2:]] == [ord("a"), ord("b")]
    assert steps[-1].finish == FINISHED_EOS


def poisoned(token: int) -> tuple[ModelConfig, Params]:
    """The model with an embedding that makes every logit NaN once it is read."""
    config, params = MODEL
    return config, replace(params, embedding=params.embedding.at[token].set(jnp.nan))


def test_a_nan_ends_its_row_and_no_other(unbranched: list[list[Step]]) -> None:
    """The error names the position whose logits were bad, one past the token that caused them."""
    met = [
        {*job.prompt, *(step.token for step in steps)}
        for job, steps in zip(UNBRANCHED, unbranched, strict=True)
    ]
    # A token that the first row draws for good, and not as its last, and no other row meets.
    at = next(
        i
        for i in range(2, len(unbranched[0]) - 2)
        if unbranched[0][i + 1].position == unbranched[0][i].position + 1
        and sum(step.token == unbranched[0][i].token for step in unbranched[0]) == 1
        and not any(unbranched[0][i].token in tokens for tokens in met[1:])
    )
    found = generate(poisoned(unbranched[0][at].token), UNBRANCHED)
    steps = found[0]
    assert steps[-1].finish == FINISHED_ERROR
    assert steps[-1].position == unbranched[0][at].position + 1
    assert not steps[-1].record.choice.finite
    same(steps[:-1], unbranched[0][: at + 1])
    for row in (1, 2, 3):
        same(found[row], unbranched[row])


def test_a_nan_in_the_prompt_ends_the_row_at_once(unbranched: list[list[Step]]) -> None:
    token = 299
    assert all(
        token not in [*job.prompt, *(step.token for step in steps)]
        for job, steps in zip(UNBRANCHED, unbranched, strict=True)
    )
    jobs = [*UNBRANCHED[:3], replace(UNBRANCHED[3], prompt=[1, token, 3])]
    found = generate(poisoned(token), jobs)
    assert [(step.position, step.finish) for step in found[3]] == [(3, FINISHED_ERROR)]
    # An error it stays, also where the meaningless token is an end token.
    ends = (found[3][0].token, -1)
    again = generate(poisoned(token), jobs, eos_ids=ends)[3]
    assert [(step.position, step.finish) for step in again] == [(3, FINISHED_ERROR)]
    for row in range(3):
        same(found[row], unbranched[row])
