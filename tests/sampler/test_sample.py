"""Single steps of the sampler: actions, and the places of thoughts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.names import REGIMES
from entropix_jax.packed import pack
from entropix_jax.sampler.context import Context, draw
from entropix_jax.sampler.control import Verdict, rewind, wait
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import Parts, SamplerSettings
from entropix_jax.sampler.state import (
    MAX_ATTEMPTS,
    MAX_REACH,
    Choice,
    Proposal,
    RowView,
    SamplerState,
    Step,
)
from tests.support.samplers import (
    FEW,
    LITERAL,
    attn_stats,
    batch_of,
    fresh_state,
    params_of,
    settings_of,
    with_state,
)
from tests.support.steps import BOUNDS, VOCAB, choose_jit, logits_for, rows_of

TEXT = (1, 2, 3, 4)


def run_step(
    logits: np.ndarray, params: SamplerSettings, rows: RowView, state: SamplerState | None = None
) -> tuple[Choice, Step, SamplerState]:
    """Runs one step of rows that share their settings."""
    batch = logits.shape[0]
    state = state or fresh_state(batch)
    sampler = batch_of(*[params] * batch)
    return choose_jit(jnp.asarray(logits, jnp.float32), attn_stats(batch), sampler, state, rows)


def actions_of(choice: Choice) -> list[str]:
    return [ACTIONS[i] for i in choice.proposal.action]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_with_non_finite_logits_are_marked(bad: float) -> None:
    logits, rows = np.tile(logits_for("mid"), (4, 1)), rows_of(*[TEXT] * 4)
    clean, _, _ = run_step(logits, params_of(LITERAL), rows)
    logits[1, 77] = bad
    choice, _, _ = run_step(logits, params_of(LITERAL), rows)
    assert choice.finite.tolist() == [True, False, True, True]
    others = np.array([0, 2, 3])
    np.testing.assert_array_equal(choice.token[others], clean.token[others])
    found, expected = (c.observation.metrics.entropy[others] for c in (choice, clean))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("action", ["inject", "lookup", "branch", "backspace"])
def test_a_custom_arm_cannot_exceed_budgets(action: str) -> None:
    """A row with a spent budget just samples, so that no arm can cause an endless run."""

    def eager(ctx: Context) -> Proposal:
        return draw(action, ctx)

    sampler = load_sampler(LITERAL).with_arm("eager", eager)
    sampler = sampler.with_values({f"arms.{regime}": "eager" for regime in REGIMES})
    logits = jnp.asarray(np.tile(logits_for("mid"), (2, 1)))
    free = {"inject.thought": "a", "backspace.max_prob": 1.0}
    spent = {**free, "inject.per_row": 0, "branch.per_row": 0, "backspace.per_row": 0}
    spent |= {"lookup.per_row": 0}
    settings = batch_of(*(settings_of(sampler.with_values(c)) for c in (free, spent)))
    state = fresh_state(2)
    state = replace(state, trail=replace(state.trail, rewindable=jnp.asarray([1, 1])))
    rows = rows_of(TEXT, TEXT, generated=1, looks_up=True)
    parts = sampler.parts(settings_of(sampler))
    choice, step, after = choose_jit(logits, attn_stats(2), settings, state, rows, parts=parts)
    assert actions_of(choice) == [action, "sample"]
    assert step.forks.tolist() == [action == "branch", False]
    assert step.rewinds.tolist() == [action == "backspace", False]
    assert step.waits.tolist() == [action == "lookup", False]
    assert after.tally.states["inject"].begun.tolist() == [action == "inject", 0]
    assert after.trail.again.tolist() == [action == "backspace", False]
    assert after.trail.rewindable.tolist() == [0, 2]


def test_a_custom_control_cannot_exceed_limits() -> None:
    """A control retracts only within reach and while attempts are left, and waits only for a host
    with a hook. Otherwise the row commits, so that no control can cause an endless run."""

    def eager(ctx: Context, token: jax.Array) -> Verdict:
        verdicts = rewind(jnp.int32(0)), rewind(jnp.int32(2)), wait()
        verdict: Verdict = jax.tree.map(lambda *each: jnp.stack(each)[ctx.generated], *verdicts)
        return verdict

    mechanism = Mechanism("eager", control=eager, holds=lambda ctx: ctx.trail.rewindable)
    sampler = load_sampler("greedy").with_mechanism(mechanism)
    batch, attempts = 5, jnp.asarray([[MAX_ATTEMPTS], [MAX_ATTEMPTS - 1], [0], [0], [0]])
    state, settings = fresh_state(batch), batch_of(*[settings_of(sampler)] * batch)
    reach = jnp.asarray([0, MAX_REACH, 0, 0, 0])
    trail = replace(state.trail, again=jnp.ones(batch, bool), rewindable=reach)
    entries = replace(trail.entries.unpack(), attempts=jnp.tile(attempts, MAX_REACH))
    state = replace(state, trail=replace(trail, entries=pack(entries, 2)))
    rows = replace(rows_of(*[TEXT] * batch), generated=jnp.asarray([0, 0, 1, 2, 2]))
    rows = replace(rows, looks_up=jnp.arange(batch) == 4)
    logits = jnp.asarray(np.tile(logits_for("mid"), (batch, 1)))
    parts = Parts(sampler.mechanisms, frozenset({"argmax", "eager"}))
    _, step, after = choose_jit(logits, attn_stats(batch), settings, state, rows, parts=parts)
    assert step.rewinds.tolist() == [False, True, False, False, False]
    # The rejected token replaces the position eight tokens back in the trail.
    assert after.trail.rewindable[1] == MAX_REACH - 1
    assert step.waits.tolist() == [False] * 4 + [True]


def test_sequence_varentropy_of_small_differences() -> None:
    """The entropies of a long row are nearly equal. Sums of squares would cancel completely."""
    state, rng = fresh_state(1), np.random.default_rng(0)
    entropies = []
    for i in range(60):
        logits = np.zeros((1, VOCAB), np.float32)
        logits[0, 0] = 0.02 * rng.random()
        choice, _, state = run_step(logits, params_of("greedy"), rows_of(TEXT, generated=i), state)
        entropies.append(float(choice.observation.metrics.entropy[0]))
    assert np.var(entropies) < 1e-5
    assert float(choice.observation.sequence_varentropy[0]) == pytest.approx(
        np.var(entropies), rel=0.02
    )


# Every position of a vocabulary of three tokens calls for a retraction.
SMALL: dict[str, Any] = {
    "regimes.lelv": [],
    "arms.lelv": "backspace",
    "loop.max_period": 0,
    "base.temperature": 1.0,
    "base.min_p": 0.0,
    "backspace.reach": 8,
    "backspace.max_prob": 1.0,
    "backspace.per_position": 8,
}


def test_some_token_is_left_to_draw() -> None:
    """Retractions never ban the last token, together with the sampler's own bans."""
    bans: list[list[int]] = [[], [1], [0, 2]]
    settings = batch_of(*(params_of(LITERAL, {**SMALL, "draw.bans": ids}) for ids in bans))
    state, actions = fresh_state(3), ["", "", ""]
    texts: list[list[int]] = [[0], [0], [0]]
    drawn: list[dict[int, list[int]]] = [{}, {}, {}]  # the tokens at each position
    for _ in range(50):
        rows = rows_of(*texts)
        rows = replace(rows, generated=rows.length - 1, vocab_size=3)
        logits = [np.random.default_rng(text).normal(size=3) for text in texts]
        seen = jnp.asarray(np.stack(logits), jnp.float32)
        choice, step, state = choose_jit(seen, attn_stats(3), settings, state, rows, parts=FEW)
        for row, text in enumerate(texts):
            actions[row] += ACTIONS[choice.proposal.action[row]][0]
            if step.rewinds[row]:
                del text[int(step.rows.length[row]) :]
            else:
                drawn[row].setdefault(len(text), []).append(int(choice.token[row]))
                text.append(int(choice.token[row]))
    assert actions == ["abbbb" * 10, ("abb" * 17)[:50], "a" * 50]
    assert state.tally.states["backspace"].backspaced.tolist() == [20, 17, 0]
    for banned, positions in zip(bans, drawn, strict=True):
        for tokens in [*positions.values()][:-1]:
            assert sorted([*tokens, *banned]) == [0, 1, 2]


def test_places_of_lookups() -> None:
    """A row waits if it has a lookup function, budget and no cooldown, which begins then."""
    fields = [(True, 4, 0, 0), (False, 4, 0, 0), (True, 3, 0, 0), (True, 4, 2, 0), (True, 4, 0, 1)]
    looks_up, generated, begun, cooldown = (jnp.asarray(each) for each in zip(*fields, strict=True))
    own = {"arms.mid": "lookup", "lookup.per_row": 2, "lookup.earliest": 4, "lookup.cooldown": 7}
    rows = replace(rows_of(*[TEXT] * 5), looks_up=looks_up, generated=generated)
    state = with_state(fresh_state(5), "lookup", begun=begun, cooldown=cooldown)
    logits = np.tile(logits_for("mid"), (5, 1))
    choice, step, after = run_step(logits, params_of(LITERAL, {**BOUNDS, **own}), rows, state)
    assert actions_of(choice) == ["lookup", *["sample"] * 4]
    assert step.waits.tolist() == [True, *[False] * 4]
    assert after.tally.states["lookup"].begun.tolist() == [1, 0, 0, 2, 0]
    assert after.tally.states["lookup"].cooldown.tolist() == [7, 0, 0, 0, 0]


# Thoughts


def test_a_thought_is_not_repeated_at_once() -> None:
    """As in documents 000 and 001, no thought follows if the row's own last tokens equal a thought,
    written by the model or not. Positions before the first and past the last token do not count."""
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
        _, step, _ = run_step(logits, params, rows_of(*rows))
        assert (step.tally_before.states["inject"].begun > 0).tolist() == [*rows.values()], thoughts


# Thoughts at the ends of sentences

# Every token is HELV, and no other mechanism is active.
ALWAYS: dict[str, Any] = {
    "start.tokens": 0,
    "regimes.lelv": ["entropy < -1"],
    "regimes.helv": [],
    "loop.max_period": 0,
    "dry.multiplier": 0.0,
    "inject.thought": " Wait",
    "inject.earliest": 5,
}
END = ord("~")  # tokens are bytes


def thought_case(
    text: str = "It is late.",
    drawn: str = " ",
    *,
    generated: int = 9,
    remaining: int = 5,
    begun: int = 0,
    cooldown: int = 0,
    eos: int = END,
    **changes: Any,
) -> dict[str, Any]:
    """Returns a row and the token that would be sampled without a thought."""
    own = {key.replace("__", "."): value for key, value in changes.items()}
    return {**locals(), "own": own}


# Cases with `entropix`, and whether a thought is written.
CASES: list[tuple[dict[str, Any], bool]] = [
    (thought_case(), True),
    (thought_case(drawn="x"), False),
    (thought_case("It is late"), False),
    (thought_case("It is late\n", "x"), True),
    # An end token is never replaced.
    (thought_case(drawn="~"), False),
    # Limits: earliest position, budget, cooldown, and space for the whole thought.
    (thought_case(generated=4), False),
    (thought_case(generated=0, inject__earliest=0), True),
    (thought_case(begun=2), False),
    (thought_case(begun=7, inject__per_row=8), True),
    (thought_case(cooldown=1), False),
    (thought_case(remaining=4), False),
    (thought_case(inject__thought=""), False),
    (thought_case(inject__thought=["", " Hm"], remaining=3), True),
    # Thoughts with banned tokens are not written.
    (thought_case(draw__bans=[1, ord("i")]), False),
    (thought_case(draw__bias=[[ord("t"), -100]]), False),
    (thought_case(draw__bias=[[ord("t"), -99.5]]), True),
    (thought_case(draw__bans=[ord("i")], inject__thought=[" Hi", " Wo"], begun=1), True),
    (thought_case(draw__bans=[ord("i")], inject__thought=[" Hi", " Wo"]), False),
    # Thoughts anywhere, as in the documents.
    (thought_case("It is", "x", inject__after=""), True),
    # Other marks.
    (thought_case("It is late;", inject__after=";"), True),
    (thought_case(inject__after=";"), False),
]


def test_places_of_thoughts() -> None:
    """All other rows commit the sampled token, at the temperature of the arm."""
    cases = [given for given, _ in CASES]
    batch = len(cases)
    settings = batch_of(*(params_of("entropix", {**ALWAYS, **each["own"]}) for each in cases))
    rows = rows_of(*(each["text"].encode() for each in cases))
    fields: dict[str, Any] = {
        name: jnp.asarray([each[name] for each in cases]) for name in ("generated", "remaining")
    }
    rows = replace(rows, eos_ids=jnp.asarray([[-1, each["eos"]] for each in cases]), **fields)
    state = with_state(
        fresh_state(batch),
        "inject",
        **{name: jnp.asarray([each[name] for each in cases]) for name in ("begun", "cooldown")},
    )
    drawn = np.array([ord(each["drawn"]) for each in cases])
    logits = np.full((batch, VOCAB), -200.0, np.float32)
    logits[np.arange(batch), drawn] = 0
    choice, step, after = choose_jit(jnp.asarray(logits), attn_stats(batch), settings, state, rows)
    for i, (given, writes) in enumerate(CASES):
        action = ACTIONS[int(choice.proposal.action[i])]
        assert action == ("inject" if writes else "sample"), given
        assert int(after.tally.states["inject"].begun[i]) == given["begun"] + writes, given
        assert float(choice.proposal.temperature[i]) == pytest.approx(0.666 * (1.3 + 0.2 * 0.25))
        queue = int(step.tally_before.queued[i])
        if not writes:
            assert (int(choice.token[i]), queue) == (drawn[i], 0), given
        else:
            texts = given["own"].get("inject.thought", ALWAYS["inject.thought"])
            texts = [text for text in ([texts] if isinstance(texts, str) else texts) if text]
            thought = texts[given["begun"] % len(texts)].encode()
            assert (int(choice.token[i]), queue) == (thought[0], len(thought)), given
            place = int(rows.length[i])
            assert step.rows.history[i, place : place + queue].tolist() == [*thought], given
