"""The whole decode loop under a sampler, on a random model: endings, chunks, and broken rows."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.state import FINISHED_EOS, FINISHED_ERROR, FINISHED_LENGTH, RUNNING
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.params import Params
from tests.support.samplers import LITERAL, Job, Line, generate, params_of, tiny_model, tokens_of

MODEL = tiny_model()
FORKED = {"branch.min_p": 0.0, "branch.depth": 3}
# A thought at every chance, told by its bytes.
THINKING = {
    "regimes.lelv": ["entropy < -1"],
    "regimes.helv": ["entropy > 1.2"],
    "inject.thought": "abc",
    "inject.cooldown": 2,
    "inject.until_confident": False,
}


def jobs_of(branches: int) -> list[Job]:
    """Ragged rows, which branch so often at most, and then draw where they would have branched."""

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


BRANCHING = jobs_of(2)
UNBRANCHED = jobs_of(0)  # what a rollout meets plays no part


def same(one: list[Line], other: list[Line], *, to_the_bit: bool = False) -> None:
    """The same tokens for the same reasons; batch shapes may round differently."""
    rtol, atol = (0.0, 0.0) if to_the_bit else (2e-3, 2e-4)
    for a, b in zip(one, other, strict=True):
        assert a.exact == b.exact
        np.testing.assert_allclose(a.numbers, b.numbers, rtol=rtol, atol=atol)


@pytest.fixture(scope="module")
def unbranched() -> list[list[Line]]:
    return generate(MODEL, UNBRANCHED)


def test_chunks_equal_one_long_run() -> None:
    """To the bit: streaming is the same program."""
    whole = generate(MODEL, BRANCHING)
    for chunks in ([1] * 32, (7, 0, 25)):
        for one, other in zip(whole, generate(MODEL, BRANCHING, chunks=chunks), strict=True):
            same(one, other, to_the_bit=True)
    # It would prove little where nothing happens.
    actions = [{line.action for line in lines} for lines in whole]
    assert {"inject", "adaptive", "sample"} <= {*actions[1], *actions[2], *actions[3]}
    assert actions[0] >= {"branch", "backspace", "explore", "adaptive"}


# Endings


def test_end_tokens(unbranched: list[list[Line]]) -> None:
    """The end token is committed, and its row alone stops; either of several ends a row."""
    ends = (tokens_of(unbranched[0])[4], tokens_of(unbranched[1])[2])
    found = generate(MODEL, UNBRANCHED, eos_ids=ends)
    for lines, whole in zip(found, unbranched, strict=True):
        stop = next((i for i, line in enumerate(whole) if line.token in ends), len(whole) - 1)
        expected = [(line.position, line.token) for line in whole[: stop + 1]]
        assert [(line.position, line.token) for line in lines] == expected
        last = FINISHED_EOS if whole[stop].token in ends else FINISHED_LENGTH
        assert [line.finish for line in lines] == [RUNNING] * stop + [last]
    assert {lines[-1].finish for lines in found} == {FINISHED_LENGTH, FINISHED_EOS}


def test_an_end_token_in_the_last_place(unbranched: list[list[Line]]) -> None:
    """It is the model that ended the row, not the budget; also within a thought."""
    last = tokens_of(unbranched[1])[3]
    assert last not in tokens_of(unbranched[1])[:3]
    jobs = [UNBRANCHED[0], replace(UNBRANCHED[1], budget=4), *UNBRANCHED[2:]]
    lines = generate(MODEL, jobs, eos_ids=(last, -1))[1]
    assert (len(lines), lines[-1].finish) == (4, FINISHED_EOS)
    (lines,) = generate(MODEL, [UNBRANCHED[3]], eos_ids=(ord("b"), -1))
    assert [line.token for line in lines[-2:]] == [*b"ab"]
    assert lines[-1].finish == FINISHED_EOS


def poisoned(token: int) -> tuple[ModelConfig, Params]:
    """The model with an embedding that makes every logit NaN once it is read."""
    config, params = MODEL
    return config, replace(params, embedding=params.embedding.at[token].set(jnp.nan))


def test_a_nan_ends_its_row_and_no_other(unbranched: list[list[Line]]) -> None:
    """The error names the position whose logits were bad, one past the token that caused them."""
    rows = zip(UNBRANCHED, unbranched, strict=True)
    met = [[*job.prompt, *(line.token for line in lines)] for job, lines in rows]
    # A token that the first row draws for good, and not as its last, and no other row meets.
    first = unbranched[0]
    at = next(
        i
        for i in range(2, len(first) - 2)
        if first[i + 1].position == first[i].position + 1
        and [first[i].token in tokens for tokens in met] == [True, False, False, False]
        and met[0].count(first[i].token) == 1
    )
    found = generate(poisoned(first[at].token), UNBRANCHED)
    error = found[0][-1]
    assert (error.finish, error.position) == (FINISHED_ERROR, first[at].position + 1)
    same(found[0][:-1], first[: at + 1])
    for row in (1, 2, 3):
        same(found[row], unbranched[row])


def test_a_nan_in_the_prompt_ends_the_row_at_once() -> None:
    """It stays an error, also where the meaningless token is an end token."""
    job = replace(UNBRANCHED[3], prompt=[1, 299, 3])
    (lines,) = generate(poisoned(299), [job])
    (again,) = generate(poisoned(299), [job], eos_ids=(lines[0].token, -1))
    for found in (lines, again):
        assert [(line.position, line.finish) for line in found] == [(3, FINISHED_ERROR)]
