"""Branching: rows that fork, against a plain reference that recomputes every text from its first
token on, in float64; and the edges of the rules by themselves."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.state import FINISHED_EOS, FINISHED_ERROR, FINISHED_LENGTH, RUNNING
from entropix_jax.names import REGIMES
from entropix_jax.sampler.keys import STREAM_NOISE
from entropix_jax.sampler.mechanisms.branch import MAX_DEPTH, MAX_WIDTH
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.state import Step
from tests.support.reference_branch import (
    Case,
    Outcome,
    Reader,
    Ties,
    candidates,
    follow,
    observe,
    uniform_numbers,
)
from tests.support.samplers import (
    BATCH,
    CAPACITY,
    EPSILON,
    LITERAL,
    Job,
    Line,
    attn_stats,
    batch_of,
    fresh_state,
    generate,
    params_of,
    tiny_model,
    with_own,
)
from tests.support.steps import choose_jit, rows_of

CONFIG, RANDOM = tiny_model()
BROKEN = (7, 8)  # tokens after which no logit is a number
PARAMS = replace(RANDOM, embedding=RANDOM.embedding.at[jnp.array(BROKEN)].set(jnp.nan))
MODEL = CONFIG, PARAMS
ROWS = 6 * BATCH

PRESET = load_sampler(LITERAL)
# A row branches where the case's own bounds say so, and takes the likeliest token elsewhere.
NOWHERE: Mapping[str, Any] = {
    **{f"regimes.{box}": ["entropy < -1"] for box in REGIMES[:-1]},
    "arms.lelv": "argmax",
    "arms.mid": "argmax",
    "arms.hehv": "branch",
    "arms.loop": "argmax",
    "loop.max_period": 0,
    "branch.max_share": 1e6,
}
EVERYWHERE: Mapping[str, Any] = {
    **NOWHERE,
    "regimes.lehv": ["entropy > -1"],
    "branch.width": 4,
    "branch.depth": 6,
    "branch.min_p": 0.0,
    "branch.top_p": 1.0,
}


@pytest.fixture(scope="module")
def read() -> Reader:
    return Reader(CONFIG, PARAMS)


def case_of(text: Sequence[int], changes: Mapping[str, Any], remaining: int, **fields: Any) -> Case:
    given: dict[str, Any] = {"eos": frozenset(), "row_id": "0", **fields}
    values = PRESET.with_values(changes).values
    return Case(text=[*text], remaining=remaining, values=values, epsilon=EPSILON, **given)


def job_of(case: Case) -> Job:
    sampler = params_of(LITERAL, case.values, epsilon=EPSILON)
    return Job(case.text, sampler, budget=case.remaining, seed=case.seed, row_id=case.row_id)


# Whole rows


def random_case(rng: np.random.Generator, number: int) -> Case:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    changes: dict[str, Any] = {
        **NOWHERE,
        "branch.width": one_of(1, 2, 3, 4, 5, 6, 7, 8, 8),
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
        "loop.max_period": one_of(0, 1, 4),
        "loop.repeats": one_of(2, 3),
        "arms.loop": one_of("argmax", "branch"),
        "draw.bans": rng.choice(CONFIG.vocab_size, one_of(0, 0, 3), replace=False).tolist(),
        "draw.bias": [
            [int(token), one_of(-50.0, -2.0, 2.0, 4.0)]
            for token in rng.choice(CONFIG.vocab_size, one_of(0, 0, 5, 60), replace=False)
        ],
        "regimes.lehv": one_of(["entropy > -1"], ["entropy > 1.3"], ["varentropy > 2"]),
        "regimes.hehv": one_of(["entropy < -1"], ["entropy < 1"]),
    }
    text = rng.integers(max(BROKEN) + 1, CONFIG.vocab_size, rng.integers(1, CAPACITY // 2))
    most = CAPACITY - len(text)
    remaining = most if rng.random() < 0.2 else int(rng.integers(1, min(most, 16) + 1))
    return case_of(text.tolist(), changes, remaining, seed=number % 9, row_id=f"row {number}")


@functools.cache
def decided_rows() -> list[tuple[Case, list[tuple[Case, Outcome]]]]:
    """Rows that branch, and do not hang on a hair, with all their steps. Those of one batch have
    the same end tokens, which the model likes."""
    read, rng = Reader(CONFIG, PARAMS), np.random.default_rng(2)
    found: list[tuple[Case, list[tuple[Case, Outcome]]]] = []
    number = 0
    while len(found) < ROWS:
        number += 1
        case = replace(random_case(rng, number), eos=ends_of(len(found) // BATCH))
        try:
            steps = follow(read, case)
        except FloatingPointError:  # the row ends with an error, which another test shows
            continue
        branched = any(outcome.action == "branch" for _, outcome in steps)
        if branched and not any(outcome.ties for _, outcome in steps):
            found.append((case, steps))
    assert number < 4 * ROWS
    return found


def ends_of(batch: int) -> frozenset[int]:
    likely = np.argsort(np.asarray(RANDOM.head).std(axis=1))[-40:].tolist()
    return frozenset(likely[4 * batch : 4 * batch + 2])


@functools.cache
def lines_of(batch: int) -> list[list[Line]]:
    cases = [case for case, _ in decided_rows()[batch * BATCH : (batch + 1) * BATCH]]
    return generate(MODEL, [job_of(case) for case in cases], eos_ids=sorted(ends_of(batch)))


@pytest.mark.parametrize("row", range(ROWS))
def test_a_row_equals_the_reference(row: int) -> None:
    _, steps = decided_rows()[row]
    lines = lines_of(row // BATCH)[row % BATCH]
    assert len(lines) == len(steps)
    forwards, entropies = 0, []
    for line, (case, outcome) in zip(lines, steps, strict=True):
        assert (line.action, line.position) == (outcome.action, len(case.text))
        assert line.tokens == outcome.committed
        assert line.finish == finish_after(case, outcome.committed)
        # The text's last token is read too, which counts where it was generated; twice where a
        # first token is committed by force.
        again = outcome.action == "branch" and len(outcome.committed) < len(
            outcome.branches[outcome.best].tokens
        )
        forwards += outcome.evaluated + (case.generated > 0) * (1 + again)
        assert line.forwards == forwards
        if outcome.action == "branch":
            agrees(line, outcome)
        for record, logprob, seen in zip(
            line.records, outcome.logprobs, outcome.observations, strict=True
        ):
            observation = record.choice.observation
            assert REGIMES[observation.regime] == seen.regime
            assert (observation.rounds > 0) == seen.looping
            assert record.choice.logprob == pytest.approx(logprob, abs=1e-4)
            for name, value in seen.metrics.items():
                assert getattr(observation.metrics, name) == pytest.approx(value, abs=1e-4), name
            entropies.append(seen.metrics["entropy"])
            spread = pytest.approx(float(np.var(entropies)), abs=1e-3)
            assert record.choice.observation.sequence_varentropy == spread


def agrees(line: Line, outcome: Outcome) -> None:
    """A fork is told as the reference tells it."""
    assert [*line.branches] == [branch.tokens for branch in outcome.branches]
    # Sums of log-probabilities, each with the rounding that is allowed for them.
    scores = [branch.score for branch in outcome.branches]
    np.testing.assert_allclose(line.scores, scores, rtol=1e-5, atol=1e-4)
    assert (line.best, line.ambiguous) == (outcome.best, outcome.ambiguous)
    assert line.rolled_out == outcome.evaluated


def finish_after(case: Case, tokens: Sequence[int]) -> int:
    if tokens[-1] in case.eos:
        return FINISHED_EOS
    return FINISHED_LENGTH if len(tokens) == case.remaining else RUNNING


def test_the_rows_reach_what_they_should() -> None:
    reached: Counter[str] = Counter()
    for _, steps in decided_rows():
        for case, outcome in steps:
            if outcome.action != "branch":
                reached["argmax between"] += 1
                continue
            reached[f"width {len(outcome.branches)}"] += 1
            reached["ambiguous"] += outcome.ambiguous
            reached["not the first"] += outcome.best > 0
            whole = len(outcome.branches[outcome.best].tokens)
            reached["first token alone"] += len(outcome.committed) < whole
            for branch in outcome.branches:
                length, last = len(branch.tokens), branch.tokens[-1]
                reached["failed"] += branch.failed
                reached["ended"] += last in case.eos and length < case.values["branch.depth"]
                reached["deep"] += length == case.values["branch.depth"] > 8
                reached["budget"] += length == case.remaining < case.values["branch.depth"]
                reached["cache's end"] += length + len(case.text) == CAPACITY
                inside = not branch.failed and branch.after[-1].regime not in ("lehv", "hehv")
                reached["inside"] += inside and last not in case.eos
                reached["hehv"] += any(seen.regime == "hehv" for seen in branch.after)
                loops = [seen.looping for seen in (outcome.seen, *branch.after)]
                reached["a loop begins"] += not loops[0] and any(loops)
    for what in (
        *(f"width {number}" for number in range(1, MAX_WIDTH + 1)),
        *("ambiguous", "not the first", "first token alone", "failed", "ended", "deep", "budget"),
        *("cache's end", "inside", "hehv", "a loop begins", "argmax between"),
    ):
        assert reached[what] >= 3, (what, reached)


def test_the_reference_reads_as_float64_does(read: Reader) -> None:
    from tests.support import reference

    text = [*range(20, 40)]
    logits, attentions = reference.forward(PARAMS, CONFIG, np.array(text))
    reading = read(text)
    np.testing.assert_allclose(reading.logits, logits[-1], rtol=0, atol=5e-5)
    p = np.exp(reference.log_softmax(logits[-1]))
    expected = {
        "entropy": reference.entropy_bits(p),
        "varentropy": reference.varentropy_bits(p),
        **attentions[-1].metrics(np.ones(CONFIG.num_layers)),
    }
    found = observe(reading, case_of(text, NOWHERE, 1), Ties()).metrics
    assert found == pytest.approx(expected, abs=5e-5)


# Failures and budgets


def test_a_row_whose_branches_all_fail_ends_where_they_do() -> None:
    """The error names the position after the token that caused it; the other rows go on."""
    one = {**EVERYWHERE, "branch.width": 1}
    cases = [case_of([20 + i, 40], one if i == 0 else EVERYWHERE, 12) for i in range(BATCH)]
    healthy = generate((CONFIG, RANDOM), [job_of(case) for case in cases])
    said = healthy[0][0].tokens
    broken = RANDOM.embedding.at[said[2]].set(jnp.nan)
    assert said[2] not in [*said[:2], *cases[0].text]
    model = CONFIG, replace(RANDOM, embedding=broken)
    fork, error = generate(model, [job_of(case) for case in cases])[0]
    assert fork.tokens == said[:3]
    assert fork.scores == (-np.inf,)
    assert not fork.ambiguous
    assert (error.finish, error.position) == (FINISHED_ERROR, 5)
    others = generate(model, [job_of(case) for case in cases])[1:]
    assert sum(lines[-1].finish == FINISHED_LENGTH for lines in others) > BATCH // 2


@pytest.mark.parametrize("share", [0.0, 0.5, 3.0])
def test_forks_cost_no_more_than_their_share(share: float) -> None:
    """A row forks while its branches' forwards are at most so many times its tokens."""
    cases = [case_of([20 + i], {**EVERYWHERE, "branch.max_share": share}, 40) for i in range(BATCH)]
    for lines in generate((CONFIG, RANDOM), [job_of(case) for case in cases]):
        spent = generated = 0
        for line in lines:
            affordable = spent <= share * generated
            assert line.action == ("branch" if affordable else "explore")
            spent += line.rolled_out
            generated += len(line.tokens)


# Candidates


def candidates_of(logits: np.ndarray, *changes: Mapping[str, Any]) -> Step:
    """A step of rows with the same logits and these settings."""
    settings = [params_of(LITERAL, {**EVERYWHERE, **values}) for values in changes]
    batch, vocab = len(settings), len(logits)
    rows = replace(rows_of(*[range(1, 5)] * batch), vocab_size=vocab)
    all_logits = jnp.asarray(np.tile(np.float32(logits), (batch, 1)))
    step: Step = choose_jit(
        all_logits, attn_stats(batch), batch_of(*settings), fresh_state(batch), rows
    )[1]
    return step


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
    logits = np.random.default_rng(0).normal(size=1246)
    settings = [params_of(LITERAL, {**EVERYWHERE, "branch.noise": x}) for x in (0.0, 0.5)]
    cases = [case_of(range(1, 13), {**EVERYWHERE, "branch.noise": x}, 9) for x in (0.0, 0.5)]
    cases = [replace(case, row_id="41384") for case in cases]
    assert uniform_numbers(cases[0].key, 12, STREAM_NOISE, 1246)[712] == 1 - 2.0**-24
    rows = replace(rows_of(range(1, 13), range(1, 13)), vocab_size=1246)
    rows = replace(rows, keys=jnp.asarray(np.stack([case.key for case in cases])))
    both = jnp.asarray(np.tile(np.float32(logits), (2, 1)))
    step = choose_jit(both, attn_stats(2), batch_of(*settings), fresh_state(2), rows)[1]
    for row, case in enumerate(cases):
        reading: Any = type("Reading", (), {"logits": logits.astype(np.float32).astype(float)})
        seen: Any = type("Seen", (), {"heard": np.zeros(1246)})
        expected = candidates(reading, seen, case, Ties())
        assert step.candidates[row, : step.width[row]].tolist() == expected


def test_branches_under_mirostat_are_surprised_as_a_text_is_that_begins() -> None:
    """Each is drawn with mu at twice the target: from 2^(2 tau) / ln V tokens of Zipf's law with
    exponent 1, that is 5.03; and not the likeliest alone, as each branch's own number says."""
    changes = {
        **EVERYWHERE,
        "truncation.rule": "mirostat",
        "mirostat.target": 2.0,
        "branch.rollout_temperature": 1.0,
    }
    batch, vocab = 48, 24
    rows = replace(rows_of(*[range(1, 5)] * batch), vocab_size=vocab)
    rows = replace(rows, branch=jnp.arange(batch, dtype=jnp.int32) % MAX_WIDTH)
    logits = jnp.tile(-jnp.log(jnp.arange(1.0, vocab + 1)), (batch, 1))
    state = fresh_state(batch)
    learnt = with_own(state, "mirostat", learnt=jnp.full(batch, -3.0))
    settings = batch_of(*[params_of(LITERAL, changes)] * batch)
    choice, _, after = choose_jit(logits, attn_stats(batch), settings, learnt, rows)
    assert {*choice.token.tolist()} == {*range(5)}
    assert (np.asarray(after.tally.own["mirostat"].learnt) == -3.0).all()
    jax.block_until_ready(after)
