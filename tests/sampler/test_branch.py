"""Branching: candidates at the edges of their rules, and branches whose logits are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.state import ERROR, LENGTH
from entropix_jax.names import REGIMES
from entropix_jax.replay import threefry
from entropix_jax.sampler.draw import row_key
from entropix_jax.sampler.settings import MAX_WIDTH
from entropix_jax.sampler.state import Step
from tests.support.samplers import (
    BATCH,
    FEW,
    LITERAL,
    Job,
    attn_stats,
    batch_of,
    fresh_state,
    generate,
    params_of,
    tiny_model,
)
from tests.support.steps import VOCAB, choose_jit, rows_of

# Every token branches.
EVERYWHERE: Mapping[str, Any] = {
    **{f"regimes.{box}": ["entropy < -1"] for box in REGIMES[:-1]},
    "regimes.lehv": ["entropy > -1"],
    "loop.max_period": 0,
    "branch.max_share": 1e6,
    "branch.width": 4,
    "branch.depth": 6,
    "branch.min_p": 0.0,
    "branch.top_p": 1.0,
}


def candidates_of(logits: np.ndarray, *changes: Mapping[str, Any]) -> Step:
    """Runs a step of rows with the same logits and these settings. Other tokens have no mass."""
    settings = [params_of(LITERAL, {**EVERYWHERE, **values}) for values in changes]
    batch, rows = len(settings), rows_of(*[range(1, 5)] * len(settings))
    every = np.full((batch, VOCAB), -1000, np.float32)
    every[:, : len(logits)] = logits
    return choose_jit(every, attn_stats(batch), batch_of(*settings), fresh_state(batch), rows)[1]


def test_top_p_of_1_keeps_the_smallest_tail() -> None:
    """Its mass would be lost if it were added to the first token's."""
    logits = np.array([0, *range(-30, -53, -1)])
    changes: list[dict[str, Any]] = [
        {},
        {"branch.top_p": 0.9999999},
        {"branch.min_p": 1e-20},
        {"branch.width": 3},
    ]
    wide = [{"branch.width": MAX_WIDTH} | values for values in changes]
    assert candidates_of(logits, *wide).width.tolist() == [MAX_WIDTH, 1, MAX_WIDTH, 3]


def test_top_p_ends_with_the_token_that_reaches_it() -> None:
    """Four equally likely tokens have an exact quarter of the mass each."""
    logits = np.full(24, -60.0)
    logits[[2, 5, 11, 20]] = 1.5
    shares = {0.1: 1, 0.25: 1, 0.26: 2, 0.5: 2, 0.75: 3, 0.76: 4, 0.9999: 4}
    changes = [{"branch.top_p": share, "branch.width": 8} for share in shares]
    assert candidates_of(logits, *changes).width.tolist() == [*shares.values()]


def test_gumbel_noise_is_finite() -> None:
    """A uniform number just below 1 must not round up to 1, and the noise of one row does not
    change another row."""
    vocab, row, at = 1246, "41384", 712
    logits = np.random.default_rng(0).normal(size=vocab).astype(np.float32)
    uniforms = threefry.uniforms(threefry.row_key(0, row), 12, 0, "noise", vocab)
    assert uniforms[at] == 1 - 2.0**-24
    rows = replace(rows_of(range(1, 13), range(1, 13)), vocab_size=vocab)
    rows = replace(rows, key=jnp.asarray(np.stack([row_key(0, row)] * 2)))
    changes = [{**EVERYWHERE, "branch.noise": noise} for noise in (0.0, 0.5)]
    settings = batch_of(*(params_of(LITERAL, values) for values in changes))
    both = jnp.asarray(np.tile(logits, (2, 1)))
    step = choose_jit(both, attn_stats(2), settings, fresh_state(2), rows, parts=FEW)[1]
    noisy = logits - 0.5 * np.log(-np.log(np.maximum(uniforms, 2.0**-25)))
    for found, z in zip(step.candidates, (logits, noisy), strict=True):
        assert found[:4].tolist() == np.argsort(-z)[:4].tolist()


# Logits that are not finite

CONFIG, PARAMS = tiny_model()


def broken_at(token: int) -> Any:
    """Returns the model with NaN as the embedding of a token."""
    return CONFIG, replace(PARAMS, embedding=PARAMS.embedding.at[token].set(jnp.nan))


def test_a_row_whose_branches_all_fail_ends_where_they_do() -> None:
    """The error names the position after the token that caused it. The other rows continue."""
    one = {**EVERYWHERE, "branch.width": 1, "branch.until": "depth"}
    jobs = [
        Job([20 + i, 40 + i], params_of(LITERAL, one if i == 0 else EVERYWHERE))
        for i in range(BATCH)
    ]
    said = generate((CONFIG, PARAMS), jobs)[0][0].tokens
    assert said[2] not in [*said[:2], *jobs[0].prompt]
    (fork, error), *others = generate(broken_at(said[2]), jobs)
    assert fork.tokens == said[:3]
    assert (fork.scores, fork.ambiguous) == ((-np.inf,), False)
    assert (error.status, error.position) == (ERROR, 5)
    assert sum(lines[-1].status == LENGTH for lines in others) > BATCH // 2


def test_a_token_that_breaks_the_model_is_not_retracted() -> None:
    """The row ends with an error, even where it would go back to that token."""
    always = {f"arms.{regime}": "backspace" for regime in REGIMES}
    sampler = params_of(LITERAL, {**EVERYWHERE, **always, "backspace.max_prob": 1.0})
    job = Job([20, 40], sampler)
    first, second = generate((CONFIG, PARAMS), [job])[0][:2]
    assert first.position == second.position == 2  # the row went back
    found = generate(broken_at(first.token), [job])[0]
    assert [line.status for line in found[1:]] == [ERROR]
    assert (found[0].token, found[1].position) == (first.token, 3)


def test_a_nan_in_the_prompt_ends_the_row_at_once() -> None:
    """The status stays ERROR if the token of that step is an end token."""
    job = Job([20, 7, 30], params_of("greedy"))
    (lines,) = generate(broken_at(7), [job])
    (again,) = generate(broken_at(7), [job], eos_ids=(lines[0].token, -1))
    for found in (lines, again):
        assert [(line.position, line.status) for line in found] == [(3, ERROR)]
