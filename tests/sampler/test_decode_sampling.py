"""The whole decode loop under a sampler, on a random model: rows, endings, chunks, thoughts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.state import FINISHED_EOS, FINISHED_ERROR, FINISHED_LENGTH, RUNNING
from entropix_jax.model.cache import init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.params import Params
from tests.support.models import logits_of, run
from tests.support.samplers import (
    ARMS,
    PLAIN,
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
NARROW = params_of("entropix", {"base.top_k": 5})
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


def test_a_run_repeats_to_the_bit(ragged: list[list[Step]]) -> None:
    for one, other in zip(ragged, generate(MODEL, RAGGED), strict=True):
        same(one, other)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a.numbers(), b.numbers())


def test_the_batch_reaches_what_it_should(ragged: list[list[Step]]) -> None:
    """The other tests would prove little where nothing happens."""
    actions = {step.action for steps in ragged for step in steps}
    drawing = {"explore", "resample", "adaptive", "sample"}
    assert {"inject", "branch", "backspace", *drawing} <= actions
    assert {step.action for step in ragged[0]} >= {"branch", "backspace", "explore", "resample"}


def test_every_token_has_its_place(ragged: list[list[Step]]) -> None:
    """Positions, ends and the number of evaluations, step by step."""
    for steps, job in zip(ragged, RAGGED, strict=True):
        text = [*job.prompt]
        before = -1
        for i, step in enumerate(steps):
            if step.action == "backspace":  # the last token's place, and not that token again
                assert step.position == len(text) - 1 >= len(job.prompt)
                assert text.pop() != step.token
                assert steps[i - 1].action not in ("inject", "branch")
            assert step.position == len(text)
            text.append(step.token)
            if step.action != "branch":
                assert step.forwards == before + 1
            elif step.forwards != before:  # the first token of a branch, which share a step
                committed = sum(s.forwards == step.forwards for s in steps)
                assert step.forwards >= max(before, 0) + (i > 0) + committed
            before = step.forwards
        assert text == [*job.prompt, *tokens_of(steps)]
        assert len(text) == len(job.prompt) + job.budget
        last = [step.finish for step in steps if step.forwards == steps[-1].forwards]
        earlier = [step.finish for step in steps if step.forwards != steps[-1].forwards]
        assert {*last} == {FINISHED_LENGTH}
        assert {*earlier} == {RUNNING}


def test_what_may_backspace_is_what_does(ragged: list[list[Step]]) -> None:
    """A token that a step marks as final is never taken back, and the last one is final."""
    for steps, job in zip(ragged, RAGGED, strict=True):
        for step, after in pairwise(steps):
            if after.action == "backspace":
                assert step.record.may_backspace
        assert not steps[-1].record.may_backspace
        if not any(step.action == "backspace" for step in steps):
            continue
        assert any(step.record.may_backspace for step in steps)
        assert job.sampler.arms.tolist()[3] == ARMS.index("backspace")


@pytest.mark.parametrize("row", range(4))
def test_a_row_alone_equals_the_row_in_a_batch(ragged: list[list[Step]], row: int) -> None:
    """Beside it: other lengths, presets and budgets, and a draw from the whole vocabulary."""
    (alone,) = generate(MODEL, [RAGGED[row]], rows=1)
    same(alone, ragged[row])


@pytest.mark.parametrize("chunks", [(1,) * 32, (7, 0, 25)])
def test_chunks_equal_one_long_run(ragged: list[list[Step]], chunks: tuple[int, ...]) -> None:
    """To the bit: streaming is the same program."""
    for one, other in zip(ragged, generate(MODEL, RAGGED, chunks=chunks), strict=True):
        same(one, other)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a.numbers(), b.numbers())


def test_the_logits_are_those_of_one_pass_over_the_text(ragged: list[list[Step]]) -> None:
    """The log-probability of each token against a teacher-forced pass without a cache behind it."""
    config, params = MODEL
    for job, steps in zip(RAGGED, ragged, strict=True):
        text = np.zeros((1, 24), np.int32)
        tokens = [*job.prompt, *tokens_of(steps)]
        text[0, : len(tokens)] = tokens
        cache = init_cache(config, 1, 24, jnp.dtype(jnp.float32))
        count = jnp.asarray([24], jnp.int32)
        hidden, _, _ = run(params, config, jnp.asarray(text), count, cache, window=24)
        expected = jax.nn.log_softmax(logits_of(params, hidden)[0], axis=-1)
        for step in steps:
            logprob = float(step.record.choice.logprob)
            before = step.position - 1
            assert logprob == pytest.approx(float(expected[before, step.token]), abs=2e-3)


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


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
def test_a_branch_is_cut_at_the_budget(budget: int, ragged: list[list[Step]]) -> None:
    """The tokens that fit are those of the whole branch, whatever follows."""
    jobs = [replace(RAGGED[0], budget=budget), *RAGGED[1:]]
    steps = generate(MODEL, jobs)[0]
    assert len(tokens_of(steps)) == budget
    assert steps[-1].finish == FINISHED_LENGTH
    first = [step.token for step in ragged[0] if step.forwards == ragged[0][0].forwards]
    assert len(first) == 3
    assert [step.action for step in steps][:3] == ["branch"] * min(budget, 3)
    assert tokens_of(steps)[:3] == first[:budget]


def test_a_row_may_fill_its_cache_to_the_last_slot() -> None:
    prompt = list(range(1, 33))
    found = generate(
        MODEL,
        [Job(prompt, NARROW, budget=32), *RAGGED[1:]],
        chunks=(32, 32, 32),
        capacity=64,
    )
    assert len(tokens_of(found[0])) == 32
    assert {"branch", "backspace"} & {step.action for step in found[0]}
    assert found[0][-1].position == 63
    assert found[0][-1].finish == FINISHED_LENGTH


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


# Thoughts


def test_thoughts_are_written_whole(ragged: list[list[Step]]) -> None:
    steps = ragged[3]
    spoken = "".join(chr(s.token) if s.action == "inject" else "." for s in steps)
    assert spoken.replace("abc", "").strip(".") == ""
    assert spoken.count("abc") >= 2
    for i, step in enumerate(steps):
        if step.action == "sample":  # HELV while a thought cools down, or when none fits
            recent = {s.action for s in steps[max(0, i - 2) : i]}
            assert step.regime == "helv"
            assert "inject" in recent or len(steps) - i < 3


def test_the_text_after_a_thought_follows_from_it() -> None:
    """The model reads forced tokens: the next step is that of a prompt which holds them."""
    (steps,) = generate(MODEL, [RAGGED[3]])
    ends = [i for i, s in enumerate(steps) if s.action == "inject" and s.token == ord("c")]
    after = ends[0] + 1
    prompt = [*RAGGED[3].prompt, *tokens_of(steps[:after])]
    (fresh,) = generate(MODEL, [Job(prompt, params_of("temperature", PLAIN), budget=1)])
    first = fresh[0].record.choice.observation.metrics
    again = steps[after].record.choice.observation.metrics
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)
