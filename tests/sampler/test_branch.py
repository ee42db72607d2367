"""Branching: rows that fork, against a plain float64 reading that recomputes every branch; and the
edges of the rules by themselves.

The model is a chain, so that a text's last token is all that the reading needs. Cases that hang on
less than a float32 can tell are left out.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.state import EOS, ERROR, LENGTH, RUNNING
from entropix_jax.names import REGIMES
from entropix_jax.sampler.draw import STREAM_NOISE, STREAM_ROLLOUT, row_key
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.settings import MAX_DEPTH, MAX_WIDTH
from entropix_jax.sampler.state import Step
from tests.support.chains import BOUNDS, CONFIG, TYPES, VOCAB, chain, regime_of
from tests.support.draw_oracles import KeptTokens, uniform_numbers
from tests.support.reference import entropy_bits, log_softmax, varentropy_bits
from tests.support.samplers import (
    BATCH,
    CAPACITY,
    EPSILON,
    FEW,
    LITERAL,
    Job,
    Line,
    attn_stats,
    batch_of,
    fresh_state,
    generate,
    params_of,
    proposal_of,
    with_state,
)
from tests.support.steps import VOCAB as STEP_VOCAB
from tests.support.steps import choose_jit, rows_of
from tests.support.transform_oracles import modified

BROKEN = (7, 8)  # tokens after which no logit is a number
KINDS = np.resize(["lehv", "hehv", "lelv", "lehv", "helv", "hehv", "mid", "lehv"], TYPES)
CHAIN = chain(KINDS.tolist(), seed=3)
WHOLE = CHAIN.params
PARAMS = replace(WHOLE, embedding=WHOLE.embedding.at[jnp.array(BROKEN)].set(jnp.nan))
MODEL = CONFIG, PARAMS
ROWS = 6 * BATCH
CLOSE = 3e-5  # to each other, for two logits, scores or shares of a distribution

PRESET = load_sampler(LITERAL)
# A row branches in LEHV or HEHV, and takes the most likely token elsewhere.
BRANCHING: Mapping[str, Any] = {
    **BOUNDS,
    **{f"arms.{regime}": "argmax" for regime in ("lelv", "helv", "mid", "loop")},
    "arms.hehv": "branch",
    "loop.max_period": 0,
    "branch.max_share": 1e6,
}
EVERYWHERE: Mapping[str, Any] = {
    **BRANCHING,
    **{f"regimes.{box}": ["entropy < -1"] for box in REGIMES[:-1]},
    "regimes.lehv": ["entropy > -1"],
    "branch.width": 4,
    "branch.depth": 6,
    "branch.min_p": 0.0,
    "branch.top_p": 1.0,
}


def check_apart(a: Any, b: Any) -> None:
    """Where it fails, two implementations may decide differently, and both are right."""
    assert np.all(np.abs(np.asarray(a) - np.asarray(b)) >= CLOSE), "too close to tell"


# The reading


@dataclass(frozen=True)
class Case:
    """A row in the middle of its text, and what its sampler is set to."""

    text: Sequence[int]
    remaining: int  # tokens that may still be committed
    values: Mapping[str, Any]  # all of a sampler's settings, by their dotted keys
    eos: frozenset[int] = frozenset()
    generated: int = 0  # so many of the text's last tokens were generated
    row_id: str = "0"

    def after(self, tokens: Sequence[int]) -> "Case":
        count = len(tokens)
        done, left = self.generated + count, self.remaining - count
        return replace(self, text=[*self.text, *tokens], remaining=left, generated=done)

    @property
    def heard(self) -> np.ndarray:
        """The next token's log-probabilities, without those under the noise floor."""
        return CHAIN.heard(self.text[-1], EPSILON if self.values["metrics.noise_floor"] else 0)

    @property
    def regime(self) -> str:
        return regime_of(self.heard)

    @property
    def logits(self) -> np.ndarray:
        """The logits of the next token."""
        return modified(CHAIN.logits(self.text[-1]), self.heard, self.text, self.values)

    def uniforms(self, stream: int, number: int) -> np.ndarray:
        return uniform_numbers(row_key(0, self.row_id), len(self.text), stream, number)


@dataclass
class Outcome:
    """What one step did to a row."""

    committed: list[int]
    branches: list[list[int]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    best: int = 0
    ambiguous: bool = False


def likeliest_first(z: np.ndarray, number: int) -> np.ndarray:
    """Returns all tokens, most likely first. The order of the first `number` matters."""
    order = np.argsort(-z, kind="stable")
    first = z[order[: number + 1]]
    first = first[first > -np.inf]
    check_apart(first[:-1], first[1:])
    return order


def candidates(case: Case, z: np.ndarray) -> list[int]:
    """Returns the first tokens of branches, most likely first."""
    width, temperature, min_p, top_p, noise = (
        case.values[f"branch.{name}"]
        for name in ("width", "temperature", "min_p", "top_p", "noise")
    )
    if noise > 0:
        u = np.maximum(case.uniforms(STREAM_NOISE, z.size), 2.0**-25)
        z = z + noise * -np.log(-np.log(u))
    order = likeliest_first(z, width)
    relative = (z[order] - z[order[0]]) / temperature
    relative = relative[z[order] > -np.inf]
    if min_p > 0:
        check_apart(relative[: width + 1], np.log(min_p))
        relative = relative[relative >= np.log(min_p)]
    number = len(relative)
    if top_p < 1:
        reached = np.cumsum(np.exp(relative)) / np.exp(relative).sum()
        check_apart(reached[:width], top_p)
        number = int((reached < top_p).sum()) + 1
    return order[: min(number, width)].tolist()


def roll_out(case: Case, number: int, token: int) -> tuple[list[int], float]:
    """The tokens and the score of the `number`-th branch, which begins with `token`: the mean of
    log p - alpha h - beta u, h and u of the distribution after each token."""
    values, tokens = case.values, [token]
    temperature = values["branch.rollout_temperature"]
    base = {name: values[f"base.{name}"] for name in ("top_k", "top_p", "min_p")}
    alpha, beta = values["branch.entropy_weight"], values["branch.varentropy_weight"]
    terms, before = [], case
    while True:
        if tokens[-1] in BROKEN:
            return tokens, -np.inf
        here, p = case.after(tokens), log_softmax(CHAIN.logits(before.text[-1]))[tokens[-1]]
        seen = np.exp(here.heard)
        terms.append(p - alpha * entropy_bits(seen) - beta * varentropy_bits(seen))
        ended = tokens[-1] in case.eos or here.remaining == 0
        if ended or len(tokens) == values["branch.depth"] or here.regime not in ("lehv", "hehv"):
            return tokens, float(np.mean(terms))
        if temperature == 0:
            following = int(likeliest_first(here.logits, 1)[0])
        else:
            u = here.uniforms(STREAM_ROLLOUT, MAX_WIDTH)[number : number + 1]
            kept = KeptTokens.of_nucleus(here.logits, proposal_of(temperature, **base))
            (following,) = kept.drawn(u)
        tokens, before = [*tokens, following], here


def step(case: Case) -> Outcome:
    if case.values[f"arms.{case.regime}"] == "argmax":
        return Outcome([int(likeliest_first(case.logits, 1)[0])])
    begun = enumerate(candidates(case, case.logits))
    branches, scores = zip(*(roll_out(case, *one) for one in begun), strict=True)
    best = scores.index(max(scores))  # on a tie the first, which is more likely
    ranked = sorted((s for s in scores if s > -np.inf), reverse=True)
    ambiguous = False
    if len(ranked) > 1:
        check_apart(ranked[0] - ranked[1], [0, case.values["branch.margin"]])
        ambiguous = ranked[0] - ranked[1] < case.values["branch.margin"]
    count = len(branches[best]) if case.values["branch.commit_all"] else 1
    return Outcome(branches[best][:count], [*branches], [*scores], best, ambiguous)


def follow(case: Case) -> list[tuple[Case, Outcome]]:
    """Runs a row to an end token or the end of its budget. Returns the row before each step, and
    the outcome of the step."""
    steps: list[tuple[Case, Outcome]] = []
    while case.remaining > 0 and case.text[-1] not in case.eos:
        outcome = step(case)
        steps.append((case, outcome))
        case = case.after(outcome.committed)
    return steps


# Whole rows


def case_of(text: Sequence[int], changes: Mapping[str, Any], remaining: int, **fields: Any) -> Case:
    return Case([*text], remaining, PRESET.with_values(changes).values, **fields)


def job_of(case: Case) -> Job:
    sampler = params_of(LITERAL, case.values, epsilon=EPSILON)
    return Job(case.text, sampler, budget=case.remaining, row_id=case.row_id)


def random_case(rng: np.random.Generator, number: int, eos: frozenset[int]) -> Case:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    changes: dict[str, Any] = {
        **BRANCHING,
        "arms.hehv": one_of("branch", "branch", "argmax"),
        "branch.width": one_of(1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10),
        "branch.depth": one_of(1, 2, 3, 5, 9, MAX_DEPTH),
        "branch.min_p": one_of(0.0, 0.0, 0.003, 0.1),
        "branch.top_p": one_of(1.0, 1.0, 0.97, 0.8),
        "branch.temperature": one_of(0.4, 1.0, 3.0),
        "branch.noise": one_of(0.0, 0.0, 0.5, 2.0),
        "branch.rollout_temperature": one_of(0.0, 0.0, 0.8, 2.0),
        "branch.entropy_weight": one_of(0.0, 0.1, -0.4, 1.3),
        "branch.varentropy_weight": one_of(0.0, 0.1, -0.4, 1.3),
        "branch.margin": one_of(0.0, 0.3, 3.0),
        "branch.commit_all": one_of(True, True, True, False),
        "base.top_k": one_of(0, 5, 17),
        "base.top_p": one_of(1.0, 0.8),
        "base.min_p": one_of(0.0, 0.03),
        "repetition.penalty": one_of(1.0, 1.0, 1.3, 0.7),
        "metrics.noise_floor": bool(rng.random() < 0.2),
        "draw.bans": rng.choice(VOCAB, one_of(0, 0, 3), replace=False).tolist(),
        "draw.bias": [
            [int(token), one_of(-50.0, -2.0, 2.0, 4.0)]
            for token in rng.choice(VOCAB, one_of(0, 0, 5, 60), replace=False)
        ],
    }
    text = rng.integers(max(BROKEN) + 1, VOCAB, rng.integers(1, CAPACITY // 2))
    most = CAPACITY - len(text)
    remaining = most if rng.random() < 0.2 else int(rng.integers(1, min(most, 16) + 1))
    return case_of(text.tolist(), changes, remaining, row_id=f"row {number}", eos=eos)


def ends_of(batch: int) -> frozenset[int]:
    """The end tokens of a batch, which the model likes."""
    likely = np.argsort(np.exp(CHAIN.table).sum(axis=0))[-40:].tolist()
    return frozenset(likely[4 * batch : 4 * batch + 2])


@functools.cache
def decided_rows() -> list[list[tuple[Case, Outcome]]]:
    """Rows that branch and end without an error, with all their steps."""
    rng = np.random.default_rng(2)
    found: list[list[tuple[Case, Outcome]]] = []
    number = 0
    while len(found) < ROWS:
        number += 1
        try:
            steps = follow(random_case(rng, number, ends_of(len(found) // BATCH)))
        except AssertionError:
            continue
        broken = {*BROKEN} & {token for _, outcome in steps for token in outcome.committed}
        if not broken and any(outcome.branches for _, outcome in steps):
            found.append(steps)
    assert number < 6 * ROWS
    return found


@functools.cache
def lines_of(batch: int) -> list[list[Line]]:
    jobs = [job_of(steps[0][0]) for steps in decided_rows()[batch * BATCH : (batch + 1) * BATCH]]
    return generate(MODEL, jobs, eos_ids=sorted(ends_of(batch)))


@pytest.mark.parametrize("row", range(ROWS))
def test_a_row_equals_the_reading(row: int) -> None:
    steps, lines = decided_rows()[row], lines_of(row // BATCH)[row % BATCH]
    assert len(lines) == len(steps)
    forwards, entropies = 0, []
    for line, (case, outcome) in zip(lines, steps, strict=True):
        action = "branch" if outcome.branches else "argmax"
        assert (line.action, line.position) == (action, len(case.text))
        assert line.tokens == outcome.committed
        ended = LENGTH if len(line.tokens) == case.remaining else RUNNING
        assert line.status == (EOS if line.tokens[-1] in case.eos else ended)
        # The text's last token is read too, which counts where it was generated; twice where a
        # first token is committed by force.
        whole = outcome.branches[outcome.best] if outcome.branches else line.tokens
        evaluated = sum(map(len, outcome.branches))
        forwards += evaluated + (case.generated > 0) * (1 + (len(line.tokens) < len(whole)))
        assert (line.forwards, line.rolled_out) == (forwards, evaluated)
        assert [*line.branches] == outcome.branches
        # Sums of log-probabilities, each with the rounding that is allowed for them.
        np.testing.assert_allclose(line.scores, outcome.scores, rtol=1e-5, atol=1e-4)
        assert (line.best, line.ambiguous) == (outcome.best, outcome.ambiguous)
        for number, (record, token) in enumerate(zip(line.records, line.tokens, strict=True)):
            here, seen = case.after(line.tokens[:number]), record.choice.observation
            assert REGIMES[seen.regime] == here.regime
            logprob = log_softmax(CHAIN.logits(here.text[-1]))[token]
            assert record.choice.logprob == pytest.approx(logprob, abs=1e-4)
            entropies.append(entropy_bits(np.exp(here.heard)))
            assert seen.metrics.entropy == pytest.approx(entropies[-1], abs=1e-4)
            assert seen.sequence_varentropy == pytest.approx(np.var(entropies), abs=1e-3)


def test_the_rows_reach_what_they_should() -> None:
    reached: Counter[str] = Counter()
    for case, outcome in (one for steps in decided_rows() for one in steps):
        if not outcome.branches:
            reached["argmax between"] += 1
            continue
        reached[f"width {len(outcome.branches)}"] += 1
        reached["ambiguous"] += outcome.ambiguous
        reached["not the first"] += outcome.best > 0
        whole = outcome.branches[outcome.best]
        reached["first token alone"] += len(outcome.committed) < len(whole)
        for tokens, score in zip(outcome.branches, outcome.scores, strict=True):
            length, depth = len(tokens), case.values["branch.depth"]
            reached["failed"] += score == -np.inf
            reached["ended"] += tokens[-1] in case.eos and length < depth
            reached["deep"] += length == depth > 8
            reached["budget"] += length == case.remaining < depth
            reached["cache's end"] += length + len(case.text) == CAPACITY
            sure = tokens[-1] not in BROKEN and case.after(tokens).regime not in ("lehv", "hehv")
            reached["inside"] += sure and tokens[-1] not in case.eos
    for what in (
        *(f"width {number}" for number in range(1, MAX_WIDTH + 1)),
        *("ambiguous", "not the first", "first token alone", "failed", "ended", "deep", "budget"),
        *("cache's end", "inside", "argmax between"),
    ):
        assert reached[what] >= 3, (what, reached)


# Failures


def test_a_row_whose_branches_all_fail_ends_where_they_do() -> None:
    """The error names the position after the token that caused it. The other rows continue."""
    one = {**EVERYWHERE, "branch.width": 1}
    cases = [case_of([20 + i, 40 + i], one if i == 0 else EVERYWHERE, 12) for i in range(BATCH)]
    said = generate((CONFIG, WHOLE), [job_of(case) for case in cases])[0][0].tokens
    broken = WHOLE.embedding.at[said[2]].set(jnp.nan)
    assert said[2] not in [*said[:2], *cases[0].text]
    model = CONFIG, replace(WHOLE, embedding=broken)
    (fork, error), *others = generate(model, [job_of(case) for case in cases])
    assert fork.tokens == said[:3]
    assert fork.scores == (-np.inf,)
    assert not fork.ambiguous
    assert (error.status, error.position) == (ERROR, 5)
    assert sum(lines[-1].status == LENGTH for lines in others) > BATCH // 2


def test_a_nan_in_the_prompt_ends_the_row_at_once() -> None:
    """It stays an error, also where the meaningless token is an end token."""
    job = Job([20, BROKEN[0], 30], params_of("greedy"))
    (lines,) = generate(MODEL, [job])
    (again,) = generate(MODEL, [job], eos_ids=(lines[0].token, -1))
    for found in (lines, again):
        assert [(line.position, line.status) for line in found] == [(3, ERROR)]


# Candidates


def candidates_of(logits: np.ndarray, *changes: Mapping[str, Any]) -> Step:
    """A step of rows with the same logits and these settings. No other token has any mass."""
    settings = [params_of(LITERAL, {**EVERYWHERE, **values}) for values in changes]
    batch, rows = len(settings), rows_of(*[range(1, 5)] * len(settings))
    every = np.full((batch, STEP_VOCAB), -1000, np.float32)
    every[:, : len(logits)] = logits
    return choose_jit(every, attn_stats(batch), batch_of(*settings), fresh_state(batch), rows)[1]


def test_without_top_p_the_smallest_tail_counts() -> None:
    """Whose mass is lost where it is added to the first token's."""
    logits = np.array([0, *range(-30, -53, -1)])
    changes: list[dict[str, Any]] = [
        {},
        {"branch.top_p": 0.9999999},
        {"branch.min_p": 1e-20},
        {"branch.width": 3},
    ]
    wide = [{"branch.width": MAX_WIDTH} | values for values in changes]
    assert candidates_of(logits, *wide).width.tolist() == [MAX_WIDTH, 1, MAX_WIDTH, 3]


def test_top_p_is_reached_and_not_passed() -> None:
    """Four equally likely tokens, each an exact quarter of the mass."""
    logits = np.full(24, -60.0)
    logits[[2, 5, 11, 20]] = 1.5
    shares = {0.1: 1, 0.25: 1, 0.26: 2, 0.5: 2, 0.75: 3, 0.76: 4, 0.9999: 4}
    changes = [{"branch.top_p": share, "branch.width": 8} for share in shares]
    assert candidates_of(logits, *changes).width.tolist() == [*shares.values()]


def test_noise_of_one_row_is_nothing_to_another() -> None:
    """Also where a uniform number is as close to 1 as can be, whose Gumbel number would be infinite
    if it rounded to 1: this row's 712th is."""
    logits = np.random.default_rng(0).normal(size=1246).astype(np.float32)
    changes = [{**EVERYWHERE, "branch.noise": x} for x in (0.0, 0.5)]
    cases = [case_of(range(1, 13), values, 9, row_id="41384") for values in changes]
    assert cases[0].uniforms(STREAM_NOISE, 1246)[712] == 1 - 2.0**-24
    rows = replace(rows_of(range(1, 13), range(1, 13)), vocab_size=1246)
    rows = replace(rows, key=jnp.asarray(np.stack([row_key(0, "41384")] * 2)))
    settings = batch_of(*(params_of(LITERAL, values) for values in changes))
    both = jnp.asarray(np.tile(logits, (2, 1)))
    step = choose_jit(both, attn_stats(2), settings, fresh_state(2), rows, parts=FEW)[1]
    for row, case in enumerate(cases):
        expected = candidates(case, logits.astype(float))
        assert step.candidates[row, : step.width[row]].tolist() == expected


@pytest.mark.parametrize(("learnt", "kept"), [(0.0, 3), (-1.0, 2)])
def test_branches_under_mirostat_have_the_state_of_their_row(learnt: float, kept: int) -> None:
    """Each is drawn from 2^mu / ln V tokens of Zipf's law with exponent 1, mu twice the target and
    what the row has learnt, each with its own number; and it learns nothing."""
    changes = {
        **EVERYWHERE,
        "truncation.rule": "mirostat",
        "mirostat.target": 2.0,
        "branch.rollout_temperature": 1.0,
    }
    batch = 48
    rows = rows_of(*[range(1, 5)] * batch)
    rows = replace(rows, branch=jnp.arange(batch, dtype=jnp.int32) % MAX_WIDTH)
    logits = jnp.tile(-jnp.log(jnp.arange(1.0, STEP_VOCAB + 1)), (batch, 1))
    state = fresh_state(batch)
    state = with_state(state, "mirostat", jnp.full(batch, learnt))
    settings = batch_of(*[params_of(LITERAL, changes)] * batch)
    choice, _, after = choose_jit(logits, attn_stats(batch), settings, state, rows)
    assert {*choice.token.tolist()} == {*range(kept)}
    assert (np.asarray(after.tally.states["mirostat"]) == learnt).all()
