"""Biases: what is drawn against float64, and what they leave as it is."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.names import REGIMES
from entropix_jax.sampler.filters import penalise
from entropix_jax.sampler.keys import STREAM_DRAW, uniforms
from entropix_jax.sampler.settings import MAX_BIASES
from tests.support.draw_oracles import Kept
from tests.support.reference import log_softmax
from tests.support.samplers import (
    ARMS,
    LITERAL,
    PLAIN,
    RULES,
    Job,
    attn_stats,
    batch_of,
    context,
    fresh_state,
    generate,
    params_of,
    tiny_model,
)
from tests.support.steps import VOCAB, choose_jit, logits_for, rows_of

TEXT = (1, 2, 3, 4)
MODEL = tiny_model()
Pairs = Sequence[Sequence[float]]


def random_pairs(rng: np.random.Generator) -> list[list[float]]:
    """Biases of any number of tokens, small ones or up to the ends of the range."""
    ids = rng.choice(VOCAB, rng.choice([0, 1, 5, MAX_BIASES]), replace=False).tolist()
    values = rng.choice([0.5, 4.0, 100.0]) * rng.uniform(-1, 1, len(ids))
    ends = rng.random(len(ids)) < 0.1
    return [[i, x] for i, x in zip(ids, np.where(ends, np.sign(values) * 100, values), strict=True)]


def biased(logits: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Logits with biases, float64."""
    z = logits.astype(np.float64)
    for token, value in pairs:
        z[int(token)] += np.float32(value)
    return z


def modified(logits: Any, floored: Any, **values: Any) -> list[float]:
    """What one row is drawn from, which has written token 0."""
    values = {"metrics.noise_floor": True, **{k.replace("__", "."): v for k, v in values.items()}}
    z, log_probs = (jnp.asarray(x, jnp.float32) for x in (logits, floored))
    ctx = context(settings=params_of("min-p", values), log_probs=log_probs)
    return np.asarray(penalise(z, ctx)).tolist()


# What is drawn


def test_a_draw_is_from_the_biased_logits() -> None:
    """softmax(logits + bias), each row by its own; ln p stays the model's."""
    rng, number = np.random.default_rng(1), 400
    logits = rng.normal(size=(number, VOCAB)) * rng.choice([0.1, 1, 4], size=(number, 1))
    logits = logits.astype(np.float32)
    pairs = [random_pairs(rng) for _ in range(number)]
    values = {**PLAIN, "base.temperature": 1.0}
    settings = batch_of(*(params_of("temperature", {**values, "draw.bias": p}) for p in pairs))
    rows = rows_of(*[TEXT] * number)
    state, stats = fresh_state(number), attn_stats(number)
    choice, _, _ = choose_jit(jnp.asarray(logits), stats, settings, state, rows)
    zero = jnp.zeros(number, jnp.int32)
    drawn_at = np.asarray(uniforms(rows.keys, rows.length, zero, zero + STREAM_DRAW, 1))
    tokens = np.asarray(choice.token)
    moved = 0
    for row in range(number):
        z = biased(logits[row], pairs[row]).astype(np.float32)  # with the ties of float32
        ids = tokens[row : row + 1]
        everything = np.ones(VOCAB, bool)
        Kept.of("nucleus", z, 1.0, 0, 1.0, 0.0).check(everything, ids, drawn_at[row])
        plain = Kept.of("nucleus", logits[row], 1.0, 0, 1.0, 0.0)
        order = plain.by_id(VOCAB)
        cumulated = np.cumsum(plain.mass[plain.rank[order]]) / np.sum(plain.mass)
        moved += int(ids[0] != order[np.searchsorted(cumulated, drawn_at[row, 0], "right")])
        own = log_softmax(logits[row].astype(np.float64))[ids[0]]
        np.testing.assert_allclose(choice.logprob[row], own, rtol=1e-5, atol=1e-5)
    assert moved > number / 4, "the biases show too little"


def test_every_arm_and_rule_takes_a_token_that_is_raised_by_100() -> None:
    """Also the argmax, and where the noise floor would leave the token out; metrics and regimes
    are the model's own."""
    token = 40
    cases = [(arm, rule) for arm in ARMS for rule in RULES]
    others = {"loop.max_period": 0, "inject.thought": ""}
    changes = [
        {**{f"arms.{name}": arm for name in REGIMES}, "truncation.rule": rule, **others}
        for arm, rule in cases
    ]
    logits = jnp.asarray(np.tile(logits_for("lelv"), (len(cases), 1)))
    rows, state = rows_of(*[TEXT] * len(cases)), fresh_state(len(cases))
    seen = []
    for floor in (False, True):
        for bias in ([], [[token, 100.0]]):
            own = {"draw.bias": bias, "metrics.noise_floor": floor}
            settings = batch_of(*(params_of(LITERAL, {**c, **own}) for c in changes))
            choice, step, _ = choose_jit(logits, attn_stats(len(cases)), settings, state, rows)
            expected = token if bias else 9
            for row, case in enumerate(cases):
                found = step.candidates[row, 0] if step.forks[row] else choice.token[row]
                assert int(found) == expected, case
                assert not step.forks[row] or int(step.width[row]) == 1
            seen.append(jax.tree.leaves(choice.observation))
    for without, raised in (seen[:2], seen[2:]):
        for one, other in zip(without, raised, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_ban_outweighs_a_bias() -> None:
    found = modified([1, 2, 3], [0, 0, 0], draw__bans=[1], draw__bias=[[1, 100], [2, -100]])
    assert found == [1, -np.inf, -97]


def test_biases_come_before_penalties() -> None:
    found = modified([1, 2], [0, 0], draw__bias=[[0, 2.0]], repetition__penalty=1.5)
    assert found == [2, 2]


def test_the_noise_floor_is_of_the_models_logits() -> None:
    """A raised token is above it, a lowered one stays where it was."""
    low = -np.inf
    logits, floored = [4, 3, -9, -9, -9], [0, 0, low, low, low]
    for bias, expected in (
        ([], [4, 3, low, low, low]),
        ([[2, 100]], [4, 3, 91, low, low]),
        ([[2, 0.5], [3, 0]], [4, 3, -8.5, low, low]),
        ([[0, -100], [1, 2], [4, -1]], [-96, 5, low, low, low]),
    ):
        assert modified(logits, floored, draw__bias=bias) == expected
    # A little more for a token does not make it the only one where the bans take all others above.
    found = modified(logits, floored, draw__bias=[[2, 0.5], [1, 9]], draw__bans=[0, 1])
    assert found == [low, low, -8.5, -9, -9]


# What they leave as it is


def test_a_bias_of_nothing_changes_nothing() -> None:
    """Nor do other rows' biases."""
    values = {**PLAIN, "base.temperature": 1.5, "base.top_k": 0, "base.top_p": 1.0}

    def job(row: str, pairs: Pairs) -> Job:
        sampler = params_of(LITERAL, {**values, "draw.bias": pairs})
        return Job([5, 6, 7], sampler, budget=24, row_id=row)

    alone = generate(MODEL, [job(str(i), []) for i in range(4)])
    zeros = [[i, 0.0] for i in range(MAX_BIASES)]
    others = [[[i, bias] for i in range(MAX_BIASES)] for bias in (-50.0, 3.0, 9.0)]
    beside = generate(MODEL, [job("0", []), job("1", zeros), *(job("2", p) for p in others)])
    for lines, same in zip(alone[:2], beside, strict=False):
        assert [line.exact for line in lines] == [line.exact for line in same]
    texts = {tuple(line.token for line in lines) for lines in (alone[2], *beside[2:])}
    assert len(texts) > 2
