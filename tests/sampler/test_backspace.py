"""Backspace: a row goes back to a token in doubt and draws again, told a second time in Python.

The model of most tests is a chain, so that the oracle can follow a row step by step, in float64.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.state import BRANCH_ENDED, EOS, ERROR, FORKS, LENGTH, RUNNING, StepRecord
from entropix_jax.model.params import Params
from entropix_jax.names import REGIMES, SERVED
from entropix_jax.sampler.draw import STREAM_CANDIDATE, STREAM_DRAW, row_key
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import MAX_DRAWS
from entropix_jax.sampler.state import Proposal, Tally
from tests.support.chains import BOUNDS, CONFIG, TYPES, Chain, chain, regime_of
from tests.support.draw_oracles import KeptTokens, uniform_numbers
from tests.support.reference import entropy_bits, log_softmax, varentropy_bits
from tests.support.samplers import (
    BATCH,
    CAPACITY,
    EPSILON,
    FEW,
    LITERAL,
    LITERAL_THRESHOLDS,
    Job,
    advance,
    attn_stats,
    batch_of,
    fresh_state,
    params_of,
    start,
)
from tests.support.schedules import encode_numbers
from tests.support.steps import choose_jit, rows_of
from tests.support.transform_oracles import modified

# Steps that were taken


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
    while np.any(np.isin(state.status, (RUNNING, FORKS, BRANCH_ENDED))):
        for following, records in advance(model, state, 1, config=CONFIG):
            state = following
            tally, history, cached = jax.device_get(
                (state.sampler.tally, state.history, state.cache.length)
            )
            leaves, tree = jax.tree.flatten(records)
            for row in np.flatnonzero((records.live | records.joined.joins)[0, :BATCH]).tolist():
                one = jax.tree.unflatten(tree, [x[0, row] for x in leaves])
                if one.width:
                    forks[row] = one
                elif one.branch < 0 or one.joined.joins:
                    own = jax.tree.map(lambda x, row=row: x[row], tally)
                    tokens = history[row, : cached[row] + 1].tolist()
                    taken[row].append(Taken(forks.pop(row, one), one, own, tokens))
    return taken


# What should have been done


@dataclass
class Position:
    """What must be kept of a drawn token to draw its position again."""

    proposal: Proposal
    action: str
    mu: float  # bits, before it
    cooldown: int  # before it
    drift: np.ndarray  # before it
    probability: float = 0.0
    banned: list[int] = field(default_factory=list)


QUANTILES = np.array([0.3, 0.7, 0.4, 0.6])  # of LITERAL's thresholds in CALIBRATION
about = partial(pytest.approx, rel=1e-5, abs=1e-5)


def audit(model: Chain, job: Job, values: Mapping[str, Any], steps: Sequence[Taken]) -> Counter:
    """Follows a row from its prompt, and checks each step against the rules in plain Python.

    How a first draw was proposed, and what a fork came to, is taken from the record. Returns how
    often what happened.
    """
    epsilon = float(job.sampler.noise_epsilon)
    thoughts = [encode_numbers(text) for text in values["inject.thought"]]
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
    mu = 2 * values["mirostat.target"]
    drift = np.zeros(4)
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
        nonlocal cooldown, drift
        log_probs = model.heard(tokens[-1], epsilon)
        p = np.exp(log_probs)
        entropies.append(entropy_bits(p))
        if values["thresholds.dynamic"]:
            seen = np.array([entropy_bits(p)] * 2 + [varentropy_bits(p)] * 2)
            thresholds = LITERAL_THRESHOLDS * np.exp(drift)
            assert np.all(np.abs(seen - thresholds) > 1e-5), "too close to tell"
            drift = drift + values["thresholds.rate"] * (QUANTILES - (seen < thresholds))
        confident = values["inject.until_confident"] and regime_of(log_probs) == "lelv"
        cooldown = 0 if confident else max(cooldown - 1, 0)
        tokens.append(token)

    def seen(at: Position) -> np.ndarray:
        """Returns the logits of a draw: biased, penalised, banned, above the noise floor."""
        last = tokens[-1]
        return modified(model.logits(last), model.heard(last, epsilon), tokens, values, at.banned)

    def drawn(at: Position, proposal: Proposal) -> int:
        count = int(proposal.num_candidates)
        stream = STREAM_CANDIDATE if count > 1 else STREAM_DRAW
        key = row_key(job.seed, job.row_id)
        numbers = uniform_numbers(key, len(tokens), stream, MAX_DRAWS, len(at.banned))[:count]
        if values["truncation.rule"] == "mirostat" and proposal.temperature > 0:
            kept = KeptTokens.of("mirostat", seen(at), float(proposal.temperature), at.mu)
        else:
            kept = KeptTokens.of_nucleus(seen(at), jax.tree.map(np.atleast_1d, proposal))
        return max(kept.drawn(numbers), key=lambda token: logits[token])

    def learned(at: Position, proposal: Proposal, token: int) -> float:
        """Mirostat's mu after a token."""
        if values["truncation.rule"] != "mirostat":
            return at.mu
        bits = 0.0
        if proposal.temperature > 0:
            bits = -log_softmax(seen(at) / float(proposal.temperature))[token] / np.log(2)
        target = values["mirostat.target"]
        return at.mu - values["mirostat.rate"] * (bits - target)

    for step in steps:
        length, choice, proposal = len(tokens), step.first.choice, step.first.choice.proposal
        forwards += length > start_of
        logits = model.logits(tokens[-1])
        log_probs = model.heard(tokens[-1], epsilon)
        regime = regime_of(log_probs)
        arm = values[f"arms.{regime}"]
        remaining = job.budget - len(entropies)
        reasons = [stays(at) for at in reversed(trail)]
        thought = thoughts[injections % len(thoughts)] if thoughts else []
        may_inject = (
            0 < len(thought) <= remaining
            and not any(tokens[-len(one) :] == one for one in thoughts)
            and cooldown == 0
            and injections < values["inject.per_row"]
        )
        affordable = values["branch.max_share"] * len(entropies)
        may_branch = branchings < values["branch.per_row"] and branch_forwards <= affordable
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
        # The records describe the distribution that was read.
        assert REGIMES[choice.observation.regime] == regime
        assert choice.observation.metrics.entropy == about(entropy_bits(np.exp(log_probs)))

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
            happened["thresholds as before"] += bool(np.any(drift != again.drift))
            mu, cooldown, drift = again.mu, again.cooldown, again.drift
            retractions += 1
            happened[f"attempt {len(again.banned)}"] += 1
            happened[f"after {again.action}"] += 1
            happened["first token"] += len(tokens) == start_of
        elif action == "branch" and not queue:
            for token in step.tokens[length:]:
                commit(token)
            queue, queued_for = [], "branch"
            if len(tokens) == length:
                queue = [int(step.first.candidates[step.last.joined.best])]
            rolled_out = int(step.tally.states["branch"].forwards) - branch_forwards
            forwards, branch_forwards = forwards + rolled_out, branch_forwards + rolled_out
            branchings += 1
            trail.clear()
            origin = "branch"
        elif queue or action == "inject":
            if not queue:
                injections += 1
                queue, queued_for = list(thought), "inject"
            commit(queue.pop(0))
            if queued_for == "inject" and not queue:
                cooldown = values["inject.cooldown"]
            trail.clear()
            origin = queued_for
        else:
            at = again or Position(proposal, action, mu, cooldown, drift)
            if again:
                for name in ("temperature", "top_k", "top_p", "min_p"):
                    base = np.float32(values[f"base.{name}"])
                    wanted = base if at.action == "argmax" else getattr(at.proposal, name)
                    assert getattr(proposal, name) == wanted, name
                assert proposal.num_candidates == 1
            token = drawn(at, proposal)
            mu = learned(at, proposal, token)
            at.probability = float(np.exp(log_softmax(logits)[token]))
            assert np.exp(choice.logprob) == about(at.probability)
            trail.append(at)
            again = None
            commit(token)
            assert choice.token == token
            assert choice.observation.sequence_varentropy == about(np.var(entropies))

        assert (step.tokens, int(step.last.forwards)) == (tokens, forwards)
        assert step.first.position == (len(tokens) if goes_back else length)
        reasons = [stays(at) for at in trail]
        settled = len(tokens) - (len(trail) - reasons.index("") if "" in reasons else 0)
        settled = settled if has_arm else len(tokens)
        assert step.last.settled == settled
        tally = step.tally
        assert tally.queued == len(queue)
        assert tally.drift == about(drift)
        assert tally.states["inject"].cooldown == cooldown
        assert tally.states["inject"].begun == injections
        assert tally.states["branch"].begun == branchings
        assert tally.states["backspace"].backspaced == retractions
        known = entropies or [0.0]
        assert tally.entropies == about([np.mean(known), np.var(known) * len(known)])
        assert tally.states["mirostat"] == about(mu - 2 * values["mirostat.target"])
    assert len(entropies) == job.budget
    finishes = [step.last.status for step in steps]
    assert finishes == [RUNNING] * (len(steps) - 1) + [LENGTH]
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
    "inject.thought": [],
}
# Sure tokens lead to where the row goes back: beyond them.
SHARES = {"lelv": 8, "hehv": 12, "helv": 4, "lehv": 4, "mid": 4}
KINDS = [kind for kind, number in SHARES.items() for _ in range(number)]
MODEL = chain(KINDS, seed=1)
# It ends where a drawn token would be taken back.
THOUGHT = {"arms.helv": "inject", "inject.thought": [f"3 40 {KINDS.index('hehv')}"]}
EVERYWHERE = {f"arms.{regime}": "backspace" for regime in REGIMES} | {"backspace.per_position": 8}
UNLIKE = {
    "draw.bans": [*range(0, 32, 2)],
    "draw.bias": [[token, (-1.5, 1.5)[token % 4 > 1]] for token in range(1, 32, 2)],
    "repetition.penalty": 3.0,
}
HOT = {"metrics.noise_floor": True, "base.temperature": 20.0, "base.top_p": 1.0}
BRANCHES = {"arms.lehv": "branch", "branch.depth": 3}
FOLLOWING = {"thresholds.dynamic": True, "thresholds.rate": 0.05}


def far(reach: int, max_prob: float = 1.0) -> dict[str, Any]:
    return {"backspace.reach": reach, "backspace.max_prob": max_prob}


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": {**{f"arms.{box}": "adaptive" for box in ("helv", "lehv", "mid")}, **far(8, 0.5)},
    "few": {**UNLIKE, "backspace.per_row": 12, **far(8, 0.05)},
    "thoughts": {**THOUGHT, "inject.cooldown": 6, "inject.until_confident": True, **far(7, 0.5)},
    "branches": {
        **BRANCHES,
        "branch.max_share": 0.7,
        "branch.commit_all": False,
        **far(6),
        **FOLLOWING,
    },
    "both": {
        **THOUGHT,
        **BRANCHES,
        "branch.depth": 1,
        "inject.thought": [f"3 40 {KINDS.index('hehv')}", "5 6", "7"],
        "inject.cooldown": 9,
        **far(8, 0.5),
        **FOLLOWING,
    },
    "eight attempts": {**EVERYWHERE, "base.min_p": 0.6, **FOLLOWING},
    "mirostat": {
        "truncation.rule": "mirostat",
        "mirostat.target": 1.0,
        "mirostat.rate": 2.0,
        **EVERYWHERE,
        "arms.lelv": "argmax",
        **far(3),
    },
    "cold": {"base.temperature": 0.0, "backspace.per_position": 8, **far(8, 0.5)},
    "noise": {**HOT, "arms.mid": "backspace", "backspace.per_position": 1, **far(8)},
}
CASES = [*SETTINGS]
LOUD = 2.0**-2  # where one token is nearly certain, no other is above this noise floor


def job_of(name: str, **changes: Any) -> Job:
    """Rows of several lengths, which end at the cache's end or before, and begin where a token
    would be retracted, or not."""
    index = CASES.index(name)
    prompt = [*range(9, 9 + index % 3), KINDS.index("mid" if index % 2 else "hehv")]
    sampler = params_of(
        LITERAL,
        {**PLAIN, **SETTINGS[name], **changes},
        encode=encode_numbers,
        epsilon=LOUD if name == "noise" else EPSILON,
    )
    budget = CAPACITY - len(prompt) if index % 4 < 2 else 36 + index
    return Job(prompt, sampler, budget=budget, seed=44 + index % 2, row_id=name)


JOBS = [job_of(name) for name in CASES]


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Taken]]:
    return dict(zip(CASES, play(MODEL.params, JOBS), strict=True))


# At least so often in all rows together.
EVERYTHING = {
    **{f"attempt {n}": least for n, least in enumerate((100, 50, 20, 10, 5, 5, 5, 5), start=1)},
    **{f"{n} back": least for n, least in enumerate((100, 10, 5, 5, 2, 2, 2, 2), start=1)},
    **{f"after {action}": 10 for action in ("argmax", "sample", "explore", "adaptive")},
    **{f"adaptive: {why}": 3 for why in ("prompt", "inject", "branch")},
    **{f"adaptive: {why}": 5 for why in ("likely", "position", "row")},
    "likely stays": 50,
    "position stays": 5,
    "first token": 5,
    "a cooldown as before": 10,
    "thresholds as before": 50,
}


def test_rows_against_plain_python(runs: dict[str, list[Taken]]) -> None:
    """It would prove little where nothing happens."""
    happened: Counter = Counter()
    for job, (name, steps) in zip(JOBS, runs.items(), strict=True):
        values = load_sampler(LITERAL).with_values({**PLAIN, **SETTINGS[name]}).values
        happened += audit(MODEL, job, values, steps)
    missing = {what: happened[what] for what, n in EVERYTHING.items() if happened[what] < n}
    assert not missing


# Ends


def told(steps: Sequence[Taken]) -> list[tuple[Any, ...]]:
    """Returns the values that are equal in any other run."""
    return [(step.token, int(step.first.position), int(step.first.forwards)) for step in steps]


def test_end_tokens(runs: dict[str, list[Taken]]) -> None:
    """One that takes another's place ends its row; one that would have been retracted does too."""
    steps = runs["plain"]
    new = [i for i, step in enumerate(steps) if step.token not in {s.token for s in steps[:i]}]
    replaces = next(i for i in new if steps[i].action == "backspace" and steps[i].token >= 0)
    for end in (replaces, next(i for i in new if steps[i + 1].first.rewinds)):
        found = play(MODEL.params, JOBS[:1], (-1, steps[end].token))[0]
        assert told(found) == told(steps[: end + 1])
        assert [step.last.status for step in found] == [RUNNING] * end + [EOS]


def test_the_last_token_of_a_budget_stays(runs: dict[str, list[Taken]]) -> None:
    """At every budget: the row ends where a longer one first reached its length."""
    whole, job = runs["noise"], job_of("noise")
    jobs = [replace(job, budget=budget) for budget in range(1, 11)]
    would_go_back = 0
    for shorter, steps in zip(jobs, play(MODEL.params, jobs), strict=True):
        length = len(job.prompt) + shorter.budget
        last = next(i for i, step in enumerate(whole) if len(step.tokens) == length)
        assert told(steps) == told(whole[: last + 1])
        assert [step.last.status for step in steps] == [RUNNING] * last + [LENGTH]
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
        assert row[-1].last.status == ERROR
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


def test_some_token_is_left_to_draw() -> None:
    """Bans never take the last one, the sampler's own bans included."""
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
