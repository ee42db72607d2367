"""Backspace: a row goes back to a token in doubt and draws again, told a second time in Python.

The model of most tests is a chain, so that the oracle can follow a row step by step, in float64.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.generation import Generation
from entropix_jax.engine.results import Event, Row
from entropix_jax.engine.state import (
    BRANCH_ENDED,
    FINISHED_EOS,
    FINISHED_ERROR,
    FINISHED_LENGTH,
    FORKS,
    RUNNING,
    Recording,
    StepRecord,
)
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.model.params import Params
from entropix_jax.names import REGIMES, SERVED
from entropix_jax.sampler.keys import STREAM_CANDIDATE, STREAM_DRAW, row_key, uniforms
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.proposal import Proposal
from entropix_jax.sampler.settings import MAX_DRAWS, RULES
from entropix_jax.sampler.state import Rows, Tally
from entropix_jax.sampler.step import choose
from tests.support.chains import BOUNDS, CONFIG, TYPES, Chain, chain
from tests.support.draw_oracles import Kept
from tests.support.model_folders import token_ids, write_model
from tests.support.reference import entropy_bits, log_softmax
from tests.support.runs import Spec, run_specs
from tests.support.samplers import (
    BATCH,
    CAPACITY,
    EPSILON,
    Job,
    advance,
    attn_stats,
    batch_of,
    fresh_state,
    params_of,
    start,
)

# What was done


@dataclass
class Taken:
    """One step of one row, a whole fork being one, and what the row remembered after it."""

    first: StepRecord
    last: StepRecord  # the same, or that of the end of the fork
    tally: Tally
    tokens: list[int]

    @property
    def action(self) -> str:
        return ACTIONS[self.first.choice.proposal.action]

    @property
    def token(self) -> int:
        """-1 where the row goes back."""
        return -1 if self.first.rewinds else int(self.first.choice.token)


def play(
    model: Params, jobs: Sequence[Job], eos_ids: Sequence[int] = (-1, -1)
) -> list[list[Taken]]:
    """Runs rows one step at a time, and looks at all of them after each."""
    jobs = [*jobs, *[replace(jobs[0], budget=1)] * (BATCH - len(jobs))]  # one shape, one program
    state = start(CONFIG, model, jobs, CAPACITY, eos_ids)
    taken: list[list[Taken]] = [[] for _ in jobs]
    forks: dict[int, StepRecord] = {}
    while np.any(np.isin(state.finish, (RUNNING, FORKS, BRANCH_ENDED))):
        for state, records in advance(model, state, 1, config=CONFIG):
            tally, history, cached = jax.device_get(
                (state.sampler.tally, state.history, state.cache.length)
            )
            leaves, tree = jax.tree.flatten(records)
            for row in np.flatnonzero((records.live | records.joins)[0, :BATCH]):
                one = jax.tree.unflatten(tree, [x[0, row] for x in leaves])
                if one.width:
                    forks[row] = one
                elif one.branch < 0 or one.joins:
                    now = jax.tree.map(lambda x, row=row: x[row], tally)
                    tokens = history[row, : cached[row] + 1].tolist()
                    taken[row].append(Taken(forks.pop(row, one), one, now, tokens))
    return taken


# What should have been done


@dataclass
class Position:
    """What must be kept of a drawn token to draw its position again."""

    proposal: Proposal
    action: str
    mu: float  # bits, before it
    cooldown: int  # before it
    probability: float = 0.0
    banned: list[int] = field(default_factory=list)


def floored(logits: np.ndarray, epsilon: float) -> np.ndarray:
    """Log-probabilities, those under the noise floor gone; without a floor where epsilon is 0."""
    log_probs = log_softmax(logits)
    if epsilon > 0:
        audible = log_probs >= np.log(epsilon) - 0.5 * np.log(logits.size)
        if audible.any():
            log_probs = log_softmax(np.where(audible, logits, -np.inf))
    return log_probs


def regime_of(log_probs: np.ndarray) -> str:
    entropy = entropy_bits(np.exp(log_probs))
    assert all(abs(entropy - bound) > 0.01 for bound in (1, 2, 3, 4)), "too close to tell"
    return REGIMES[min(int(entropy), 4)]


def drawn_from(
    logits: np.ndarray, values: Mapping[str, Any], epsilon: float, tokens: list[int], at: Position
) -> np.ndarray:
    """What a draw after `tokens` sees: penalised, banned, without noise."""
    seen = logits.copy()
    ids = sorted({*tokens})
    penalty = values["repetition.penalty"]
    seen[ids] = np.where(seen[ids] > 0, seen[ids] / penalty, seen[ids] * penalty)
    seen[[*values["draw.bans"], *at.banned]] = -np.inf
    audible = np.where(floored(logits, epsilon) > -np.inf, seen, -np.inf)
    return audible if np.any(audible > -np.inf) else seen


def draw(logits: np.ndarray, proposal: Proposal, numbers: np.ndarray, mu: float) -> list[int]:
    """One token for each number, from what the truncation leaves."""
    if RULES[proposal.rule] == "mirostat" and proposal.temperature > 0:
        kept = Kept.of("mirostat", logits, float(proposal.temperature), mu)
    else:
        kept = Kept.of_nucleus(logits, jax.tree.map(np.atleast_1d, proposal))
    cumulated, order = np.cumsum(kept.mass), np.argsort(kept.rank)
    fewest, most = (
        order[np.searchsorted(cumulated, numbers * cumulated[n - 1], side="right")].tolist()
        for n in (kept.fewest, kept.most)
    )
    assert fewest == most, "too close to tell"
    return most


uniforms_jit = jax.jit(uniforms, static_argnames="number")


def numbers_of(job: Job, position: int, attempt: int, stream: int, count: int) -> np.ndarray:
    parts = (np.asarray([part], np.int32) for part in (position, attempt, stream))
    key = row_key(job.seed, job.row_id)[None]
    return np.asarray(uniforms_jit(key, *parts, number=MAX_DRAWS), np.float64)[0, :count]


def audit(model: Chain, job: Job, values: Mapping[str, Any], steps: Sequence[Taken]) -> Counter:
    """Follows a row from its prompt, and checks each step against the rules in plain Python.

    How a first draw was proposed, and what a fork came to, is taken from the record. Returns how
    often what happened, and how often a rule showed: without it the token would have been another.
    """
    epsilon = float(job.sampler.noise_epsilon)
    thought = [int(token) for token in values["inject.thought"].split()]
    most, per_position, per_row = (
        values[f"backspace.{name}"] for name in ("max_prob", "per_position", "per_row")
    )
    tokens, start_of = list(job.prompt), len(job.prompt)
    entropies: list[float] = []
    queue: list[int] = []  # forced tokens
    queued_for, origin = "", "prompt"  # of them; of the last token that was not drawn
    happened: Counter = Counter()
    # The last tokens, as far as they were drawn and are within reach; and what is drawn again.
    trail: deque[Position] = deque(maxlen=values["backspace.reach"])
    again: Position | None = None
    has_arm = "backspace" in [values[f"arms.{served}"] for served in SERVED]
    mu = mu_then = 2 * values["truncation.mirostat_target"]
    cooldown = injections = branchings = retractions = forwards = branch_forwards = settled = 0

    def stays(at: Position) -> str:
        """Why the row does not go back to a position, if so."""
        assert abs(at.probability - most) > 1e-5, "too close to tell"
        if retractions >= per_row:
            return "row"
        if len(at.banned) >= per_position:
            return "position"
        return "likely" if at.probability >= most and most < 1 else ""

    def commit(token: int) -> None:
        nonlocal cooldown
        log_probs = floored(model.logits(tokens[-1]), epsilon)
        entropies.append(entropy_bits(np.exp(log_probs)))
        confident = values["inject.until_confident"] and regime_of(log_probs) == "lelv"
        cooldown = 0 if confident else max(cooldown - 1, 0)
        tokens.append(token)

    def drawn(at: Position, proposal: Proposal, attempt: int) -> int:
        logits = model.logits(tokens[-1])
        seen = drawn_from(logits, values, epsilon, tokens, at)
        stream = STREAM_CANDIDATE if proposal.draws > 1 else STREAM_DRAW
        numbers = numbers_of(job, len(tokens), attempt, stream, int(proposal.draws))
        return max(draw(seen, proposal, numbers, at.mu), key=lambda token: logits[token])

    def learned(at: Position, proposal: Proposal, token: int) -> float:
        """Mirostat's mu after a token."""
        if RULES[proposal.rule] != "mirostat":
            return at.mu
        bits = 0.0
        if proposal.temperature > 0:
            seen = drawn_from(model.logits(tokens[-1]), values, epsilon, tokens, at)
            bits = -log_softmax(seen / float(proposal.temperature))[token] / np.log(2)
        target = values["truncation.mirostat_target"]
        return at.mu - values["truncation.mirostat_rate"] * (bits - target)

    for step in steps:
        length, choice, proposal = len(tokens), step.first.choice, step.first.choice.proposal
        forwards += length > start_of
        logits = model.logits(tokens[-1])
        log_probs = floored(logits, epsilon)
        regime = regime_of(log_probs)
        arm = values[f"arms.{regime}"]
        remaining = job.budget - len(entropies)
        reasons = [stays(at) for at in reversed(trail)]
        may_inject = (
            0 < len(thought) <= remaining
            and tokens[-len(thought) :] != thought
            and cooldown == 0
            and injections < values["inject.per_row"]
        )
        may_branch = branchings < values["branch.per_row"] and branch_forwards <= values[
            "branch.max_share"
        ] * len(entropies)
        action = {
            "inject": "inject" if may_inject else "sample",
            "branch": "branch" if may_branch else "explore",
            "backspace": "backspace" if "" in reasons else "adaptive",
        }.get(arm, arm)
        action = queued_for if queue else "backspace" if again else action
        assert step.action == action
        happened[action] += 1
        if arm == "backspace" and action == "adaptive":
            happened[f"adaptive: {reasons[0] if reasons else origin}"] += 1
        # What is told is told of the distribution that was read.
        assert REGIMES[choice.observation.regime] == regime
        entropy = entropy_bits(np.exp(log_probs))
        assert choice.observation.metrics.entropy == pytest.approx(entropy, rel=1e-5, abs=1e-5)

        goes_back = action == "backspace" and again is None
        assert step.first.rewinds == goes_back
        if goes_back:
            back = 1 + reasons.index("")
            happened[f"{back} back"] += 1
            happened.update(f"{reason} stays" for reason in reasons[: back - 1])
            again = [trail.pop() for _ in range(back)][-1]
            again.banned.append(tokens[-back])
            del tokens[-back:], entropies[-back:]
            assert len(tokens) >= settled
            happened["a cooldown as before"] += cooldown != again.cooldown
            mu_then, mu, cooldown = mu, again.mu, again.cooldown
            retractions += 1
            happened[f"attempt {len(again.banned)}"] += 1
            happened[f"after {again.action}"] += 1
            happened["first token"] += len(tokens) == start_of
        elif action == "branch" and not queue:
            for token in step.tokens[length:]:
                commit(token)
            queue, queued_for = [], "branch"
            if len(tokens) == length:
                queue = [int(step.first.candidates[step.last.best])]
            rolled_out = int(step.tally.own["branch"].forwards) - branch_forwards
            forwards, branch_forwards = forwards + rolled_out, branch_forwards + rolled_out
            branchings += 1
            trail.clear()
            origin = "branch"
        elif queue or action == "inject":
            if not queue:
                injections += 1
                queue, queued_for = list(thought), "inject"
            token = queue.pop(0)
            commit(token)
            if queued_for == "inject" and not queue:
                cooldown = values["inject.cooldown"]
            trail.clear()
            origin = queued_for
        else:
            at = again or Position(proposal, action, mu, cooldown)
            first, attempt = at.proposal, len(at.banned)
            if again:
                for name in ("temperature", "top_k", "top_p", "min_p"):
                    base = np.float32(values[f"base.{name}"])
                    wanted = base if at.action == "argmax" else getattr(first, name)
                    assert getattr(proposal, name) == wanted, name
                assert (proposal.draws, proposal.rule) == (1, first.rule)
            token = drawn(at, proposal, attempt)
            if again:
                for rule, otherwise in {
                    "the attempt": (at, proposal, 0),
                    "the ban": (replace(at, banned=at.banned[:-1]), proposal, attempt),
                    "an earlier ban": (replace(at, banned=at.banned[-1:]), proposal, attempt),
                    "mu": (replace(at, mu=mu_then), proposal, attempt),
                    "the proposal": (at, first, attempt),
                }.items():
                    rule += " after an argmax" if at.action == "argmax" else ""
                    happened[f"{rule} shows"] += token != drawn(*otherwise)
            mu = learned(at, proposal, token)
            at.probability = float(np.exp(log_softmax(logits)[token]))
            assert np.exp(choice.logprob) == pytest.approx(at.probability, rel=1e-5, abs=1e-6)
            trail.append(at)
            again = None
            commit(token)
            assert choice.token == token
            so_far = np.var(entropies)
            assert choice.sequence_varentropy == pytest.approx(so_far, rel=1e-5, abs=1e-5)

        assert (step.tokens, step.last.forwards) == (tokens, forwards)
        assert step.first.position == (len(tokens) if goes_back else length)
        reasons = [stays(at) for at in trail]
        settled = len(tokens) - (len(trail) - reasons.index("") if "" in reasons else 0)
        settled = settled if has_arm else len(tokens)
        assert step.last.settled == settled
        tally = step.tally
        assert tally.queued == len(queue)
        assert tally.own["inject"].cooldown == cooldown
        assert tally.own["inject"].begun == injections
        assert tally.own["branch"].begun == branchings
        assert tally.own["backspace"].backspaced == retractions
        mean = np.mean(entropies) if entropies else 0.0
        assert tally.entropy_mean == pytest.approx(mean, rel=1e-5)
        squares = np.var(entropies) * len(entropies) if entropies else 0.0
        assert tally.entropy_squares == pytest.approx(squares, rel=1e-5, abs=1e-5)
        offset = mu - 2 * values["truncation.mirostat_target"]
        assert tally.mirostat == pytest.approx(offset, rel=1e-5, abs=1e-5)
    assert len(entropies) == job.budget
    finishes = [step.last.finish for step in steps]
    assert finishes == [RUNNING] * (len(steps) - 1) + [FINISHED_LENGTH]
    return happened


# Whole rows

PLAIN: Mapping[str, Any] = {
    **BOUNDS,
    "loop.max_period": 0,
    "arms.helv": "sample",
    "arms.lehv": "explore",
    "arms.mid": "sample",
    "base.temperature": 1.0,
    "base.top_k": 0,
    "base.min_p": 0.0,
    "backspace.max_prob": 1.0,
    "backspace.per_position": 3,
    "inject.thought": "",
}
# Sure tokens lead to where the row goes back: beyond them.
SHARES = {"lelv": 8, "hehv": 12, "helv": 4, "lehv": 4, "mid": 4}
KINDS = [kind for kind, number in SHARES.items() for _ in range(number)]
MODEL = chain(KINDS, seed=1)
# It ends where a drawn token would be taken back.
THOUGHT = {"arms.helv": "inject", "inject.thought": f"3 40 {KINDS.index('hehv')}"}
EVERYWHERE = {f"arms.{regime}": "backspace" for regime in REGIMES} | {"backspace.per_position": 8}
BRANCHES = {"arms.lehv": "branch", "branch.depth": 3}


def far(reach: int, max_prob: float = 1.0) -> dict[str, Any]:
    return {"backspace.reach": reach, "backspace.max_prob": max_prob}


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {**{f"arms.{box}": "adaptive" for box in ("helv", "lehv", "mid")}, **far(8, 0.5)},
    "few": {
        "draw.bans": [*range(0, 32, 2)],
        "repetition.penalty": 3.0,
        "backspace.per_row": 12,
        **far(8, 0.05),
    },
    "thoughts": {**THOUGHT, "inject.cooldown": 6, "inject.until_confident": True, **far(7, 0.5)},
    "branches": {**BRANCHES, "branch.max_share": 0.7, "branch.commit_all": False, **far(6)},
    "both": {
        **THOUGHT,
        **BRANCHES,
        "branch.per_row": 9,
        "branch.depth": 1,
        "inject.cooldown": 9,
        **far(8, 0.5),
    },
    "eight attempts": {
        **EVERYWHERE,
        "base.min_p": 0.6,
    },
    "mirostat": {
        "truncation.rule": "mirostat",
        "truncation.mirostat_target": 1.0,
        "truncation.mirostat_rate": 2.0,
        **EVERYWHERE,
        "arms.lelv": "argmax",
        **far(3),
    },
    "cold": {"base.temperature": 0.0, "backspace.per_position": 8, **far(8, 0.5)},
    "noise": {
        "metrics.noise_floor": True,
        "base.temperature": 20.0,
        "base.top_p": 1.0,
        "arms.mid": "backspace",
        "backspace.per_position": 1,
        **far(8),
    },
}
NAMES = [*SETTINGS]
# Where one token is nearly certain, no other is above the noise floor.
LOUD = 2.0**-2


def job_of(name: str, **changes: Any) -> Job:
    """Rows of several lengths, which end at the cache's end or before, and begin where a token
    would be retracted, or not."""
    index = NAMES.index(name)
    prompt = [*range(9, 9 + index % 3), KINDS.index("mid" if index % 2 else "hehv")]
    sampler = params_of(
        "entropix",
        {**PLAIN, **SETTINGS[name], **changes},
        encode=lambda text: [int(token) for token in text.split()],
        epsilon=LOUD if name == "noise" else EPSILON,
    )
    budget = CAPACITY - len(prompt) if index % 4 < 2 else 36 + index
    return Job(prompt, sampler, budget=budget, seed=index % 2, row_id=name)


JOBS = [job_of(name) for name in NAMES]


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Taken]]:
    return dict(zip(NAMES, play(MODEL.params, JOBS), strict=True))


# At least so often in all rows together; `shows` is said of rules without which the token would
# have been another.
EVERYTHING = {
    **{f"attempt {n}": least for n, least in enumerate((100, 50, 20, 10, 5, 5, 5, 5), start=1)},
    **{f"{n} back": least for n, least in enumerate((100, 10, 5, 5, 2, 2, 2, 2), start=1)},
    **{f"after {action}": 10 for action in ("argmax", "sample", "explore", "adaptive")},
    **{f"adaptive: {why}": 3 for why in ("prompt", "inject", "branch")},
    **{f"adaptive: {why}": 5 for why in ("likely", "position", "row")},
    **{"likely stays": 50, "position stays": 5, "first token": 5, "a cooldown as before": 10},
    **{"the attempt shows": 100, "the ban shows": 100, "an earlier ban shows": 50},
    "the proposal shows": 20,  # one candidate instead of twelve
    "the proposal after an argmax shows": 20,
    "the ban after an argmax shows": 20,
    "mu after an argmax shows": 3,
}


def test_rows_against_plain_python(runs: dict[str, list[Taken]]) -> None:
    """It would prove little where nothing happens."""
    happened: Counter = Counter()
    for job, (name, steps) in zip(JOBS, runs.items(), strict=True):
        values = load_sampler("entropix").with_values({**PLAIN, **SETTINGS[name]}).values
        happened += audit(MODEL, job, values, steps)
    missing = {what: happened[what] for what, n in EVERYTHING.items() if happened[what] < n}
    assert not missing


# Ends


def told(steps: Sequence[Taken]) -> list[tuple[Any, ...]]:
    """What is the same in any other run."""
    return [(step.token, int(step.first.position), int(step.first.forwards)) for step in steps]


def test_end_tokens(runs: dict[str, list[Taken]]) -> None:
    """One that takes another's place ends its row; one that would have been retracted does too."""
    plain, banned = runs["plain"], runs["adaptive"]

    def first_seen(steps: Sequence[Taken], wanted: Callable[[int], bool], other: int) -> int:
        """The first step that is wanted and whose token is new to both rows."""
        return next(
            i
            for i, step in enumerate(steps)
            if wanted(i) and step.token not in {-1, other, *(s.token for s in steps[:i])}
        )

    at = first_seen(plain, lambda i: plain[i].action == "backspace", -1)
    last = first_seen(banned, lambda i: bool(banned[i + 1].first.rewinds), plain[at].token)
    ends = (plain[at].token, banned[last].token)
    assert ends[0] not in [step.token for step in banned[: last + 1]]
    assert ends[1] not in [step.token for step in plain[: at + 1]]
    found = play(MODEL.params, JOBS, ends)
    for name, end in (("plain", at), ("adaptive", last)):
        steps = found[NAMES.index(name)]
        assert told(steps) == told(runs[name][: end + 1])
        assert [step.last.finish for step in steps] == [RUNNING] * end + [FINISHED_EOS]


def test_the_last_token_of_a_budget_stays(runs: dict[str, list[Taken]]) -> None:
    """At every budget: the row ends where a longer one first reached its length."""
    whole, job = runs["noise"], job_of("noise")
    jobs = [replace(job, budget=budget) for budget in range(1, 11)]
    would_go_back = 0
    for shorter, steps in zip(jobs, play(MODEL.params, jobs), strict=True):
        length = len(job.prompt) + shorter.budget
        last = next(i for i, step in enumerate(whole) if len(step.tokens) == length)
        assert told(steps) == told(whole[: last + 1])
        assert [step.last.finish for step in steps] == [RUNNING] * last + [FINISHED_LENGTH]
        would_go_back += bool(whole[last + 1].first.rewinds)
    assert would_go_back >= 2


def test_a_token_that_breaks_the_model_stays(runs: dict[str, list[Taken]]) -> None:
    """Logits that are no numbers end the row; even an arm that goes back leaves it all."""
    plain = runs["plain"]
    last = next(i for i, step in enumerate(plain) if step.first.rewinds) - 1
    token, kept = plain[last].token, plain[:last]
    assert token % TYPES not in [step.token % TYPES for step in kept]
    broken = MODEL.params.embedding.at[token].set(jnp.nan)
    jobs = [job_of("plain"), job_of("plain", **{"arms.mid": "backspace"})]
    steps, others = play(replace(MODEL.params, embedding=broken), jobs)[:2]
    assert told(steps[:-1]) == told(plain[: last + 1])
    for row in (steps, others):
        assert row[-1].last.finish == FINISHED_ERROR
        assert row[-2].token == token
        assert row[-1].first.position == row[-2].first.position + 1


# Three tokens, and all of their distributions call for a retraction.
SMALL = {
    **PLAIN,
    **{f"regimes.{box}": ["entropy < -1"] for box in ("lelv", "helv", "lehv")},
    "regimes.hehv": ["entropy > -1"],
    "backspace.per_position": 8,
    **far(8),
}
choose_jit = jax.jit(choose)


def test_some_token_is_left_to_draw() -> None:
    """Bans never take the last one, the sampler's own bans included."""
    bans: list[list[int]] = [[], [1], [0, 2]]
    settings = batch_of(*(params_of("entropix", {**SMALL, "draw.bans": ids}) for ids in bans))
    state, actions = fresh_state(3), ["", "", ""]
    texts: list[list[int]] = [[0], [0], [0]]
    drawn: list[list[list[int]]] = [[[0]], [[0]], [[0]]]  # the tokens at each position
    for _ in range(50):
        history = np.zeros((3, 80), np.int32)
        for row, text in enumerate(texts):
            history[row, : len(text)] = text
        length = jnp.asarray([*map(len, texts)], jnp.int32)
        rows = Rows(
            running=jnp.ones(3, bool),
            keys=jnp.asarray([[1, 2], [3, 4], [5, 6]], jnp.uint32),
            history=jnp.asarray(history),
            length=length,
            generated=length - 1,
            remaining=80 - length,
            asks=jnp.zeros(3, bool),
            branch=jnp.full(3, -1),
            vocab_size=3,
        )
        seen = [np.random.default_rng(text).normal(size=3) for text in texts]
        logits = jnp.asarray(np.stack(seen), jnp.float32)
        choice, step, state = choose_jit(logits, attn_stats(3), settings, state, rows)
        for row, text in enumerate(texts):
            actions[row] += ACTIONS[choice.proposal.action[row]][0]
            if step.rewinds[row]:
                del text[int(step.rows.length[row]) :]
                continue
            text.append(int(choice.token[row]))
            drawn[row] += [[]] * (len(text) > len(drawn[row]))
            drawn[row][len(text) - 1] = [*drawn[row][len(text) - 1], text[-1]]
    assert actions == ["abbbb" * 10, ("abb" * 17)[:50], "a" * 50]
    assert state.tally.own["backspace"].backspaced.tolist() == [20, 17, 0]
    for banned, positions in zip(bans, drawn, strict=True):
        for tokens in positions[1:-1]:
            assert sorted([*tokens, *banned]) == [0, 1, 2]


# As a user sees it

RETRACTING = load_sampler("entropix").with_values(
    {
        "thresholds.calibrated": False,
        "regimes.lelv": ["entropy < 0.5"],
        "regimes.helv": ["entropy < -1"],
        "regimes.lehv": ["entropy < -1"],
        "regimes.hehv": ["entropy > 2"],
        "loop.max_period": 0,
        "backspace.per_row": 1000,
        **far(5, 0.5),
    }
)
RECORDING = Recording(top=3, layers=True)
TOKENS = 40
PROMPT = [token_ids()["<|begin_of_text|>"], 60, 61, 62, 63]
SPEC = Spec(PROMPT, "0", TOKENS)
# The host is asked for a text, again and again, and has none.
ASKING = RETRACTING.with_values(
    {"regimes.helv": ["entropy > 1", "entropy < 2"], "inject.cooldown": 1}
)
ASKED = {"retrieve": lambda text: "", "sampler": ASKING}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(str(write_model(tmp_path_factory.mktemp("model"))))


def pushed(model: LanguageModel, tokens: Sequence[TokenRecord]) -> str:
    """The text that is certain after some tokens."""
    stream = model.tokenizer.stream(after=PROMPT)
    return "".join(stream.push(token.token_id) for token in tokens)


@dataclass
class Run:
    events: list[Event]
    row: Row
    texts: list[list[TokenRecord]] = field(default_factory=list)  # after each step
    groups: list[list[TokenRecord]] = field(default_factory=list)  # that were retracted at once
    instead: list[TokenRecord] = field(default_factory=list)  # what came in their places

    def __post_init__(self) -> None:
        """Puts the tokens into the order in which they were chosen."""
        tokens = [event.token for event in self.events if event.token is not None]
        text: list[TokenRecord] = []
        self.texts.append(text)
        for token in sorted(tokens, key=lambda token: token.forwards):
            kept = token.position - len(PROMPT)
            if kept < len(text):
                self.groups.append(text[kept:])
                self.instead.append(token)
                self.texts.append(text[:kept])
            text = [*text[:kept], token]
            self.texts.append(text)


def run_of(model: LanguageModel, spec: Spec = SPEC, **options: Any) -> Run:
    settings = {"ignore_eos": True, "recording": RECORDING, "sampler": RETRACTING, **options}
    one = run_specs(model, [spec], **settings)
    return Run(list(one), one.rows[0])


@pytest.fixture(scope="module")
def whole(model: LanguageModel) -> Run:
    return run_of(model)


@pytest.mark.parametrize("options", [{}, ASKED])
def test_retracted_tokens_stand_before_their_replacement(
    model: LanguageModel, options: dict[str, Any]
) -> None:
    run = run_of(model, **options)
    assert run.texts[-1] == run.row.tokens
    tokens = [event.token for event in run.events if event.token is not None]
    gone = [token for group in run.groups for token in group]
    assert gone == [event.token for event in run.events if event.retracted]
    assert len(gone) == run.row.retracted == run.row.to_json()["retracted"] > 20
    assert max(map(len, run.groups)) > 1
    for token in tokens:
        assert token.top is not None
        said = {text_id: p for text_id, _, p in token.top}
        if token.token_id in said:
            assert np.exp(token.logprob) == pytest.approx(said[token.token_id], rel=1e-4)
    for group, replacement in zip(run.groups, run.instead, strict=True):
        first, position = group[0], tokens.index(group[0])
        assert len(group) <= 5
        assert np.exp(first.logprob) < 0.5
        assert tokens[position : position + len(group)] == group
        assert tokens.index(replacement) > position
        assert replacement.action == "backspace"
        assert replacement.token_id != first.token_id
        # Two passes: of the last token, and of what precedes the first, which may be the prompt.
        passes = 1 if first.position == len(PROMPT) else 2
        assert replacement.forwards == group[-1].forwards + passes
        # Both are of one distribution.
        different = ["token_id", "text", "action", "logprob", "forwards"]
        if first.action == "argmax":
            different += ["temperature", "top_k", "top_p", "min_p"]
        assert without(first, different) == without(replacement, different)
    for text in run.texts[1:]:
        if text[-1:] in [group[-1:] for group in run.groups]:
            assert pushed(model, text[:-1]) + text[-1].text == pushed(model, text)
    for event in run.events:
        if event.retracted:
            assert event.pieces == ()
            assert event.token.to_json(retracted=True)["type"] == "retracted"
    if not options:
        rewinds = [group[0].position > len(PROMPT) for group in run.groups]
        passes = TOKENS - 1 + len(gone) + sum(rewinds)
        assert run.row.to_json()["forwards"] == passes


def without(token: TokenRecord, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in token.to_json().items() if name not in names}


def test_what_is_shown_stays(model: LanguageModel, whole: Run) -> None:
    """At every event the text is that of the committed tokens, and nothing of it goes again."""
    shown, committed = "", 0
    for event in whole.events:
        shown += "".join(piece.text for piece in event.pieces)
        committed += event.token is not None and not event.retracted
        # The last token's text may end with what a character that was not completed leaves.
        if committed < TOKENS:
            assert shown == pushed(model, whole.row.tokens[:committed])
    assert shown == whole.row.text == "".join(token.text for token in whole.row.tokens)
    ids = [token.token_id for token in whole.row.tokens]
    assert whole.row.text == model.tokenizer.stream(after=PROMPT).run(ids)
    assert whole.row.log == [
        (event.token, event.retracted) for event in whole.events if event.token
    ]


def test_a_retracted_token_ends_no_text(model: LanguageModel, whole: Run) -> None:
    """A stop string that only a token that was retracted would complete."""
    gone = [token for group in whole.groups for token in group]
    stops = [
        pushed(model, text[:-1])[-4:] + text[-1].text
        for text in whole.texts
        if text[-1:] and text[-1] in gone
    ]
    stops = [stop for stop in stops if stop not in whole.row.text]
    assert len(stops) > 10
    row = run_of(model, stop=stops).row
    assert row.tokens == whole.row.tokens
    assert (row.text, row.finish_reason) == (whole.row.text, "length")


def test_a_replacement_may_complete_a_stop_string(model: LanguageModel, whole: Run) -> None:
    texts = [token.text for token in whole.row.tokens]
    at = next(
        i
        for i, token in enumerate(whole.row.tokens)
        if i > 5
        and token.action == "backspace"
        and len(token.text) > 1
        and whole.row.text.index(texts[i - 1] + texts[i]) == len("".join(texts[: i - 1]))
    )
    one = run_of(model, stop=["never", texts[at - 1] + texts[at]])
    assert one.row.tokens == whole.row.tokens[: at + 1]
    shown = "".join(piece.text for event in one.events for piece in event.pieces)
    assert shown == one.row.text == "".join(texts[: at - 1])
    assert one.row.finish_reason == "stop"
    end = [event.token for event in whole.events].index(whole.row.tokens[at])
    assert one.row.retracted == sum(event.retracted for event in whole.events[:end])


def test_an_interrupt_keeps_the_tokens_that_are_held_back(model: LanguageModel) -> None:
    """Left after any event: what later steps might have retracted ends the text of its row."""
    specs = [Spec(PROMPT, str(i), TOKENS) for i in range(3)]

    def three() -> Generation:
        return run_specs(model, specs, RETRACTING, ignore_eos=True)

    one = three()
    events = list(one)
    runs = [Run([e for e in events if e.row is row], row) for row in one.rows]
    held = 0
    for number in range(1, 60, 3):
        one = three()
        shown = ["", "", ""]
        for event in [*islice(one, number), *one.interrupt()]:
            shown[event.row.number] += "".join(piece.text for piece in event.pieces)
        assert one.interrupt() == []
        for index, row in enumerate(one.rows):
            assert row.finish_reason == "interrupt"
            assert shown[index] == row.text == "".join(token.text for token in row.tokens)
            seen = [e.token for e in events[:number] if e.row.number == index and not e.retracted]
            assert row.tokens in runs[index].texts
            assert row.tokens[: len(seen)] == seen
            held += len(row.tokens) - len(seen)
    assert held > 20
