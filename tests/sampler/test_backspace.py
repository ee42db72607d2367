"""Backspace: a token is taken back and its position is drawn again, told a second time in Python.

The model of most tests is a chain: its logits depend on the last token alone, so a table of them is
all that the oracle needs to follow a row, step by step and in float64.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.decode import decode
from entropix_jax.engine.generation import Generation
from entropix_jax.engine.results import Event, Row
from entropix_jax.engine.state import (
    FINISHED_EOS,
    FINISHED_ERROR,
    FINISHED_LENGTH,
    RUNNING,
    BranchLog,
    Recording,
)
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.model.params import Params
from entropix_jax.names import REGIMES
from entropix_jax.sampler.keys import STREAM_CANDIDATE, STREAM_DRAW, row_key, uniforms
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.mechanisms.backspace import may_backspace
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.proposal import Proposal
from entropix_jax.sampler.settings import MAX_DRAWS, RULES, SamplerSettings
from entropix_jax.sampler.state import Tally
from tests.support.draw_oracles import mirostat
from tests.support.model_folders import token_ids
from tests.support.reference import entropy_bits, log_softmax
from tests.support.runs import Spec, run_specs
from tests.support.samplers import (
    BATCH,
    CAPACITY,
    EPSILON,
    Job,
    batch_of,
    fresh_state,
    params_of,
    start,
    tiny_model,
)
from tests.support.schedules import encode_numbers
from tests.support.steps import rows_of

CONFIG, RANDOM = tiny_model()
VOCAB = CONFIG.vocab_size
TYPES = CONFIG.width  # tokens whose ids differ by a multiple of it are followed by the same

# Each box is a stretch of entropies, and a chain has logits in the middle of each.
BOUNDS: Mapping[str, Any] = {
    "regimes.lelv": ["entropy < 1"],
    "regimes.helv": ["entropy > 1", "entropy < 2"],
    "regimes.lehv": ["entropy > 2", "entropy < 3"],
    "regimes.hehv": ["entropy > 3", "entropy < 4"],
    "loop.max_period": 0,
}
LIKELY = {"lelv": 1, "helv": 3, "lehv": 6, "hehv": 12, "mid": 40}  # tokens that are about as likely


@dataclass
class Chain:
    """A model that looks at one token, and its logits [TYPES, V], float64."""

    table: np.ndarray
    params: Params

    def logits(self, token: int) -> np.ndarray:
        return self.table[token % TYPES]


def chain(kinds: Sequence[str], seed: int = 0) -> Chain:
    """A chain in which a token of type i is followed by a distribution of the regime `kinds[i]`."""
    rng = np.random.default_rng(seed)
    table = -12 + rng.normal(size=(TYPES, VOCAB))
    for row, kind in zip(table, kinds, strict=True):
        order = rng.permutation(VOCAB)
        row[order[: LIKELY[kind]]] = rng.uniform(0, 0.5, LIKELY[kind])
        if kind == "lelv":
            row[order[1:11]] = -6 + 0.5 * rng.normal(size=10)
    # The norm of a one-hot row, which is all that reaches the head.
    scale = 1 / np.sqrt(1 / TYPES + CONFIG.norm_eps)
    head = (table.T / scale).astype(np.float32)
    layers = tuple(
        replace(layer, output=jnp.zeros_like(layer.output), down=jnp.zeros_like(layer.down))
        for layer in RANDOM.layers
    )
    params = replace(
        RANDOM,
        embedding=jnp.asarray(np.eye(TYPES, dtype=np.float32)[np.arange(VOCAB) % TYPES]),
        layers=layers,
        final_norm=jnp.ones_like(RANDOM.final_norm),
        head=jnp.asarray(head),
    )
    return Chain(head.T.astype(np.float64) * scale, params)


# What was done


@dataclass
class Taken:
    """One step of one row, and what the row remembered after it."""

    action: str
    token: int
    position: int
    regime: str  # of the distribution that the token is from
    proposal: Proposal
    forwards: int
    finish: int
    logprob: float
    entropy: float
    sequence_varentropy: float
    may_backspace: bool
    branch: list[int]  # the committed tokens of the best branch
    rolled_out: int
    tally: Tally
    tokens: list[int]


def play(
    model: Params, jobs: Sequence[Job], eos_ids: Sequence[int] = (-1, -1)
) -> list[list[Taken]]:
    """Runs rows one step at a time, and looks at all of them after each."""
    jobs = [*jobs, *[replace(jobs[0], budget=1)] * (BATCH - len(jobs))]  # one shape, one program
    state = start(CONFIG, model, jobs, CAPACITY)
    sampler = batch_of(*(job.sampler for job in jobs))
    taken: list[list[Taken]] = [[] for _ in jobs]
    while np.any(state.finish == RUNNING):
        state, records, log = decode(
            model,
            sampler,
            jnp.asarray(eos_ids, jnp.int32),
            state,
            jnp.int32(1),
            config=CONFIG,
            window=CAPACITY,
            max_steps=32,
            recording=Recording(),
        )
        record = jax.tree.map(lambda x: np.asarray(x[0]), records)
        entries = jax.tree.map(np.asarray, log)
        tally, history, cached = jax.device_get(
            (state.sampler.tally, state.history, state.cache.length)
        )
        for row in np.flatnonzero(record.live):
            one = jax.tree.map(lambda x, row=row: x[row], record)
            branch, rolled_out = _branch(entries, int(one.branch))
            taken[row].append(
                Taken(
                    action=ACTIONS[one.choice.proposal.action],
                    token=int(one.choice.token),
                    position=int(one.position),
                    regime=REGIMES[one.choice.observation.regime],
                    proposal=one.choice.proposal,
                    forwards=int(one.forwards),
                    finish=int(one.finish),
                    logprob=float(one.choice.logprob),
                    entropy=float(one.choice.observation.metrics.entropy),
                    sequence_varentropy=float(one.choice.sequence_varentropy),
                    may_backspace=bool(one.may_backspace),
                    branch=branch,
                    rolled_out=rolled_out,
                    tally=jax.tree.map(lambda x, row=row: x[row], tally),
                    tokens=history[row, : cached[row] + 1].tolist(),
                )
            )
    return taken


def _branch(entries: BranchLog, index: int) -> tuple[list[int], int]:
    """The tokens that a step's best branch gave, and how many all of them had."""
    if index < 0:
        return [], 0
    branches = entries.branches
    best = branches.tokens[index, branches.best[index]]
    return best[: entries.committed[index]].tolist(), int(branches.length[index].sum())


# What should have been done


@dataclass
class Position:
    """How a token was drawn: what must be kept of it to draw its position again."""

    proposal: Proposal
    action: str
    mu: float  # bits, before it
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
    order = np.lexsort((np.arange(logits.size), -logits))
    if proposal.temperature == 0:
        return [int(order[0])] * len(numbers)
    mass = np.exp((logits[order] - logits[order[0]]) / float(proposal.temperature))
    if RULES[proposal.rule] == "mirostat":
        _, fewest, most = mirostat(logits[np.isfinite(logits)], float(proposal.temperature), mu)
        assert fewest == most, "too close to tell"
        kept = fewest
    else:
        kept = int(np.sum((mass >= proposal.min_p) & (mass > 0)))
        kept = min(kept, int(proposal.top_k) or kept)
        if proposal.top_p < 1:
            cumulated = np.cumsum(mass[:kept])
            kept = 1 + int(np.sum(cumulated < proposal.top_p * cumulated[-1]))
    cumulated = np.cumsum(mass[:kept])
    ranks = np.searchsorted(cumulated, numbers * cumulated[-1], side="right")
    return [int(token) for token in order[ranks]]


uniforms_jit = jax.jit(uniforms, static_argnames="number")


def numbers_of(job: Job, position: int, attempt: int, stream: int, count: int) -> np.ndarray:
    parts = (np.asarray([part], np.int32) for part in (position, attempt, stream))
    key = row_key(job.seed, job.row_id)[None]
    return np.asarray(uniforms_jit(key, *parts, number=MAX_DRAWS), np.float64)[0, :count]


def audit(model: Chain, job: Job, values: Mapping[str, Any], steps: Sequence[Taken]) -> Counter:
    """Follows a row from its prompt, and checks each step against the rules in plain Python.

    How a first draw was proposed is taken from the record. Returns how often what happened, and how
    often a rule showed: without it the token would have been another.
    """
    epsilon = float(job.sampler.noise_epsilon)
    thought = [int(token) for token in values["inject.thought"].split()]
    per_position, per_row = values["backspace.per_position"], values["backspace.per_row"]
    tokens = list(job.prompt)
    entropies: list[float] = []
    queue: list[int] = []
    happened: Counter = Counter()
    last: Position | None = None  # None: the last token was not drawn
    origin = "prompt"  # where it is from, then
    mu = 2 * values["truncation.mirostat_target"]
    cooldown = injections = branchings = retractions = forwards = 0

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
        forwards += len(tokens) > len(job.prompt)
        source = tokens[-1]
        regime = regime_of(floored(model.logits(source), epsilon))
        arm = values[f"arms.{regime}"]
        remaining = job.budget - len(entropies)
        may_retract = last is not None and len(last.banned) < per_position and retractions < per_row
        may_inject = (
            0 < len(thought) <= remaining
            and tokens[-len(thought) :] != thought
            and cooldown == 0
            and injections < values["inject.per_row"]
        )
        may_branch = branchings < values["branch.per_row"]
        action = {
            "inject": "inject" if may_inject else "sample",
            "branch": "branch" if may_branch else "explore",
            "backspace": "backspace" if may_retract else "resample",
        }.get(arm, arm)
        action = "inject" if queue else action
        assert step.action == action
        happened[action] += 1
        if arm == "backspace" and action == "resample":
            spent = "row" if retractions >= per_row else "position"
            happened[f"resample: {origin if last is None else spent}"] += 1

        if action == "backspace":
            assert last is not None
            last.banned.append(tokens.pop())
            source, first, attempt = tokens[-1], last.proposal, len(last.banned)
            retractions += 1
            for name in ("temperature", "top_k", "top_p", "min_p"):
                base = np.float32(values[f"base.{name}"])
                wanted = base if last.action == "argmax" else getattr(first, name)
                assert getattr(step.proposal, name) == wanted, name
            assert step.proposal.draws == 1
            assert step.proposal.rule == first.rule
            token = drawn(last, step.proposal, attempt)
            for rule, otherwise in {
                "the attempt": (last, step.proposal, 0),
                "the ban": (replace(last, banned=last.banned[:-1]), step.proposal, attempt),
                "an earlier ban": (replace(last, banned=last.banned[-1:]), step.proposal, attempt),
                "mu": (replace(last, mu=mu), step.proposal, attempt),
                "the proposal": (last, first, attempt),
            }.items():
                rule += " after an argmax" if last.action == "argmax" else ""
                happened[f"{rule} shows"] += token != drawn(*otherwise)
            happened[f"after {last.action}"] += 1
            happened[f"attempt {attempt}"] += 1
            happened["first token"] += len(tokens) == len(job.prompt)
            happened["in a cooldown"] += cooldown > 0
            mu = learned(last, step.proposal, token)
            tokens.append(token)
        elif action == "branch":
            token = step.branch[0]
            for each in step.branch:
                commit(each)
            forwards += step.rolled_out
            branchings += 1
            last, origin = None, "branch"
        elif action == "inject":
            if not queue:
                injections += 1
                queue = list(thought)
            token = queue.pop(0)
            commit(token)
            cooldown = cooldown if queue else values["inject.cooldown"]
            last, origin = None, "inject"
        else:
            last = Position(step.proposal, action, mu)
            token = drawn(last, step.proposal, 0)
            mu = learned(last, step.proposal, token)
            commit(token)

        assert (step.token, step.tokens, step.forwards) == (token, tokens, forwards)
        assert step.position == len(tokens) - max(len(step.branch), 1)
        # What is told of a token is told of the distribution that it is from.
        log_probs = log_softmax(model.logits(source))
        assert step.regime == regime_of(floored(model.logits(source), epsilon))
        assert step.logprob == pytest.approx(log_probs[token], rel=1e-5, abs=1e-5)
        first_entropy = entropies[step.position - len(job.prompt)]
        assert step.entropy == pytest.approx(first_entropy, rel=1e-5, abs=1e-5)
        so_far = np.var(entropies[: step.position + 1 - len(job.prompt)])
        assert step.sequence_varentropy == pytest.approx(so_far, rel=1e-5, abs=1e-5)
        may_backspace = (
            last is not None and len(last.banned) < per_position and retractions < per_row
        )
        assert step.may_backspace == (may_backspace and step.finish == RUNNING)
        tally = step.tally
        assert tally.queued == len(queue)
        assert tally.own["inject"].cooldown == cooldown
        assert tally.own["inject"].begun == injections
        assert tally.own["branch"].begun == branchings
        assert tally.own["backspace"].backspaced == retractions
        assert tally.entropy_mean == pytest.approx(np.mean(entropies), rel=1e-5)
        squares = np.var(entropies) * len(entropies)
        assert tally.entropy_squares == pytest.approx(squares, rel=1e-5, abs=1e-5)
        offset = mu - 2 * values["truncation.mirostat_target"]
        assert tally.mirostat == pytest.approx(offset, rel=1e-5, abs=1e-5)
    assert len(entropies) == job.budget
    assert [step.finish for step in steps] == [RUNNING] * (len(steps) - 1) + [FINISHED_LENGTH]
    return happened


# Whole rows

PLAIN: Mapping[str, Any] = {
    **BOUNDS,
    "arms.helv": "sample",
    "arms.lehv": "explore",
    "arms.mid": "sample",
    "base.temperature": 1.0,
    "base.top_k": 0,
    "base.min_p": 0.0,
    "backspace.per_position": 3,
    "inject.thought": "",
}
SHARES = (
    {"lelv": 0.2, "helv": 0.15, "lehv": 0.15, "hehv": 0.3, "mid": 0.2},
    {"lelv": 0.15, "helv": 0.1, "lehv": 0.1, "hehv": 0.6, "mid": 0.05},
)
KINDS = [
    [str(kind) for kind in np.random.default_rng(seed).choice([*s], size=TYPES, p=[*s.values()])]
    for seed, s in enumerate(SHARES)
]
CHAINS = [chain(kinds, seed) for seed, kinds in enumerate(KINDS)]
ALL_ADAPTIVE = {f"arms.{regime}": "adaptive" for regime in ("helv", "lehv", "mid")}
# It ends where a drawn token would be taken back.
LAST_OF_THOUGHT = [kinds[0] == kinds[1] == "hehv" for kinds in zip(*KINDS, strict=True)].index(True)
THOUGHT = {"arms.helv": "inject", "inject.thought": f"3 40 {LAST_OF_THOUGHT}"}
# Two runs of ten rows each, in the second of which most tokens lead to where they are taken back.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive": ALL_ADAPTIVE,
    "one attempt": {"backspace.per_position": 1, "base.top_p": 1.0},
    "few in the row": {"backspace.per_row": 3},
    "none in the row": {"backspace.per_row": 0},
    "bans": {"draw.bans": [*range(0, 32, 2)], "repetition.penalty": 3.0},
    "thoughts": {**THOUGHT, "inject.cooldown": 6, "inject.until_confident": True},
    "branches": {"arms.lehv": "branch", "branch.depth": 3, "branch.per_row": 5},
    "mirostat": {"truncation.rule": "mirostat", "truncation.mirostat_rate": 0.5},
    "everything": {
        **THOUGHT,
        "inject.cooldown": 3,
        "arms.lehv": "branch",
        "branch.depth": 3,
        "branch.per_row": 3,
        "arms.mid": "adaptive",
        "repetition.penalty": 1.3,
        "backspace.per_row": 12,
    },
    "eight attempts": {
        "backspace.per_position": 8,
        "backspace.per_row": 1000,
        "arms.lehv": "backspace",
        "arms.mid": "backspace",
    },
    "no attempt": {"backspace.per_position": 0},
    "cold": {"base.temperature": 0.0, "backspace.per_position": 8},
    "hot": {"base.temperature": 20.0, "base.top_p": 1.0},  # from the whole vocabulary
    "min-p": {"base.min_p": 0.6, "base.top_p": 1.0},
    "top-k": {"base.top_k": 4},
    "noise floor": {"metrics.noise_floor": True, "base.temperature": 5.0, "base.top_p": 1.0},
    "loud noise": {"metrics.noise_floor": True, "base.temperature": 2.0, "base.top_p": 1.0},
    "one long thought": {**THOUGHT, "inject.cooldown": 40},
    "first of a branch": {"arms.lehv": "branch", "branch.depth": 3, "branch.commit_all": False},
}
NAMES = [*SETTINGS]
# Where one token is nearly certain, no other is above this floor.
LOUD = 2.0**-2


def sampler_of(changes: Mapping[str, Any], epsilon: float = EPSILON) -> SamplerSettings:
    return params_of("entropix", {**PLAIN, **changes}, encode=encode_numbers, epsilon=epsilon)


def job_of(name: str) -> Job:
    """Rows of several lengths, which end at the cache's end or before, and begin where a token
    would be taken back, or not."""
    index = NAMES.index(name)
    kinds = KINDS[index // BATCH]
    prompt = [*range(9, 9 + index % 3), kinds.index("mid" if index % 2 else "hehv")]
    return Job(
        prompt,
        sampler_of(SETTINGS[name], LOUD if name == "loud noise" else EPSILON),
        budget=CAPACITY - len(prompt) if index % 4 < 2 else 24 + index,
        seed=index % 2,
        row_id=name,
    )


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Taken]]:
    jobs = [job_of(name) for name in NAMES]
    rows = play(CHAINS[0].params, jobs[:BATCH]) + play(CHAINS[1].params, jobs[BATCH:])
    return dict(zip(NAMES, rows, strict=True))


def audit_of(name: str, runs: Mapping[str, list[Taken]]) -> Counter:
    values = load_sampler("entropix").with_values({**PLAIN, **SETTINGS[name]}).values
    return audit(CHAINS[NAMES.index(name) // BATCH], job_of(name), values, runs[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_row_against_plain_python(name: str, runs: dict[str, list[Taken]]) -> None:
    assert audit_of(name, runs)


# At least so often in all rows together; `shows` is said of rules without which the token would
# have been another.
EVERYTHING = {
    **{f"attempt {n}": least for n, least in enumerate((200, 100, 50, 5, 5, 2, 2, 2), start=1)},
    **{f"after {action}": 5 for action in ("argmax", "sample", "explore", "resample", "adaptive")},
    **{f"resample: {why}": 3 for why in ("prompt", "inject", "branch", "position", "row")},
    "first token": 3,
    "in a cooldown": 20,
    "the attempt shows": 200,
    "the ban shows": 100,
    "an earlier ban shows": 100,
    "the proposal shows": 5,  # one candidate instead of twelve
    "mu shows": 3,
    "the proposal after an argmax shows": 20,
    "the ban after an argmax shows": 20,
}


def test_everything_happens(runs: dict[str, list[Taken]]) -> None:
    """The comparison with plain Python would prove little where nothing happens."""
    happened = sum((audit_of(name, runs) for name in NAMES), Counter())
    missing = {what: happened[what] for what, n in EVERYTHING.items() if happened[what] < n}
    assert not missing


# Ends


def text_of(step: Taken) -> tuple[Any, ...]:
    return step.action, step.token, step.position, step.regime, step.forwards


def test_end_tokens(runs: dict[str, list[Taken]]) -> None:
    """One that takes another's place ends its row; one that would have been taken back does too."""
    plain, banned = runs["plain"], runs["bans"]

    def first_seen(steps: Sequence[Taken], wanted: Sequence[bool], others: set[int]) -> int:
        """The first step that is wanted and whose token is new to both rows."""
        return next(
            i
            for i, step in enumerate(steps)
            if wanted[i] and step.token not in {*(s.token for s in steps[:i]), *others}
        )

    replaces = [step.action == "backspace" for step in plain]
    at = first_seen(plain, replaces, set())
    taken_back = [step.action == "backspace" for step in banned[1:]] + [False]
    other = first_seen(banned, taken_back, {plain[at].token})
    ends = (plain[at].token, banned[other].token)
    assert ends[0] not in [step.token for step in banned[: other + 1]]
    assert ends[1] not in [step.token for step in plain[: at + 1]]
    found = play(CHAINS[0].params, [job_of(name) for name in NAMES[:BATCH]], ends)
    for name, last in (("plain", at), ("bans", other)):
        steps = found[NAMES.index(name)]
        assert list(map(text_of, steps)) == list(map(text_of, runs[name][: last + 1]))
        assert [step.finish for step in steps] == [RUNNING] * last + [FINISHED_EOS]
        assert not steps[-1].may_backspace


def test_the_last_token_of_a_budget_stays(runs: dict[str, list[Taken]]) -> None:
    """At every budget: the row ends where a longer one first reached its length."""
    whole, job = runs["hot"], job_of("hot")
    jobs = [replace(job, budget=budget) for budget in range(1, 11)]
    would_return = 0
    for shorter, steps in zip(jobs, play(CHAINS[1].params, jobs), strict=True):
        length = len(job.prompt) + shorter.budget
        last = next(i for i, step in enumerate(whole) if len(step.tokens) == length)
        assert list(map(text_of, steps)) == list(map(text_of, whole[: last + 1]))
        assert [step.finish for step in steps] == [RUNNING] * last + [FINISHED_LENGTH]
        assert not steps[-1].may_backspace
        would_return += whole[last + 1].action == "backspace"
    assert would_return >= 3


def test_a_token_that_breaks_the_model_stays(runs: dict[str, list[Taken]]) -> None:
    """Logits that are no numbers end the row; even an arm that takes tokens back leaves it all."""
    retracted = [step.action == "backspace" for step in runs["plain"]].index(True) - 1
    token, kept = runs["plain"][retracted].token, runs["plain"][:retracted]
    assert token % TYPES not in [step.token % TYPES for step in kept]
    broken = CHAINS[0].params.embedding.at[token].set(jnp.nan)
    settings = [{}, {"arms.mid": "backspace"}]
    jobs = [replace(job_of("plain"), sampler=sampler_of(changes)) for changes in settings]
    steps, others = play(replace(CHAINS[0].params, embedding=broken), jobs)[:2]
    assert list(map(text_of, steps[:-1])) == list(map(text_of, runs["plain"][: retracted + 1]))
    for row in (steps, others):
        assert row[-1].finish == FINISHED_ERROR
        assert row[-2].token == token
        assert row[-1].position == row[-2].position + 1


def test_some_token_is_left_to_draw() -> None:
    """Bans never take the last of three tokens, the sampler's own bans included."""
    state = fresh_state(1, 3)
    for banned, attempts, may in ((0, 1, True), (0, 2, False), (1, 0, True), (1, 1, False)):
        changes = {"backspace.per_position": 8, "draw.bans": [*range(banned)]}
        last = replace(state.last, drawn=jnp.ones(1, bool), attempts=jnp.asarray([attempts]))
        settings = batch_of(params_of("entropix", changes))
        allowed = may_backspace(settings, replace(state, last=last), rows_of([0]))
        assert allowed.tolist() == [may], (banned, attempts)


# As a user sees it

RETRACTING = load_sampler("entropix").with_values(
    {
        "thresholds.calibrated": False,
        "regimes.lelv": ["entropy < 0.5"],
        "regimes.helv": ["entropy < -1"],
        "regimes.lehv": ["entropy < -1"],
        "regimes.hehv": ["entropy > 2"],
        "backspace.per_row": 1000,
    }
)
RECORDING = Recording(top=3, layers=True)
TOKENS = 40


@pytest.fixture(scope="module")
def model(folder: str) -> LanguageModel:
    return load(folder)


PROMPT = [token_ids()["<|begin_of_text|>"], 60, 61, 62, 63]


def generation(model: LanguageModel, **options: Any) -> Generation:
    settings = {"ignore_eos": True, "recording": RECORDING, "sampler": RETRACTING, **options}
    return run_specs(model, [Spec(PROMPT, "0", TOKENS)], **settings)


@dataclass
class Run:
    events: list[Event]
    row: Row

    @property
    def retracted(self) -> list[int]:
        """Which events are of tokens that were taken back."""
        return [i for i, event in enumerate(self.events) if event.retracted]


@pytest.fixture(scope="module")
def whole(model: LanguageModel) -> Run:
    one = generation(model)
    return Run(list(one), one.rows[0])


def pushed(model: LanguageModel, tokens: Sequence[int]) -> str:
    """The text that is certain after some tokens."""
    stream = model.tokenizer.stream(after=PROMPT)
    return "".join(stream.push(token) for token in tokens)


def test_a_retracted_token_stands_before_its_replacement(model: LanguageModel, whole: Run) -> None:
    assert len(whole.retracted) == whole.row.retracted == whole.row.to_json()["retracted"] > 20
    committed: list[int] = []
    again = 0
    for event, following in zip(whole.events, [*whole.events[1:], None], strict=True):
        token = event.token
        assert token is not None
        assert token.position == len(PROMPT) + len(committed)
        assert token.top is not None
        said = {text_id: p for text_id, _, p in token.top}
        if token.token_id in said:
            assert np.exp(token.logprob) == pytest.approx(said[token.token_id], rel=1e-4)
        if not event.retracted:
            committed.append(token.token_id)
            continue
        assert following is not None
        assert following.token is not None
        replacement = following.token
        again += following.retracted
        assert replacement.action == "backspace"
        assert replacement.token_id != token.token_id
        assert replacement.forwards == token.forwards + 1
        # Both are of one distribution.
        told = ("token_id", "text", "action", "logprob", "forwards")
        drawn = ("temperature", "top_k", "top_p", "min_p")
        different = (*told, *(drawn if token.action == "argmax" else ()))
        assert without(token, different) == without(replacement, different)
        assert event.pieces == ()
        before = pushed(model, committed)
        assert before + token.text == pushed(model, [*committed, token.token_id])
        assert token.to_json(retracted=True)["type"] == "retracted"
    assert again > 3
    assert committed == [token.token_id for token in whole.row.tokens]
    assert whole.row.to_json()["forwards"] == TOKENS - 1 + whole.row.retracted


def without(token: TokenRecord, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in token.to_json().items() if name not in names}


def test_what_is_shown_stays(model: LanguageModel, whole: Run) -> None:
    """At every event the text is that of the committed tokens, and nothing of it goes again."""
    one = generation(model)
    shown, final = "", [token.token_id for token in whole.row.tokens]
    for event, expected in zip(one, whole.events, strict=True):
        # The row is compared below: here it is still running.
        found = (event.token, event.pieces, event.retracted)
        assert found == (expected.token, expected.pieces, expected.retracted)
        shown += "".join(piece.text for piece in event.pieces)
        tokens = [token.token_id for token in one.rows[0].tokens]
        assert tokens == final[: len(tokens)]
        # The last token's text may end with what a character that was not completed leaves.
        assert shown == (pushed(model, tokens) if len(tokens) < TOKENS else whole.row.text)
    assert shown == whole.row.text == "".join(token.text for token in whole.row.tokens)
    assert whole.row.text == model.tokenizer.stream(after=PROMPT).run(final)


def test_a_retracted_token_ends_no_text(model: LanguageModel, whole: Run) -> None:
    """A stop string that only a token that was taken back would complete."""
    stops = []
    for i in whole.retracted:
        token = whole.events[i].token
        assert token is not None
        before = pushed(
            model, [t.token_id for t in whole.row.tokens if t.position < token.position]
        )
        stops.append(before[-4:] + token.text)
    stops = [stop for stop in stops if stop not in whole.row.text]
    assert len(stops) > 10
    one = generation(model, stop=stops)
    row = one.run()[0]
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
    stop = texts[at - 1] + texts[at]
    one = generation(model, stop=["never", stop])
    shown = "".join(piece.text for event in one for piece in event.pieces)
    row = one.rows[0]
    assert row.tokens == whole.row.tokens[: at + 1]
    assert shown == row.text == "".join(texts[: at - 1])
    assert row.finish_reason == "stop"
    assert row.retracted == sum(
        event.retracted for event in whole.events[: whole.events.index(replaced(whole, at)) + 1]
    )


def replaced(whole: Run, at: int) -> Event:
    """The event of the row's token `at`."""
    return next(event for event in whole.events if event.token is whole.row.tokens[at])
