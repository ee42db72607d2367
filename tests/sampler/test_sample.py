"""One call of `choose`, and rows that are played step by step: what acts, and thoughts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.names import REGIMES
from entropix_jax.sampler.context import Context, Proposal, draw
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import Rows, SamplerState, Step
from entropix_jax.sampler.step import Choice
from tests.support.samplers import (
    LITERAL,
    attn_stats,
    batch_of,
    fresh_state,
    params_of,
    settings_of,
    with_own,
)
from tests.support.steps import BOUNDS, PROMPT, VOCAB, Play, choose_jit, logits_for, rows_of

TEXT = (1, 2, 3, 4)


def choose(
    logits: np.ndarray, params: SamplerSettings, rows: Rows, state: SamplerState | None = None
) -> tuple[Choice, Step, SamplerState]:
    """One step of rows that share their settings."""
    batch = logits.shape[0]
    state = state or fresh_state(batch)
    sampler = batch_of(*[params] * batch)
    return choose_jit(jnp.asarray(logits, jnp.float32), attn_stats(batch), sampler, state, rows)


def actions_of(choice: Choice) -> list[str]:
    return [ACTIONS[i] for i in choice.proposal.action]


def test_a_regime_is_served_by_its_arm() -> None:
    """The table of arms is a setting. In the first step there is nothing to go back to."""
    logits = np.stack([logits_for(regime) for regime in REGIMES])
    sampling = {f"arms.{regime}": "sample" for regime in REGIMES}
    arms = ["argmax", "inject", "branch", "adaptive", "adaptive"]
    for changes, expected in (({}, arms), (sampling, ["sample"] * len(REGIMES))):
        params = params_of(LITERAL, {**BOUNDS, **changes})
        choice, _, _ = choose(logits, params, rows_of(*[TEXT] * len(REGIMES)))
        assert tuple(REGIMES[i] for i in choice.observation.regime) == REGIMES
        assert actions_of(choice) == expected


def test_a_row_that_loops_is_served_by_an_arm_of_its_own() -> None:
    """Hotter with each further copy; its regime stays the measured one."""
    texts = [(1, 2, 3, 7, 7, 7), (1, 2, 7, 7, 7, 7), (1, 7, 7, 7, 7, 7), (1, 2) * 3]
    logits = np.tile(logits_for("lelv"), (4, 1))
    loop = {"arms.loop": "sample", "loop.heating": 0.5, "loop.similarity": 1.0}
    params = params_of(LITERAL, {**BOUNDS, **loop})
    choice, _, _ = choose(logits, params, rows_of(*texts, generated=6))
    assert choice.observation.rounds.tolist() == [0, 1, 2, 0]
    assert {REGIMES[i] for i in choice.observation.regime} == {"lelv"}
    assert actions_of(choice) == ["argmax", "sample", "sample", "argmax"]
    heats = np.array([0, 1, 1.5, 0])
    np.testing.assert_allclose(choice.proposal.temperature, 0.666 * heats, rtol=1e-6)
    # At most `hottest`, which binds nobody else.
    params = params_of(LITERAL, {**BOUNDS, **loop, "loop.hottest": 0.75, "arms.lelv": "resample"})
    choice, _, _ = choose(logits, params, rows_of(*texts, generated=6))
    np.testing.assert_allclose(choice.proposal.temperature, [2.0, 0.666, 0.75, 2.0], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_with_impossible_logits_are_marked(bad: float) -> None:
    logits, rows = np.tile(logits_for("mid"), (4, 1)), rows_of(*[TEXT] * 4)
    clean, _, _ = choose(logits, params_of(LITERAL), rows)
    logits[1, 77] = bad
    choice, _, _ = choose(logits, params_of(LITERAL), rows)
    assert choice.finite.tolist() == [True, False, True, True]
    others = np.array([0, 2, 3])
    np.testing.assert_array_equal(choice.token[others], clean.token[others])
    found, expected = (c.observation.metrics.entropy[others] for c in (choice, clean))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("action", ["inject", "branch", "backspace"])
def test_an_arm_of_ones_own_is_held_to_what_its_row_may_do(action: str) -> None:
    """Where a row may not, it just draws: no arm can make a run that never ends."""

    def eager(ctx: Context) -> Proposal:
        return draw(action, ctx)

    sampler = load_sampler(LITERAL).with_arm("eager", eager)
    sampler = sampler.with_values({f"arms.{regime}": "eager" for regime in REGIMES})
    logits = jnp.asarray(np.tile(logits_for("mid"), (2, 1)))
    free = {"inject.thought": "a", "backspace.max_prob": 1.0}
    spent = {**free, "inject.per_row": 0, "branch.per_row": 0, "backspace.per_row": 0}
    settings = batch_of(*(settings_of(sampler.with_values(c)) for c in (free, spent)))
    state = fresh_state(2)
    state = replace(state, trail=replace(state.trail, drawn=jnp.asarray([1, 1])))
    rows = rows_of(TEXT, TEXT, generated=1)
    choice, step, after = choose_jit(logits, attn_stats(2), settings, state, rows)
    assert actions_of(choice) == [action, "sample"]
    assert step.forks.tolist() == [action == "branch", False]
    assert step.rewinds.tolist() == [action == "backspace", False]
    assert after.tally.own["inject"].begun.tolist() == [action == "inject", 0]
    assert after.trail.again.tolist() == [action == "backspace", False]
    assert after.trail.drawn.tolist() == [0, 2]


def test_sequence_varentropy_of_small_differences() -> None:
    """A long row of nearly equal entropies: sums of squares would have lost it all."""
    state, rng = fresh_state(1), np.random.default_rng(0)
    entropies = []
    for i in range(60):
        logits = np.zeros((1, VOCAB), np.float32)
        logits[0, 0] = 0.02 * rng.random()
        choice, _, state = choose(logits, params_of("greedy"), rows_of(TEXT, generated=i), state)
        entropies.append(float(choice.observation.metrics.entropy[0]))
    assert np.var(entropies) < 1e-5
    assert float(choice.observation.sequence_varentropy[0]) == pytest.approx(
        np.var(entropies), rel=0.02
    )


# Thoughts


def test_the_longest_thought() -> None:
    thought = "".join(chr(33 + i) for i in range(64))
    row = Play(budget=70, inject__thought=thought, inject__cooldown=1)
    assert row.play("h" + "m" * 64) == "i" * 64 + "d"
    assert row.generated[:64] == [*thought.encode()]


def test_a_row_that_has_just_asked_does_not_ask_again() -> None:
    """Documents 000 and 001. Whoever wrote the question: the row's last tokens count, no others,
    and no other row's. What lies before its first token is none; junk lies past its last."""
    junk = chr(VOCAB - 1)
    for thoughts, rows in (
        (["abc"], {b"12abc": False, b"abc": False, b"abc3": True, b"abcab": True, b"bc": True}),
        (["abc", "xy"], {b"xy": False, b"x": True, b"abcxy": False, b"ab1c": True}),
        (junk, {b"12": True}),
        ("a" + junk, {b"1a": True}),
        ("\5\5", {b"\5": True, b"\5\5": False, b"\5\6": True}),
        ("a" * 40, {b"a": True, b"a" * 39: True, b"a" * 40: False, b"a" * 41: False}),
    ):
        params = params_of(LITERAL, {**BOUNDS, "inject.thought": thoughts})
        logits = np.tile(logits_for("helv"), (len(rows), 1))
        _, step, _ = choose(logits, params, rows_of(*rows))
        assert (step.tally.own["inject"].begun > 0).tolist() == [*rows.values()], thoughts


def play_by_hand(
    script: str,
    tokens: Sequence[int],
    thoughts: Sequence[bytes],
    *,
    cooldown: int,
    until_confident: bool,
    budget: int,
    per_row: int,
) -> tuple[str, list[int | None]]:
    """The oracle of section 4: actions, and the tokens that are forced. `tokens` are those of the
    row, the prompt's first."""
    actions, waiting, begun = "", 0, 0
    forced: list[int | None] = []
    queue: list[int] = []
    for i, letter in enumerate(script):
        before = bytes(tokens[: PROMPT + i])
        thought = thoughts[begun % len(thoughts)] if thoughts else b""
        if (
            not queue
            and letter == "h"
            and waiting == 0
            and begun < per_row
            and 0 < len(thought) <= budget - i
            and not any(map(before.endswith, thoughts))
        ):
            queue = [*thought]
            begun += 1
        if queue:
            actions += "i"
            forced.append(queue.pop(0))
            if not queue:
                waiting = cooldown
            continue
        actions += {"l": "a", "h": "s", "e": "e", "r": "r", "m": "d"}[letter]
        forced.append(None)
        waiting = max(waiting - 1, 0)
        if until_confident and letter == "l":
            waiting = 0
    return actions, forced


THOUGHTS = ["", "a", "abc", "abcdefg", ["ab", "c"], "\t", ["\t\t", "x"], ["q", "r", "stu", "\t"]]


@pytest.mark.parametrize("case", range(32))
def test_random_rows_against_the_oracle(case: int) -> None:
    rng = np.random.default_rng(case)
    thought = THOUGHTS[case % len(THOUGHTS)]
    settings: dict[str, Any] = {
        "cooldown": int(rng.integers(0, 6)),
        "until_confident": bool(rng.random() < 0.5),
        "per_row": int(rng.choice([1, 3, 100])),
    }
    budget = int(rng.integers(20, 41))
    script = "".join(rng.choice(list("hhhlmer"), size=budget))
    changes = {f"inject.{key}": value for key, value in settings.items()}
    row = Play(budget=budget, inject__thought=thought, **changes)
    actions = row.play(script)
    texts = [thought] if isinstance(thought, str) else thought
    encoded = [text.encode() for text in texts if text]
    expected, forced = play_by_hand(script, row.tokens, encoded, **settings, budget=budget)
    assert actions == expected
    for token, wanted in zip(row.generated, forced, strict=True):
        assert wanted is None or token == wanted


def test_where_the_text_is_asked_for_no_thought_need_be_configured() -> None:
    """Nor fit: what will be written is not known yet. The rest holds as ever."""
    logits = logits_for("helv")[None]

    def waits(thought: str, *, asks: bool, history: Sequence[int] = (1, 2), **own: int) -> bool:
        params = params_of(LITERAL, {**BOUNDS, "inject.thought": thought, "inject.per_row": 2})
        counts = {name: jnp.asarray([value]) for name, value in own.items()}
        state = with_own(fresh_state(1), "inject", **counts)
        rows = rows_of(history, remaining=2, asks=asks)
        _, step, after = choose(logits, params, rows, state)
        begun = int(after.tally.own["inject"].begun[0]) - own.get("begun", 0)
        forced = int(step.tally.queued[0])
        assert bool(step.waits[0]) == (asks and begun == 1)
        assert (forced > 0) == (not asks and begun == 1)
        return begun == 1

    assert [waits(thought, asks=True) for thought in ("", "ab", "abc")] == [True] * 3
    assert [waits(thought, asks=False) for thought in ("", "ab", "abc")] == [False, True, False]
    assert not waits("ab", asks=True, cooldown=1)
    assert waits("ab", asks=True, begun=1)
    assert not waits("ab", asks=True, begun=2)
    assert not waits("ab", asks=True, history=[1, *b"ab"])
