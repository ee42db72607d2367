"""Branching, on the embedded model: the compiled step against its plain reference, rows side by
side and alone, and the ends of everything."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny.corpus import write_batch
from tiny.tokenizer import build_tokenizer

import entropix_jax
from entropix_jax.engine.decode import decode, prefill
from entropix_jax.engine.state import (
    FINISHED_EOS,
    FINISHED_ERROR,
    FINISHED_LENGTH,
    RUNNING,
    BranchLog,
    DecodeState,
    Recording,
    StepRecord,
    init_state,
)
from entropix_jax.lab.world.corpus import terminal_ids
from entropix_jax.lab.world.facts import WORLD_SEED, create
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.params import Params
from entropix_jax.names import REGIMES
from entropix_jax.sampler.keys import STREAM_NOISE
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.mechanisms.branch import MAX_WIDTH
from entropix_jax.sampler.presets import load_sampler
from tests.support import reference
from tests.support.reference_branch import (
    Case,
    Outcome,
    Reader,
    Ties,
    follow,
    observe,
    step,
    uniform_numbers,
)
from tests.support.samplers import EPSILON, batch_of, settings_of

Model = tuple[ModelConfig, Params]

CAPACITY = 48
ROWS = 10  # of a batch: more than there are lanes
STEPS = 16  # most steps of a row
ENDS = (1245, 1248, 63)  # the end of a text, the end of a turn, and a question mark

PRESET = load_sampler("entropix")
# A row that branches where the case's own bounds say so, and takes the likeliest token elsewhere.
NOWHERE: Mapping[str, Any] = {
    **{f"regimes.{box}": ["entropy < -1"] for box in REGIMES[:-1]},
    "arms.lelv": "argmax",
    "arms.mid": "argmax",
    "arms.hehv": "branch",
    "loop.max_period": 0,
}
EVERYWHERE: Mapping[str, Any] = {**NOWHERE, "regimes.lehv": ["entropy > -1"]}


@pytest.fixture(scope="module")
def model() -> Model:
    """The embedded model, its output matrix on its own: a token whose embedding is spoilt can
    still be predicted."""
    tiny = entropix_jax.load("tiny")
    return replace(tiny.config, tied_head=False), replace(tiny.params, head=tiny.params.embedding)


@pytest.fixture(scope="module")
def read(model: Model) -> Reader:
    return Reader(*model)


@pytest.fixture(scope="module")
def texts() -> np.ndarray:
    """Texts of the world that the model knows."""
    ids = terminal_ids(build_tokenizer())
    return write_batch(create(WORLD_SEED), ids, Random(5), rows=60, length=CAPACITY)


def case_of(
    text: Sequence[int] | np.ndarray, changes: Mapping[str, Any], remaining: int, **fields: Any
) -> Case:
    return Case(
        text=[int(token) for token in text],
        remaining=remaining,
        values=PRESET.with_values(changes).values,
        epsilon=EPSILON,
        eos=frozenset(ENDS),
        **fields,
    )


# The compiled step


@dataclass
class Ran:
    """What one step did to a batch, on the host; and the state on the device, for the next step."""

    device: DecodeState
    state: DecodeState
    records: StepRecord
    log: BranchLog

    def record(self, row: int) -> StepRecord:
        return jax.tree.map(lambda x: x[0, row], self.records)

    def entry(self, row: int) -> BranchLog:
        """What is logged of a row that branched."""
        index = self.record(row).branch
        assert index >= 0
        return jax.tree.map(lambda x: x[index], replace(self.log, count=self.log.committed))


def started(model: Model, cases: Sequence[Case]) -> DecodeState:
    """The rows with their texts cached, all but the last tokens; as many of them count as generated
    as the cases say."""
    config, params = model
    state = init_state(
        config,
        [case.text for case in cases],
        [case.remaining + case.generated for case in cases],
        np.stack([case.key for case in cases]),
        capacity=CAPACITY,
        dtype=jnp.dtype(jnp.float32),
    )
    number, history = state.prompt_length - 1, jnp.array(state.history)  # the state is donated
    half = CAPACITY // 2
    for first in (0, half):
        tokens, part = history[:, first : first + half], jnp.clip(number - first, 0, half)
        state = prefill(params, state, tokens, part, config=config, window=CAPACITY)
    generated = jnp.asarray([case.generated for case in cases], jnp.int32)
    return replace(state, prompt_length=state.prompt_length - generated)


def proceed(model: Model, cases: Sequence[Case], state: DecodeState) -> Ran:
    """One step more. The state is donated."""
    config, params = model
    (ends,) = {case.eos for case in cases}  # of a call, not of a row
    samplers = [
        settings_of(PRESET.with_values(case.values), num_layers=config.num_layers) for case in cases
    ]
    state, records, log = decode(
        params,
        batch_of(*samplers),
        jnp.asarray([*ends, -1, -1, -1][:3], jnp.int32),
        state,
        jnp.int32(1),
        config=config,
        window=CAPACITY,
        max_steps=1,
        recording=Recording(),
    )
    return Ran(state, *jax.device_get((state, records, log)))


def carry_out(model: Model, cases: Sequence[Case]) -> Ran:
    return carry_on(model, cases, 1)[0]


def carry_on(model: Model, cases: Sequence[Case], steps: int) -> list[Ran]:
    """So many steps of a whole batch (one shape, one program), fewer once all rows have ended."""
    cases = [*cases, *[cases[0]] * (ROWS - len(cases))]
    ran = [proceed(model, cases, started(model, cases))]
    while len(ran) < steps and (ran[-1].state.finish == RUNNING).any():
        ran.append(proceed(model, cases, ran[-1].device))
    return ran


def agrees(case: Case, outcome: Outcome, ran: Ran, row: int) -> None:
    """A step that branched is told as the reference tells it."""
    record, entry = ran.record(row), ran.entry(row)
    branches, number = entry.branches, len(outcome.committed)
    assert record.live
    assert record.position == len(case.text)
    assert ACTIONS[record.choice.proposal.action] == "branch"
    assert REGIMES[record.choice.observation.regime] == outcome.seen.regime

    lengths = [len(branch.tokens) for branch in outcome.branches]
    assert branches.length.tolist() == lengths + [0] * (MAX_WIDTH - len(lengths))
    for i, branch in enumerate(outcome.branches):
        assert branches.tokens[i, : lengths[i]].tolist() == branch.tokens
    scores = [branch.score for branch in outcome.branches]
    # Sums of log-probabilities, each with the rounding that is allowed for them below.
    np.testing.assert_allclose(branches.score[: len(scores)], scores, rtol=2e-6, atol=1e-4)
    assert (branches.score[len(scores) :] == -np.inf).all()
    assert branches.best == outcome.best
    assert branches.ambiguous == outcome.ambiguous

    assert entry.committed == number
    assert record.choice.token == outcome.committed[0]
    assert record.choice.logprob == branches.logprobs[0]
    np.testing.assert_allclose(branches.logprobs[:number], outcome.logprobs, rtol=0, atol=1e-4)
    for depth, seen in enumerate(outcome.observations):
        observation = jax.tree.map(lambda x, depth=depth: x[depth], branches.observation)
        assert REGIMES[observation.regime] == seen.regime
        assert observation.looping == seen.looping
        found = vars(observation.metrics)
        assert found.keys() == seen.metrics.keys()
        for name, value in seen.metrics.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-4, err_msg=name)


def holds(case: Case, outcome: Outcome, ran: Ran, row: int) -> None:
    """A row after its first step is as the reference leaves it."""
    state, tokens = ran.state, outcome.committed
    length = len(case.text) + len(tokens)
    assert state.history[row, :length].tolist() == [*case.text, *tokens]
    assert state.cache.length[row] == length - 1
    assert state.finish[row] == ran.record(row).finish == finish_after(case, tokens)
    # The text's last token was read too, which counts where it was generated.
    forwards = outcome.evaluated + (case.generated > 0)
    assert state.forwards[row] == ran.record(row).forwards == forwards
    assert state.sampler.tally.own["branch"].begun[row] == (outcome.action == "branch")
    assert state.sampler.tally.queued[row] == 0
    assert not state.sampler.last.drawn[row]
    assert not ran.record(row).may_backspace


def finish_after(case: Case, tokens: Sequence[int]) -> int:
    if tokens[-1] in case.eos:
        return FINISHED_EOS
    return FINISHED_LENGTH if len(tokens) == case.remaining else RUNNING


def sequence_varentropies(outcomes: Sequence[Outcome]) -> list[float]:
    """The variance of the entropies so far, after each token that was committed."""
    entropies = [seen.metrics["entropy"] for outcome in outcomes for seen in outcome.observations]
    return [float(np.var(entropies[: i + 1])) for i in range(len(entropies))]


def test_the_reference_reads_as_float64_does(model: Model, texts: np.ndarray, read: Reader) -> None:
    config, params = model
    text = texts[0, :20].tolist()
    logits, attentions = reference.forward(params, config, np.array(text))
    reading = read(text)
    np.testing.assert_allclose(reading.logits, logits[-1], rtol=0, atol=5e-5)
    p = np.exp(reference.log_softmax(logits[-1]))
    expected = {
        "entropy": reference.entropy_bits(p),
        "varentropy": reference.varentropy_bits(p),
        **attentions[-1].metrics(np.ones(config.num_layers)),
    }
    found = observe(reading, case_of(text, NOWHERE, 1), Ties()).metrics
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=2e-5), name


# Whole rows


WANDERING: Mapping[str, Any] = {
    **NOWHERE,
    "regimes.lehv": ["entropy > 0.002"],
    "branch.depth": 5,
    "branch.min_p": 0.02,
    "branch.entropy_weight": -2.0,  # the longer branches
    "branch.rollout_temperature": 1.5,
    "base.top_k": 0,
    "repetition.penalty": 1.2,
    "loop.max_period": 4,
    "loop.repeats": 2,
}


def test_whole_rows_equal_the_reference(model: Model, texts: np.ndarray, read: Reader) -> None:
    """Steps that branch and steps that do not, in a row and across rows."""
    rows: list[list[tuple[Case, Outcome]]] = []
    undecided = 0
    for seed, text in enumerate(texts):
        changes = {**WANDERING, "branch.width": seed % 6 + 1, "branch.commit_all": seed % 4 > 0}
        case = case_of(text[: seed % 9 + 1], changes, STEPS, row_id=f"row {seed}")
        steps = follow(read, case)
        undecided += any(outcome.ties for _, outcome in steps)
        whole = sum(len(outcome.committed) > 1 for _, outcome in steps)
        # Some with first tokens alone, and most with whole branches.
        if not any(outcome.ties for _, outcome in steps) and (whole > 1 or len(rows) < 3):
            rows.append(steps)
        if len(rows) == ROWS:
            break
    assert undecided <= 4
    ran = carry_on(model, [steps[0][0] for steps in rows], STEPS)
    actions: Counter[str] = Counter()
    for row, steps in enumerate(rows):
        forwards, variances = 0, sequence_varentropies([outcome for _, outcome in steps])
        for now, (case, outcome) in zip(ran, steps, strict=False):
            record, number = now.record(row), len(outcome.committed)
            actions[f"{outcome.action} {min(number, 2)}"] += 1
            expected, variances = variances[:number], variances[number:]
            if outcome.action == "branch":
                agrees(case, outcome, now, row)
                found = now.entry(row).sequence_varentropy[:number]
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
            assert record.live
            assert record.position == len(case.text)
            assert ACTIONS[record.choice.proposal.action] == outcome.action
            assert record.choice.token == outcome.committed[0]
            assert float(record.choice.sequence_varentropy) == pytest.approx(expected[0], abs=1e-4)
            forwards += outcome.evaluated + (case.generated > 0)
            assert record.forwards == now.state.forwards[row] == forwards
            assert record.finish == finish_after(case, outcome.committed)
            length = len(case.text) + number
            text = [*case.text, *outcome.committed]
            assert now.state.history[row, :length].tolist() == text
        assert not any(now.record(row).live for now in ran[len(steps) :])
        branchings = sum(outcome.action == "branch" for _, outcome in steps)
        assert ran[-1].state.sampler.tally.own["branch"].begun[row] == branchings
    assert len(ran) == max(map(len, rows))
    assert min(actions["branch 1"], actions["branch 2"], actions["argmax 1"]) > 10, actions


# Ends


def everywhere(text: np.ndarray, remaining: int, **changes: Any) -> Case:
    """A row that is outside everywhere: only ends and the depth end its branches."""
    values = {
        **EVERYWHERE,
        "branch.width": 4,
        "branch.depth": 6,
        "branch.min_p": 0.0,
        "branch.top_p": 1.0,
        **{f"branch.{key}": value for key, value in changes.items()},
    }
    return replace(case_of(text, values, remaining), eos=frozenset())


def decided(read: Reader, case: Case) -> Outcome:
    outcome = step(read, case)
    assert not outcome.ties
    return outcome


def test_the_budget_cuts_the_branch(model: Model, texts: np.ndarray, read: Reader) -> None:
    """At every budget up to the branch's length, and past it."""
    batch = [everywhere(texts[1, :9], remaining) for remaining in range(1, ROWS + 1)]
    ran = carry_out(model, batch)
    for row, case in enumerate(batch):
        outcome = decided(read, case)
        assert len(outcome.committed) == min(row + 1, 6)
        agrees(case, outcome, ran, row)
        holds(case, outcome, ran, row)
    assert ran.state.finish.tolist() == [FINISHED_LENGTH] * 6 + [RUNNING] * 4


@pytest.mark.parametrize("place", [0, 2, 5])
@pytest.mark.parametrize("commit_all", [True, False])
def test_an_end_token_ends_the_branch(
    model: Model, texts: np.ndarray, read: Reader, place: int, commit_all: bool
) -> None:
    """A candidate that is one, one within, and one in the last place. It is the model that ends the
    row, also where the budget does."""
    case = everywhere(texts[1, :9], place + 1, commit_all=commit_all)
    free = decided(read, replace(case, remaining=12))
    chosen = free.branches[free.best].tokens
    assert chosen.index(chosen[place]) == place
    case = replace(case, eos=frozenset([chosen[place]]))
    outcome = decided(read, case)
    ran = carry_out(model, [case])
    agrees(case, outcome, ran, 0)
    holds(case, outcome, ran, 0)
    (ended,) = (branch for branch in outcome.branches if branch.tokens == chosen[: place + 1])
    if outcome.branches.index(ended) == outcome.best and (commit_all or place == 0):
        assert ran.state.finish[0] == FINISHED_EOS


def poisoned(model: Model, token: int) -> Model:
    """The model with an embedding that makes every logit NaN once it is read."""
    config, params = model
    return config, replace(params, embedding=params.embedding.at[token].set(jnp.nan))


def saying_new_things(texts: np.ndarray, read: Reader, depth: int, **changes: Any) -> Case:
    """A row in whose best branch no token stands twice, or in the row before."""
    for text in texts:
        case = everywhere(text[:9], 12, depth=depth, **changes)
        best = decided(read, case).committed
        if len({*best, *case.text}) == len(best) + len(set(case.text)):
            return case
    raise AssertionError


@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_nan_discards_its_branch_and_not_the_row(
    model: Model, texts: np.ndarray, read: Reader, place: int
) -> None:
    """Of the branch that would have been the best, wherever in it."""
    case = saying_new_things(texts, read, 6)
    free = decided(read, case)
    broken = poisoned(model, free.branches[free.best].tokens[place])
    outcome = decided(Reader(*broken), case)
    assert outcome.branches[free.best].failed
    assert not outcome.branches[outcome.best].failed
    ran = carry_out(broken, [case])
    agrees(case, outcome, ran, 0)
    holds(case, outcome, ran, 0)
    assert ran.entry(0).branches.score[free.best] == -np.inf


def test_a_row_whose_branches_all_fail_ends_where_they_do(
    model: Model, texts: np.ndarray, read: Reader
) -> None:
    """The error names the position after the token that caused it; the other rows go on."""
    case = saying_new_things(texts, read, 6, width=1)
    broken = poisoned(model, decided(read, case).committed[2])
    other = everywhere(texts[3, :7], 12)
    expected = decided(Reader(*broken), other)
    first, second = carry_on(broken, [case, *[other] * (ROWS - 1)], 2)
    assert first.entry(0).committed == 3
    assert not np.isfinite(first.entry(0).branches.score).any()
    assert not first.entry(0).branches.ambiguous
    error = second.record(0)
    assert error.finish == FINISHED_ERROR
    assert error.position == len(case.text) + 3
    for row in range(1, ROWS):
        agrees(other, expected, first, row)
        assert second.record(row).live


def test_noise_of_one_row_is_nothing_to_another(
    model: Model, texts: np.ndarray, read: Reader
) -> None:
    """Also where a uniform number is as close to 1 as can be, whose Gumbel number would be infinite
    if it rounded to 1: this row's 712th is."""
    still = everywhere(texts[4, :12], 12, noise=0.0)
    still = replace(still, row_id="41384")
    loud = replace(everywhere(texts[4, :12], 12, noise=0.5), row_id="41384")
    numbers = uniform_numbers(still.key, 12, STREAM_NOISE, model[0].vocab_size)
    assert numbers[712] == 1 - 2.0**-24
    batch = [still, loud] * (ROWS // 2)
    ran = carry_out(model, batch)
    for row, case in enumerate(batch):
        outcome = decided(read, case)
        agrees(case, outcome, ran, row)
        holds(case, outcome, ran, row)
        assert len(outcome.branches) == 4
