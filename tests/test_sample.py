"""One call of `choose`, and rows that are played step by step: thoughts, penalties, bans, noise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.metrics import noise_floor
from entropix_jax.sampler.arms import ACTIONS
from entropix_jax.sampler.keys import STREAM_CANDIDATE, STREAM_DRAW, row_key, uniforms
from entropix_jax.sampler.params import MAX_DRAWS, REGIMES, SamplerParams
from entropix_jax.sampler.sample import Choice, Rows, SamplerState, choose, init_sampler_state
from tests.samplers import EPSILON, PLAIN, attn_stats, batch_of, params_of

VOCAB = 128
SLOTS = 96
PROMPT = 4
MANY = 64  # rows, where frequencies count

choose_jit = jax.jit(choose)


def rows_of(
    batch: int,
    history: Sequence[int] = (1, 2, 3, 4),
    *,
    generated: int = 0,
    remaining: int = 50,
    seed: int = 0,
) -> Rows:
    """Rows that hold the same tokens under different ids. Junk follows the tokens."""
    slots = np.full((batch, SLOTS), VOCAB - 1, np.int32)
    slots[:, : len(history)] = history
    return Rows(
        keys=jnp.asarray(np.stack([row_key(seed, str(i)) for i in range(batch)])),
        history=jnp.asarray(slots),
        length=jnp.full(batch, len(history), jnp.int32),
        generated=jnp.full(batch, generated, jnp.int32),
        remaining=jnp.full(batch, remaining, jnp.int32),
    )


def choose_once(
    logits: np.ndarray, params: SamplerParams, rows: Rows, state: SamplerState | None = None
) -> Choice:
    """One step of rows that share their parameters."""
    batch = logits.shape[0]
    state = state or init_sampler_state(batch)
    sampler = batch_of(*[params] * batch)
    return choose_jit(jnp.asarray(logits, jnp.float32), attn_stats(batch), sampler, state, rows)[0]


# Bounds under which `logits_for` has logits for each regime.
BOUNDS: Mapping[str, Any] = {
    "regimes.lelv": ["entropy < 1", "varentropy < 0.5"],
    "regimes.helv": ["entropy > 5", "varentropy < 0.5"],
    "regimes.lehv": ["entropy < 5", "varentropy > 0.5"],
    "regimes.hehv": ["entropy > 5", "varentropy > 0.5"],
}


def logits_for(regime: str, top: int = 9) -> np.ndarray:
    """Logits of a regime whose most likely token is `top` (the lowest id of a tie is 0)."""
    logits = np.full(VOCAB, -60.0, np.float32)
    if regime == "lelv":
        logits[top] = 0
    elif regime == "helv":
        logits[:] = 0
    elif regime == "lehv":
        logits[top], logits[20:60] = 3.5, 0
    elif regime == "hehv":
        logits[:], logits[top] = 0, 3.0
    else:
        logits[[top, top + 1, top + 2, top + 3]] = 0
    return logits


@pytest.mark.parametrize("regime", REGIMES)
def test_a_regime_is_served_by_its_arm(regime: str) -> None:
    params = params_of("entropix", BOUNDS)
    choice = choose_once(logits_for(regime)[None], params, rows_of(1))
    expected = dict(
        zip(REGIMES, ("argmax", "inject", "explore", "resample", "adaptive"), strict=True)
    )
    assert REGIMES[int(choice.regime[0])] == regime
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
        assert float(choice.metrics.entropy[row]) == float(clean.metrics.entropy[row])


# Thoughts


class Play:
    """One row that is played step by step, a regime's logits at each."""

    def __init__(self, *, budget: int = 60, **changes: Any) -> None:
        settings = {key.replace("__", "."): value for key, value in changes.items()}
        self.params = params_of("entropix", {**BOUNDS, "loop.max_period": 0, **settings})
        self.budget = budget
        self.tokens = list(range(1, 1 + PROMPT))
        self.state = init_sampler_state(1)
        self.actions: list[str] = []
        self.regimes: list[str] = []
        self.choices: list[Choice] = []

    def play(self, script: str) -> str:
        """Steps in the regimes of a script (l LELV, h HELV, e LEHV, r HEHV, m MID). Returns the
        actions: i inject, a argmax, s sample, and so on by first letters (d: adaptive)."""
        names = {"l": "lelv", "h": "helv", "e": "lehv", "r": "hehv", "m": "mid"}
        before = len(self.actions)
        for letter in script:
            generated = len(self.tokens) - PROMPT
            rows = rows_of(1, self.tokens, generated=generated, remaining=self.budget - generated)
            logits = jnp.asarray(logits_for(names[letter]))[None]
            # Attention statistics with E = 2 bits over 16 keys: normalised 0.5.
            choice, self.state = choose_jit(
                logits, attn_stats(1, entropy=2.0), batch_of(self.params), self.state, rows
            )
            self.tokens.append(int(choice.token[0]))
            self.actions.append(ACTIONS[int(choice.proposal.action[0])])
            self.regimes.append(REGIMES[int(choice.regime[0])])
            self.choices.append(choice)
        letters = {"adaptive": "d"}
        return "".join(letters.get(action, action[0]) for action in self.actions[before:])

    @property
    def generated(self) -> list[int]:
        return self.tokens[PROMPT:]


def test_a_thought_is_written_from_the_step_that_fires() -> None:
    row = Play(inject__thought="abc", inject__cooldown=2)
    assert row.play("mhmlm") == "diiid"
    assert row.generated[1:4] == [*b"abc"]
    # Forced tokens carry the regime that was measured.
    assert row.regimes == ["mid", "helv", "mid", "lelv", "mid"]


def test_forced_tokens_carry_their_own_numbers() -> None:
    row = Play(inject__thought="ab")
    row.play("hl")
    probability = math.exp(float(row.choices[0].logprob[0]))
    assert probability == pytest.approx(1 / VOCAB, rel=1e-5)
    assert float(row.choices[1].logprob[0]) == pytest.approx(
        -60, rel=1e-3
    )  # of "b", not of the top
    assert float(row.choices[1].metrics.entropy[0]) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("thought", ["x", "xyz"])
def test_the_cooldown_counts_from_the_last_token(thought: str) -> None:
    row = Play(inject__thought=thought, inject__cooldown=3, inject__until_confident=False)
    injected = "i" * len(thought)
    assert row.play("h" * (len(thought) + 3 + len(thought))) == injected + "sss" + injected


def test_the_cooldown_concerns_helv_alone() -> None:
    row = Play(inject__thought="x", inject__cooldown=6, inject__until_confident=False)
    assert row.play("hlermhh") == "iaerdss"
    assert row.play("h") == "i"  # each of those six tokens counted


def test_the_draw_of_the_cooldown() -> None:
    """T = min(1.5, 0.666 * (1.3 + 0.2 * 0.5)), the rest the base values."""
    row = Play(inject__thought="x", inject__cooldown=2)
    assert row.play("hh") == "is"
    proposal = row.choices[1].proposal
    assert float(proposal.temperature[0]) == pytest.approx(0.666 * 1.4, rel=1e-5)
    assert [int(proposal.top_k[0]), int(proposal.draws[0])] == [27, 1]
    assert float(proposal.top_p[0]) == pytest.approx(0.9)
    capped = Play(inject__thought="x", inject__cooldown=2, base__temperature=1.4)
    capped.play("hh")
    assert float(capped.choices[1].proposal.temperature[0]) == 1.5
    raw = Play(inject__thought="x", inject__cooldown=2, metrics__attn_entropy="raw")
    raw.play("hh")
    assert float(raw.choices[1].proposal.temperature[0]) == pytest.approx(0.666 * 1.7, rel=1e-5)


def test_confidence_ends_the_cooldown() -> None:
    row = Play(inject__thought="xy", inject__cooldown=9, inject__until_confident=True)
    assert row.play("hhhlh") == "iisai"
    patient = Play(inject__thought="xy", inject__cooldown=9, inject__until_confident=False)
    assert patient.play("hhhlh") == "iisas"


def test_confidence_within_the_thought_does_not() -> None:
    row = Play(inject__thought="xy", inject__cooldown=2, inject__until_confident=True)
    assert row.play("hlhhh") == "iissi"


def test_a_cooldown_of_zero() -> None:
    row = Play(inject__thought="xy", inject__cooldown=0)
    assert row.play("hhhhmh") == "iiiidi"
    assert row.generated[:4] == [*b"xyxy"]


def test_the_thought_of_the_documents_is_one_token() -> None:
    params = params_of("document-001", encode=lambda text: [99] if text == " ..." else [])
    assert params.inject.thought_length == 1
    choice = choose_once(logits_for("helv")[None], params, rows_of(1))
    assert int(choice.token[0]) == 99
    assert ACTIONS[int(choice.proposal.action[0])] == "inject"


def test_a_thought_that_does_not_fit_is_not_begun() -> None:
    fits = Play(budget=5, inject__thought="abc")
    assert fits.play("mmhhh") == "ddiii"
    too_long = Play(budget=5, inject__thought="abc")
    assert too_long.play("mmmhh") == "dddss"
    # It does not start a cooldown either: the row could go on if its budget grew.
    assert int(too_long.state.cooldown[0]) == 0


def test_without_a_thought_nothing_is_injected() -> None:
    assert Play(inject__thought="").play("hhh") == "sss"


def test_the_longest_thought() -> None:
    thought = "".join(chr(33 + i) for i in range(64))
    row = Play(budget=70, inject__thought=thought, inject__cooldown=1)
    assert row.play("h" + "m" * 64) == "i" * 64 + "d"
    assert row.generated[:64] == [*thought.encode()]


def play_by_hand(
    script: str, thought: str, cooldown: int, until_confident: bool, budget: int
) -> tuple[str, list[int | None]]:
    """The oracle of section 4: actions, and the tokens that are forced."""
    actions, waiting = "", 0
    forced: list[int | None] = []
    queue: list[int] = []
    for i, letter in enumerate(script):
        if not queue and letter == "h" and waiting == 0 and 0 < len(thought) <= budget - i:
            queue = [*thought.encode()]
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


@pytest.mark.parametrize("case", range(24))
def test_random_rows_against_the_oracle(case: int) -> None:
    rng = np.random.default_rng(case)
    settings: dict[str, Any] = {
        "thought": ["", "a", "abc", "abcdefg"][case % 4],
        "cooldown": int(rng.integers(0, 6)),
        "until_confident": bool(rng.random() < 0.5),
    }
    budget = int(rng.integers(20, 41))
    script = "".join(rng.choice(list("hhhlmer"), size=budget))
    row = Play(budget=budget, **{f"inject__{key}": value for key, value in settings.items()})
    actions = row.play(script)
    expected, forced = play_by_hand(script, **settings, budget=budget)
    assert actions == expected
    for token, wanted in zip(row.generated, forced, strict=True):
        assert wanted is None or token == wanted


def test_rows_think_each_for_itself() -> None:
    """One batch: a row begins, a row is in the middle, a row cools down, a row has no thought."""
    params = [
        params_of("entropix", {**BOUNDS, "inject.thought": t}) for t in ("abc", "abc", "abc", "")
    ]
    state = replace(
        init_sampler_state(4),
        queue=jnp.zeros((4, 64), jnp.int32).at[1, :2].set(jnp.asarray([70, 71])),
        queued=jnp.asarray([0, 2, 0, 0]),
        cooldown=jnp.asarray([0, 0, 5, 0]),
    )
    logits = jnp.asarray(np.tile(logits_for("helv"), (4, 1)))
    choice, state = choose_jit(logits, attn_stats(4), batch_of(*params), state, rows_of(4))
    assert choice.token[:2].tolist() == [ord("a"), 70]
    assert [ACTIONS[i] for i in choice.proposal.action] == ["inject", "inject", "sample", "sample"]
    assert state.queued.tolist() == [2, 1, 0, 0]
    assert state.queue[0, :2].tolist() == [*b"bc"]
    assert state.queue[1, 0] == 71
    assert state.cooldown.tolist() == [0, 0, 4, 0]


# What is drawn from


def test_repetition_penalty() -> None:
    """Positive logits of tokens in the row are divided, negative ones multiplied (CTRL)."""
    logits = np.full((1, VOCAB), -8.0, np.float32)
    logits[0, [1, 5, 6]] = 4.0, 2.5, 2.0  # 1 is in the row
    for penalty, winner in ((1.0, 1), (1.5, 1), (1.7, 5), (0.5, 1)):
        params = params_of("greedy", {"repetition.penalty": penalty})
        assert int(choose_once(logits, params, rows_of(1)).token[0]) == winner
    logits = -np.full((1, VOCAB), 9.0, np.float32)
    logits[0, [1, 5]] = -2.0, -3.0
    for penalty, winner in ((1.4, 1), (1.6, 5)):
        params = params_of("greedy", {"repetition.penalty": penalty})
        assert int(choose_once(logits, params, rows_of(1)).token[0]) == winner


def test_junk_past_the_row_is_not_penalised() -> None:
    """The unused slots hold the last token of the vocabulary."""
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [VOCAB - 1, 5]] = 4.0, 3.0
    params = params_of("greedy", {"repetition.penalty": 10.0})
    assert int(choose_once(logits, params, rows_of(1)).token[0]) == VOCAB - 1


def test_penalties_differ_from_row_to_row() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, [1, 5]] = 4.0, 3.0
    sampler = batch_of(
        *(params_of("greedy", {"repetition.penalty": p}) for p in (1.0, 2.0, 1.2, 1.0))
    )
    choice, _ = choose_jit(
        jnp.asarray(logits), attn_stats(4), sampler, init_sampler_state(4), rows_of(4)
    )
    assert choice.token.tolist() == [1, 5, 1, 1]


def test_a_penalty_changes_no_metric() -> None:
    logits = np.random.default_rng(4).normal(size=(1, VOCAB)).astype(np.float32)
    plain = choose_once(logits, params_of("greedy"), rows_of(1))
    penalised = choose_once(logits, params_of("greedy", {"repetition.penalty": 50.0}), rows_of(1))
    assert jax.tree.leaves(plain.metrics) == jax.tree.leaves(penalised.metrics)


def test_bans() -> None:
    logits = np.zeros((MANY, VOCAB), np.float32)
    logits[:, [0, 5, 6]] = 8.0, 7.5, 7.0
    bans = {**PLAIN, "draw.bans": [0, 6]}
    assert {*choose_once(logits, params_of("greedy", bans), rows_of(MANY)).token.tolist()} == {5}
    hot = {**bans, "base.temperature": 100.0, "base.top_k": 0, "base.top_p": 1.0, "base.min_p": 0.0}
    drawn = choose_once(logits, params_of("entropix", hot), rows_of(MANY)).token.tolist()
    assert not {0, 6} & {*drawn}
    assert len({*drawn}) > 20


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
    np.testing.assert_allclose(cut.metrics.entropy, 1.0, rtol=1e-6)
    np.testing.assert_allclose(cut.metrics.varentropy, 0.0, atol=1e-6)
    for free in (heard, unfloored):
        assert len({*free.token.tolist()}) > 10
        assert float(free.metrics.entropy[0]) > 2


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


def test_sequence_varentropy() -> None:
    """The population's variance of the committed tokens' entropies, forced ones included."""
    row = Play(inject__thought="abc", inject__cooldown=4)
    row.play("mhlmhrelmmlhh")
    entropies = np.array([float(choice.metrics.entropy[0]) for choice in row.choices], np.float64)
    for i, choice in enumerate(row.choices):
        expected = np.var(entropies[: i + 1])
        assert float(choice.sequence_varentropy[0]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert np.var(entropies) > 1


def test_sequence_varentropy_of_small_differences() -> None:
    """A long row of nearly equal entropies: sums of squares would have lost it all."""
    state = init_sampler_state(1)
    rng = np.random.default_rng(0)
    entropies = []
    params = batch_of(params_of("greedy"))
    for i in range(60):
        logits = np.zeros((1, VOCAB), np.float32)
        logits[0, 0] = 0.02 * rng.random()
        choice, state = choose_jit(
            jnp.asarray(logits), attn_stats(1), params, state, rows_of(1, generated=i)
        )
        entropies.append(float(choice.metrics.entropy[0]))
    assert np.var(entropies) < 1e-5
    assert float(choice.sequence_varentropy[0]) == pytest.approx(np.var(entropies), rel=0.02)


def test_the_loop_guard_explores() -> None:
    """A row that repeats itself with certainty is treated as LEHV, and marked."""
    params = params_of("entropix", {**BOUNDS, "loop.max_period": 4, "loop.repeats": 3})
    logits = logits_for("lelv")[None]
    text = [1, 2, 3, *[7, 8] * 3]
    looped = choose_once(logits, params, rows_of(1, text, generated=6))
    assert bool(looped.looping[0])
    assert REGIMES[int(looped.regime[0])] == "lehv"
    assert ACTIONS[int(looped.proposal.action[0])] == "explore"
    for history, generated in ((text, 5), (text[:-1], 5), ([*text[:-1], 9], 6)):
        free = choose_once(logits, params, rows_of(1, history, generated=generated))
        assert not bool(free.looping[0])
        assert ACTIONS[int(free.proposal.action[0])] == "argmax"
    off = params_of("entropix", {**BOUNDS, "loop.repeats": 0})
    assert not bool(choose_once(logits, off, rows_of(1, text, generated=6)).looping[0])


def test_epsilon_of_the_helpers_is_bfloat16s() -> None:
    """The value check of the noise floor: -10.73 at Llama 3's vocabulary."""
    assert float(noise_floor(jnp.float32(EPSILON), 128_256)) == pytest.approx(-10.73, abs=5e-3)
