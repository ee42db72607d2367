"""One call of `choose`, and rows that are played step by step: thoughts, penalties, bans, noise."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.names import REGIMES
from entropix_jax.sampler.keys import STREAM_CANDIDATE, STREAM_DRAW, uniforms
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.metrics import Metrics, noise_floor
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.proposal import Proposal, RowView, draw
from entropix_jax.sampler.settings import MAX_DRAWS, SamplerSettings
from entropix_jax.sampler.state import Rows, SamplerState, Step
from entropix_jax.sampler.step import Choice
from tests.support.samplers import (
    ARMS,
    EPSILON,
    NUM_LAYERS,
    PLAIN,
    attn_stats,
    batch_of,
    encode,
    fresh_state,
    params_of,
    with_own,
)
from tests.support.steps import BOUNDS, PROMPT, SLOTS, VOCAB, Play, choose_jit, logits_for, rows_of

MANY = 64  # rows, where frequencies count


def step_once(
    logits: np.ndarray, params: SamplerSettings, rows: Rows, state: SamplerState | None = None
) -> tuple[Choice, Step, SamplerState]:
    """One step of rows that share their settings."""
    batch = logits.shape[0]
    state = state or fresh_state(batch, VOCAB)
    sampler = batch_of(*[params] * batch)
    return choose_jit(jnp.asarray(logits, jnp.float32), attn_stats(batch), sampler, state, rows)


def choose_once(logits: np.ndarray, params: SamplerSettings, rows: Rows) -> Choice:
    return step_once(logits, params, rows)[0]


@pytest.mark.parametrize("regime", REGIMES)
def test_a_regime_is_served_by_its_arm(regime: str) -> None:
    params = params_of("entropix", BOUNDS)
    choice = choose_once(logits_for(regime)[None], params, rows_of(1))
    expected = dict(
        # In the first step there is nothing that could be taken back.
        zip(REGIMES, ("argmax", "inject", "branch", "resample", "adaptive"), strict=True)
    )
    assert REGIMES[int(choice.observation.regime[0])] == regime
    assert ACTIONS[int(choice.proposal.action[0])] == expected[regime]
    # The table of arms is a setting.
    params = params_of("entropix", {**BOUNDS, f"arms.{regime}": "sample"})
    choice = choose_once(logits_for(regime)[None], params, rows_of(1))
    assert ACTIONS[int(choice.proposal.action[0])] == "sample"


def test_logprob_is_of_the_unmodified_logits() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, VOCAB)).astype(np.float32)
    changes = {**PLAIN, "repetition.penalty": 3.0, "draw.bans": [5], "metrics.noise_floor": True}
    params = params_of("entropix", changes, epsilon=0.5)
    choice = choose_once(logits, params, rows_of(4))
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    token = np.asarray(choice.token)
    np.testing.assert_allclose(choice.logprob, expected[range(4), token], rtol=1e-5)
    assert np.all(choice.finite)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_with_impossible_logits_are_marked(bad: float) -> None:
    logits = np.tile(logits_for("mid"), (4, 1))
    clean = choose_once(logits, params_of("entropix"), rows_of(4))
    logits[1, 77] = bad
    choice = choose_once(logits, params_of("entropix"), rows_of(4))
    assert choice.finite.tolist() == [True, False, True, True]
    for row in (0, 2, 3):
        assert int(choice.token[row]) == int(clean.token[row])
        entropies = [c.observation.metrics.entropy[row] for c in (choice, clean)]
        assert float(entropies[0]) == float(entropies[1])


@pytest.mark.parametrize("action", ["inject", "branch", "backspace"])
def test_an_arm_of_ones_own_is_held_to_what_its_row_may_do(action: str) -> None:
    """Where a row may not, it just draws: no arm can make a run that never ends."""

    def eager(metrics: Metrics, settings: SamplerSettings, row: RowView) -> Proposal:
        return draw(action, settings)

    sampler = load_sampler("entropix").with_arm("eager", eager)
    sampler = sampler.with_values({f"arms.{regime}": "eager" for regime in REGIMES})
    logits = jnp.asarray(np.tile(logits_for("mid"), (2, 1)))
    free = {"inject.thought": "a", "branch.per_row": 1}
    spent = {"inject.thought": "a", "inject.per_row": 0, "branch.per_row": 0}
    options: Any = {"num_layers": NUM_LAYERS, "epsilon": EPSILON, "encode": encode}
    settings = batch_of(*(sampler.with_values(c).settings(**options) for c in (free, spent)))
    state, drawn = fresh_state(2, VOCAB), jnp.asarray([True, False])
    state = replace(state, last=replace(state.last, logits=logits, drawn=drawn))
    rows = rows_of(2, generated=1)
    choice, step, after = choose_jit(logits, attn_stats(2), settings, state, rows)
    assert [ACTIONS[i] for i in choice.proposal.action] == [action, "sample"]
    assert step.rolls_out.tolist() == [action == "branch", False]
    assert step.backspaces.tolist() == [action == "backspace", False]
    assert after.tally.own["inject"].begun.tolist() == [action == "inject", 0]
    assert after.last.drawn.tolist() == [action == "backspace", True]


# Thoughts


def test_the_longest_thought() -> None:
    thought = "".join(chr(33 + i) for i in range(64))
    row = Play(budget=70, inject__thought=thought, inject__cooldown=1)
    assert row.play("h" + "m" * 64) == "i" * 64 + "d"
    assert row.generated[:64] == [*thought.encode()]


def begins(step: Step) -> list[bool]:
    """Which rows begin a thought, or wait for one, in their first step."""
    return (step.tally.own["inject"].begun > 0).tolist()


def fires(thoughts: Sequence[str], histories: Sequence[Sequence[int]]) -> list[bool]:
    """Whether a thought begins in each row of one batch, all of them in HELV."""
    batch = len(histories)
    params = params_of("entropix", {**BOUNDS, "inject.thought": [*thoughts]})
    slots = np.full((batch, SLOTS), VOCAB - 1, np.int32)
    for row, history in enumerate(histories):
        slots[row, : len(history)] = history
    length = jnp.asarray([len(history) for history in histories], jnp.int32)
    rows = replace(rows_of(batch), history=jnp.asarray(slots), length=length)
    return begins(step_once(np.tile(logits_for("helv"), (batch, 1)), params, rows)[1])


def test_a_row_that_has_just_asked_does_not_ask_again() -> None:
    """Documents 000 and 001. Whoever wrote the question: the row's last tokens count, no others,
    and no other row's."""
    rows = [
        ([1, 2, *b"abc"], False),
        ([*b"abc"], False),  # all there is
        ([1, 2, *b"abc", 3], True),
        ([*b"abcab"], True),
        ([*b"bc"], True),
        ([1, 2, 3, 4], True),
        ([1, *b"xy"], False),  # either of the thoughts
        ([1, *b"x"], True),
        ([*b"abcxy"], False),
        ([*b"ab", 1, ord("c")], True),
    ]
    assert fires(["abc", "xy"], [row for row, _ in rows]) == [wanted for _, wanted in rows]
    # The slots past a row's end hold the last token of the vocabulary.
    assert fires([chr(VOCAB - 1)], [[1, 2]]) == [True]
    assert fires(["a" + chr(VOCAB - 1)], [[1, ord("a")]]) == [True]


def test_a_row_shorter_than_a_thought_has_not_asked() -> None:
    """What lies before its first token is no token."""
    assert fires(["\x05\x05"], [[5], [5, 5], [5, 6]]) == [True, False, True]
    rows = [[ord("a")] * n for n in (1, 39, 40, 41)]
    assert fires(["a" * 40], rows) == [True, True, False, False]


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
    row = Play(
        budget=budget,
        inject__thought=thought,
        **{f"inject__{key}": value for key, value in settings.items()},
    )
    actions = row.play(script)
    texts = [thought] if isinstance(thought, str) else thought
    encoded = [text.encode() for text in texts if text]
    expected, forced = play_by_hand(script, row.tokens, encoded, **settings, budget=budget)
    assert actions == expected
    for token, wanted in zip(row.generated, forced, strict=True):
        assert wanted is None or token == wanted


def test_rows_think_each_for_itself() -> None:
    """One batch: a row begins, a row is in the middle, a row cools down, a row has no thought."""
    params = [
        params_of("entropix", {**BOUNDS, "inject.thought": t}) for t in ("abc", "abc", "abc", "")
    ]
    state = with_own(fresh_state(4, VOCAB), "inject", cooldown=jnp.asarray([0, 0, 5, 0]))
    tally = replace(
        state.tally,
        queued=jnp.asarray([0, 2, 0, 0]),
        queue_action=jnp.full(4, ARMS.index("inject"), jnp.int32),
    )
    rows = rows_of(4)
    ahead = jnp.asarray([70, 71], jnp.int32)
    rows = replace(rows, history=rows.history.at[1, PROMPT : PROMPT + 2].set(ahead))
    logits = jnp.asarray(np.tile(logits_for("helv"), (4, 1)))
    choice, step, state = choose_jit(
        logits, attn_stats(4), batch_of(*params), replace(state, tally=tally), rows
    )
    assert choice.token[:2].tolist() == [ord("a"), 70]
    assert [ACTIONS[i] for i in choice.proposal.action] == ["inject", "inject", "sample", "sample"]
    assert begins(step) == [True, False, False, False]
    assert state.tally.queued.tolist() == [2, 1, 0, 0]
    assert state.tally.own["inject"].cooldown.tolist() == [0, 0, 4, 0]
    assert state.last.drawn.tolist() == [False, False, True, True]
    assert step.rows.history[0, PROMPT : PROMPT + 3].tolist() == [*b"abc"]
    np.testing.assert_array_equal(step.rows.history[1:], rows.history[1:])


@pytest.mark.parametrize("action", ["inject", "branch"])
def test_forced_tokens_stand_in_the_history(action: str) -> None:
    """Whatever regime is measured, they are taken as they stand, and tell what they are for."""
    number = 2 * len(REGIMES)
    params = params_of("entropix", {**BOUNDS, "inject.cooldown": 6})
    state = with_own(fresh_state(number, VOCAB), "inject", cooldown=jnp.full(number, 4))
    tally = replace(
        state.tally,
        queued=jnp.asarray([2, 1] * len(REGIMES)),
        queue_action=jnp.full(number, ARMS.index(action), jnp.int32),
    )
    state = replace(state, tally=tally, last=replace(state.last, drawn=jnp.ones(number, bool)))
    rows = rows_of(number)
    ahead = jnp.tile(jnp.asarray([[70, 71], [72, 73]], jnp.int32), (len(REGIMES), 1))
    rows = replace(rows, history=rows.history.at[:, PROMPT : PROMPT + 2].set(ahead))
    logits = np.repeat(np.stack([logits_for(regime) for regime in REGIMES]), 2, axis=0)
    choice, step, state = step_once(logits, params, rows, state)
    assert choice.token.tolist() == [70, 72] * len(REGIMES)
    measured = [REGIMES[i] for i in choice.observation.regime]
    assert measured == [regime for regime in REGIMES for _ in range(2)]
    assert [ACTIONS[i] for i in choice.proposal.action] == [action] * number
    assert not any(begins(step))
    assert state.tally.queued.tolist() == [1, 0] * len(REGIMES)
    # Only a thought's last token starts a cooldown.
    last = 6 if action == "inject" else 3
    assert state.tally.own["inject"].cooldown.tolist() == [3, last] * len(REGIMES)
    assert not any(np.any(state.tally.own[name].begun) for name in ("inject", "branch"))
    assert not np.any(state.tally.own["backspace"].backspaced)
    assert not np.any(state.last.drawn)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    taken = expected[np.arange(number), choice.token]
    np.testing.assert_allclose(choice.logprob, taken, rtol=1e-5)


def test_where_the_text_is_asked_for_no_thought_need_be_configured() -> None:
    """Nor fit: what will be written is not known yet. The rest holds as ever."""
    logits = logits_for("helv")[None]

    def waits(thought: str, *, asks: bool, history: Sequence[int] = (1, 2), **own: int) -> bool:
        params = params_of("entropix", {**BOUNDS, "inject.thought": thought, "inject.per_row": 2})
        counts = {name: jnp.asarray([value]) for name, value in own.items()}
        state = with_own(fresh_state(1, VOCAB), "inject", **counts)
        rows = rows_of(1, history, remaining=2, asks=asks)
        _, step, after = step_once(logits, params, rows, state)
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


# What is drawn from


def test_repetition_penalty() -> None:
    """Positive logits of tokens in the row are divided, negative ones multiplied (CTRL)."""
    logits = np.full((1, VOCAB), -8.0, np.float32)
    logits[0, [1, 5, 6]] = 4.0, 2.5, 2.0  # 1 is in the row
    for penalty, winner in ((1.0, 1), (1.5, 1), (1.7, 5), (0.5, 1)):
        params = params_of("greedy", {"repetition.penalty": penalty})
        assert int(choose_once(logits, params, rows_of(1)).token[0]) == winner
    for first, other in ((-2.0, -3.0), (-0.2, -0.3)):
        logits = -np.full((1, VOCAB), 9.0, np.float32)
        logits[0, [1, 5]] = first, other
        for penalty, winner in ((1.4, 1), (1.6, 5)):
            params = params_of("greedy", {"repetition.penalty": penalty})
            assert int(choose_once(logits, params, rows_of(1)).token[0]) == winner


def test_a_ban_frees_its_share_of_top_k() -> None:
    """Bans come before the truncation."""
    logits = np.zeros((MANY, VOCAB), np.float32)
    logits[:, [0, 5, 6]] = 9.0, 8.0, 8.0
    two = {**PLAIN, "draw.bans": [0], "base.top_k": 2, "base.top_p": 1.0, "base.temperature": 1.0}
    drawn = choose_once(logits, params_of("entropix", two), rows_of(MANY)).token.tolist()
    assert {*drawn} == {5, 6}


FLAT = {
    **PLAIN,
    "base.temperature": 3.0,
    "base.top_k": 0,
    "base.top_p": 1.0,
    "base.min_p": 0.0,
    "metrics.noise_floor": True,
}


def test_noise_is_neither_measured_nor_drawn() -> None:
    """A hundred tokens under the floor hold a seventh of the mass, and more at temperature 3."""
    epsilon = 2.0**-6
    floor = float(noise_floor(jnp.float32(epsilon), VOCAB))
    logits = np.full((MANY, VOCAB), 0.0, np.float32)
    logits[:, :2] = 4.5
    assert floor < 0
    log_probs = logits[0] - np.log(np.exp(logits[0]).sum())
    assert log_probs.min() > floor  # audible at this epsilon
    loud = 2.0**-2
    assert log_probs.min() < float(noise_floor(jnp.float32(loud), VOCAB)) < log_probs.max()
    heard = choose_once(logits, params_of("entropix", FLAT, epsilon=epsilon), rows_of(MANY))
    cut = choose_once(logits, params_of("entropix", FLAT, epsilon=loud), rows_of(MANY))
    off = {**FLAT, "metrics.noise_floor": False}
    unfloored = choose_once(logits, params_of("entropix", off, epsilon=loud), rows_of(MANY))
    assert {*cut.token.tolist()} == {0, 1}
    np.testing.assert_allclose(cut.observation.metrics.entropy, 1.0, rtol=1e-6)
    np.testing.assert_allclose(cut.observation.metrics.varentropy, 0.0, atol=1e-6)
    for free in (heard, unfloored):
        assert len({*free.token.tolist()}) > 10
        assert float(free.observation.metrics.entropy[0]) > 2


def test_where_bans_leave_only_noise_noise_is_drawn() -> None:
    logits = np.zeros((MANY, VOCAB), np.float32)
    logits[:, :2] = 4.5
    params = params_of("entropix", {**FLAT, "draw.bans": [0, 1]}, epsilon=2.0**-2)
    drawn = choose_once(logits, params, rows_of(MANY)).token.tolist()
    assert not {0, 1} & {*drawn}
    assert len({*drawn}) > 10


# Candidates


def test_the_likeliest_candidate_is_kept() -> None:
    """Of the numbers of this row, position and stream, by the unmodified logits."""
    rng = np.random.default_rng(6)
    batch = MANY
    logits = rng.normal(size=(batch, VOCAB)).astype(np.float32)
    for draws in (1, 5, MAX_DRAWS):
        changes = {
            **PLAIN,
            "arms.mid": "adaptive",
            "adaptive.draws": draws,
            "adaptive.temperature_logits": 3.0,
            "adaptive.top_k_max": 2**31 - 1,
            "base.top_k": 0,
            "adaptive.min_p_min": 0.0,
            "base.min_p": 0.0,
            "base.top_p": 1.0,
        }
        params = params_of("entropix", changes)
        rows = rows_of(batch)
        choice = choose_once(logits, params, rows)
        stream = STREAM_CANDIDATE if draws > 1 else STREAM_DRAW
        numbers = np.asarray(
            uniforms(
                rows.keys,
                rows.length,
                jnp.zeros(batch, jnp.int32),
                jnp.full(batch, stream, jnp.int32),
                MAX_DRAWS,
            )
        )
        for row in range(batch):
            scaled = logits[row].astype(np.float64) / float(choice.proposal.temperature[row])
            order = np.lexsort((np.arange(VOCAB), -scaled))
            cumulated = np.cumsum(np.exp(scaled[order]))
            ranks = np.searchsorted(cumulated / cumulated[-1], numbers[row, :draws], side="right")
            candidates = order[ranks]
            best = candidates[np.argmax(logits[row, candidates])]
            assert int(choice.token[row]) == best


def test_penalised_candidates_are_scored_unpenalised() -> None:
    """A token that the penalty makes rare still wins where it is drawn at all."""
    logits = np.full((MANY, VOCAB), -40.0, np.float32)
    logits[:, [1, 5]] = 3.0, 2.0  # 1 is in the row: its penalised logit is 1.5
    changes = {
        **PLAIN,
        "arms.mid": "adaptive",
        "adaptive.temperature_logits": 0.0,
        "adaptive.temperature_attn": 0.0,
        "adaptive.temperature_agreement": 0.0,
        "adaptive.draws": 2,
        "base.temperature": 1.0,
        "base.top_p": 1.0,
        "repetition.penalty": 2.0,
    }
    tokens = choose_once(logits, params_of("entropix", changes), rows_of(MANY)).token
    share = np.mean(np.asarray(tokens) == 1)
    one = 1 / (1 + math.exp(0.5))
    assert share == pytest.approx(1 - (1 - one) ** 2, abs=0.2)  # 0.61; scored penalised: 0.14


# What is remembered


def test_sequence_varentropy_of_small_differences() -> None:
    """A long row of nearly equal entropies: sums of squares would have lost it all."""
    state = fresh_state(1, VOCAB)
    rng = np.random.default_rng(0)
    entropies = []
    params = batch_of(params_of("greedy"))
    for i in range(60):
        logits = np.zeros((1, VOCAB), np.float32)
        logits[0, 0] = 0.02 * rng.random()
        choice, _, state = choose_jit(
            jnp.asarray(logits), attn_stats(1), params, state, rows_of(1, generated=i)
        )
        entropies.append(float(choice.observation.metrics.entropy[0]))
    assert np.var(entropies) < 1e-5
    assert float(choice.sequence_varentropy[0]) == pytest.approx(np.var(entropies), rel=0.02)


def test_the_loop_guard_branches() -> None:
    """A row that repeats itself with certainty is treated as LEHV, and marked."""
    params = params_of("entropix", {**BOUNDS, "loop.max_period": 4, "loop.repeats": 3})
    logits = logits_for("lelv")[None]
    text = [1, 2, 3, *[7, 8] * 3]
    looped = choose_once(logits, params, rows_of(1, text, generated=6))
    assert bool(looped.observation.looping[0])
    assert REGIMES[int(looped.observation.regime[0])] == "lehv"
    assert ACTIONS[int(looped.proposal.action[0])] == "branch"
    for history, generated in ((text, 5), (text[:-1], 5), ([*text[:-1], 9], 6)):
        free = choose_once(logits, params, rows_of(1, history, generated=generated))
        assert not bool(free.observation.looping[0])
        assert ACTIONS[int(free.proposal.action[0])] == "argmax"
    off = params_of("entropix", {**BOUNDS, "loop.repeats": 0})
    switched_off = choose_once(logits, off, rows_of(1, text, generated=6))
    assert not bool(switched_off.observation.looping[0])
