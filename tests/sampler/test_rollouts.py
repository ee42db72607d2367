"""The rollouts by themselves, over a model that is a table: what follows a token depends on that
token alone. Against the plain reference, and at the edges of every rule."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.names import REGIMES
from entropix_jax.sampler.mechanisms.branch import MAX_DEPTH, MAX_WIDTH
from entropix_jax.sampler.metrics import apply_noise_floor
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.rollout import Branches, roll_out
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.state import Rows
from entropix_jax.sampler.step import observe
from entropix_jax.stats import AttnStats
from tests.support.reference_branch import Case, Outcome, Reading, step
from tests.support.samplers import (
    EPSILON,
    NUM_HEADS,
    NUM_LAYERS,
    attn_stats,
    batch_of,
    settings_of,
)

VOCAB = 24
SLOTS = 16
BATCH = 48
ENDS = 2  # end tokens of a row

PRESET = load_sampler("entropix")
BRANCHES: Mapping[str, Any] = {
    "thresholds.calibrated": False,
    "regimes.lelv": ["entropy < -1"],
    "regimes.helv": ["entropy < -1"],
    "regimes.lehv": ["entropy > -1"],
    "regimes.hehv": ["entropy < -1"],
    "arms.lelv": "argmax",
    "arms.mid": "argmax",
    "arms.lehv": "branch",
    "arms.hehv": "branch",
    "loop.max_period": 0,
    "branch.min_p": 0.0,
    "branch.top_p": 1.0,
    "branch.temperature": 1.0,
    "branch.width": MAX_WIDTH,
    "branch.depth": 4,
}


def evaluate(tokens: jax.Array, depth: jax.Array, memory: Any) -> tuple[jax.Array, AttnStats, Any]:
    table, seen = memory
    read = tokens.reshape(-1)
    # What each evaluation was given, by its depth.
    return table[read], attn_stats(read.shape[0]), (table, seen.at[depth].set(tokens))


@jax.jit
def rolled(
    table: jax.Array, active: jax.Array, params: SamplerSettings, rows: Rows, eos_ids: jax.Array
) -> tuple[Branches, jax.Array]:
    last = jnp.take_along_axis(rows.history, rows.length[:, None] - 1, axis=1)[:, 0]
    logits, stats = table[last], attn_stats(last.shape[0])
    heard = apply_noise_floor(jax.nn.log_softmax(logits, axis=-1), params.noise_epsilon)
    seen = jnp.zeros((MAX_DEPTH, last.shape[0], MAX_WIDTH), jnp.int32)
    branches, (_, seen) = roll_out(
        logits,
        observe(heard, stats, params, rows),
        logits[:, :2],
        active,
        params,
        rows,
        eos_ids,
        evaluate,
        (table, seen),
        lambda logits, stats: logits[:, :2],
    )
    return branches, seen


def roll(
    table: np.ndarray, cases: Sequence[Case], active: Sequence[bool] | None = None
) -> tuple[Branches, np.ndarray]:
    """The branches of a batch, on the host, and the tokens that were evaluated at each depth."""
    some = [*cases, *[cases[0]] * (BATCH - len(cases))]  # one shape, one program
    history = np.random.default_rng(0).integers(0, VOCAB, (BATCH, SLOTS))  # junk past each row
    ends = np.full((BATCH, ENDS), -1)
    for row, case in enumerate(some):
        history[row, : len(case.text)] = case.text
        ends[row, : len(case.eos)] = sorted(case.eos)
    rows = Rows(
        running=jnp.ones(BATCH, bool),
        keys=jnp.asarray(np.stack([case.key for case in some])),
        history=jnp.asarray(history, jnp.int32),
        length=jnp.asarray([len(case.text) for case in some], jnp.int32),
        generated=jnp.asarray([case.generated for case in some], jnp.int32),
        remaining=jnp.asarray([case.remaining for case in some], jnp.int32),
        asks=jnp.zeros(BATCH, bool),
    )
    branches, seen = rolled(
        jnp.asarray(table, jnp.float32),
        jnp.asarray([*(active or []), *[True] * (BATCH - len(active or []))]),
        batch_of(*(settings_of(PRESET.with_values(case.values)) for case in some)),
        rows,
        jnp.asarray(ends, jnp.int32),
    )
    return jax.device_get((branches, seen))


def case_of(changes: Mapping[str, Any], text: Sequence[int] = (1, 2, 0), **fields: Any) -> Case:
    given: dict[str, Any] = {"generated": 0, "eos": frozenset(), "remaining": 9, **fields}
    return Case(
        text=[*text],
        values=PRESET.with_values({**BRANCHES, **changes}).values,
        epsilon=EPSILON,
        **given,
    )


@dataclass
class Reader:
    """The same model for the reference."""

    table: np.ndarray

    def __call__(self, text: Sequence[int]) -> Reading:
        return Reading(
            logits=self.table[text[-1]].astype(np.float64),
            entropy=np.ones((NUM_LAYERS, NUM_HEADS)),
            divergence=np.zeros(NUM_LAYERS),
            interaction=np.ones(NUM_LAYERS),
            keys=16,
        )


# Against the reference


BREAKING = (VOCAB - 1, VOCAB - 2)  # tokens after which some logit is not a number, or infinite


def make_table(rng: np.random.Generator) -> np.ndarray:
    """Rows from flat to sharp, and two that break."""
    table = rng.normal(size=(VOCAB, VOCAB)) * rng.uniform(0.3, 4, size=(VOCAB, 1))
    table[BREAKING[0], 3] = np.nan
    table[BREAKING[1], 5] = -np.inf
    return table.astype(np.float32)


def make_case(rng: np.random.Generator, number: int) -> Case:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    changes: dict[str, Any] = {
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
        "base.top_k": one_of(0, 5, 17),
        "base.top_p": one_of(1.0, 0.8),
        "base.min_p": one_of(0.0, 0.03),
        "repetition.penalty": one_of(1.0, 1.0, 1.3, 0.7),
        "metrics.noise_floor": bool(rng.random() < 0.2),
        "loop.max_period": one_of(0, 1, 4),
        "loop.repeats": one_of(2, 3),
        "draw.bans": rng.choice(VOCAB, one_of(0, 0, 3), replace=False).tolist(),
        "regimes.lehv": one_of(["entropy > -1"], ["entropy > 1.3"], ["varentropy > 1.1"]),
        "regimes.hehv": one_of(["entropy < -1"], ["entropy < 1.7"]),
    }
    length = int(rng.integers(1, SLOTS + 1))
    text = rng.integers(0, min(BREAKING), length)
    if rng.random() < 0.3:
        text[:] = text[-1]
    return case_of(
        changes,
        text.tolist(),
        generated=int(rng.integers(0, length)),
        eos=frozenset(rng.choice(VOCAB, rng.integers(0, ENDS + 1), replace=False).tolist()),
        seed=int(rng.integers(9)),
        row_id=f"row {number}",
    )


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return make_table(np.random.default_rng(1))


@pytest.fixture(scope="module")
def decided(table: np.ndarray) -> list[tuple[Case, Outcome]]:
    """Cases that branch, and do not hang on a hair."""
    rng = np.random.default_rng(2)
    found: list[tuple[Case, Outcome]] = []
    number = 0
    while len(found) < 3 * BATCH:
        number += 1
        case = make_case(rng, number)
        reader: Any = Reader(table)
        outcome = step(reader, case)
        if outcome.action == "branch" and not outcome.ties:
            found.append((case, outcome))
    assert number < 5 * BATCH
    return found


def test_the_cases_reach_what_they_should(decided: Sequence[tuple[Case, Outcome]]) -> None:
    reached: Counter[str] = Counter()
    for case, outcome in decided:
        reached[f"width {len(outcome.branches)}"] += 1
        reached["ambiguous"] += outcome.ambiguous
        reached["not the first"] += outcome.best > 0
        for branch in outcome.branches:
            length, last = len(branch.tokens), branch.tokens[-1]
            reached["failed"] += branch.failed
            reached["ended"] += last in case.eos and length < case.values["branch.depth"]
            reached["deep"] += length == case.values["branch.depth"] > 8
            inside = not branch.failed and branch.after[-1].regime not in ("lehv", "hehv")
            reached["inside"] += inside and last not in case.eos
            reached["hehv"] += any(seen.regime == "hehv" for seen in branch.after)
            loops = [seen.looping for seen in (outcome.seen, *branch.after)]
            reached["a loop begins"] += not loops[0] and any(loops)
            reached["a loop ends"] += loops[0] and not all(loops)
    for what in (
        *(f"width {number}" for number in range(1, MAX_WIDTH + 1)),
        *("ambiguous", "not the first", "failed", "ended", "deep", "inside", "hehv"),
        *("a loop begins", "a loop ends"),
    ):
        assert reached[what] >= 3, (what, reached)


@pytest.mark.parametrize("number", range(3))
def test_random_rows_against_the_reference(
    table: np.ndarray, decided: Sequence[tuple[Case, Outcome]], number: int
) -> None:
    batch = decided[number * BATCH : (number + 1) * BATCH]
    branches, seen = roll(table, [case for case, _ in batch])
    for row, (_, outcome) in enumerate(batch):
        lengths = [len(branch.tokens) for branch in outcome.branches]
        assert branches.length[row].tolist() == lengths + [0] * (MAX_WIDTH - len(lengths))
        for i, branch in enumerate(outcome.branches):
            assert branches.tokens[row, i, : lengths[i]].tolist() == branch.tokens
            assert seen[: lengths[i], row, i].tolist() == branch.tokens
        scores = [branch.score for branch in outcome.branches]
        np.testing.assert_allclose(branches.score[row, : len(scores)], scores, rtol=1e-5, atol=1e-5)
        assert (branches.score[row, len(scores) :] == -np.inf).all()
        assert branches.best[row] == outcome.best
        assert branches.ambiguous[row] == outcome.ambiguous
        best = outcome.branches[outcome.best]
        got = branches.logprobs[row, : len(best.tokens)]
        np.testing.assert_allclose(got, best.logprobs, rtol=1e-5, atol=1e-5)
        for depth, before in enumerate(best.before):
            at = (row, depth)
            assert REGIMES[branches.observation.regime[at]] == before.regime
            assert branches.observation.looping[at] == before.looping
            for name, value in before.metrics.items():
                metric = getattr(branches.observation.metrics, name)[at]
                np.testing.assert_allclose(metric, value, rtol=1e-4, atol=1e-4, err_msg=name)
            read = best.tokens[depth - 1] if depth else batch[row][0].text[-1]
            assert branches.notes[at].tolist() == table[read, :2].tolist()


# Edges


def widths(table: np.ndarray, cases: Sequence[Case]) -> list[int]:
    """How many branches each row has."""
    return [int(np.sum(length > 0)) for length in roll(table, cases)[0].length[: len(cases)]]


def test_without_top_p_the_smallest_tail_counts() -> None:
    """Whose mass is lost where it is added to the first token's."""
    table = np.tile(np.array([0, *range(-30, -29 - VOCAB, -1)], np.float32), (VOCAB, 1))
    cases = [
        case_of({}),
        case_of({"branch.top_p": 0.9999999}),
        case_of({"branch.min_p": 1e-20}),
        case_of({"branch.width": 3}),
    ]
    assert widths(table, cases) == [MAX_WIDTH, 1, MAX_WIDTH, 3]


def test_top_p_is_reached_and_not_passed() -> None:
    """Four equally likely tokens, each an exact quarter of the mass."""
    table = np.full((VOCAB, VOCAB), -np.inf, np.float32)
    table[:, [2, 5, 11, 20]] = 1.5
    shares = {0.1: 1, 0.25: 1, 0.26: 2, 0.5: 2, 0.75: 3, 0.76: 4, 1.0: 4}
    cases = [case_of({"branch.top_p": share}) for share in shares]
    assert widths(table, cases) == [*shares.values()]


def test_rows_that_do_not_branch_have_no_branches(table: np.ndarray) -> None:
    cases = [case_of({"branch.width": 2}, text=[row]) for row in range(4)]
    branches, _ = roll(table, cases, [True, False, True, False])
    assert (branches.length[:4] > 0).sum(axis=1).tolist() == [2, 0, 2, 0]
    assert (branches.score[[1, 3]] == -np.inf).all()
    assert not branches.ambiguous[[1, 3]].any()


def test_one_branch_is_never_ambiguous(table: np.ndarray) -> None:
    """Nor are two of which one failed: there is nothing to choose between."""
    table = table.copy()
    table[0] = -20.0
    table[0, [4, BREAKING[0]]] = 2.0, 1.0
    cases = [
        case_of({"branch.width": 1, "branch.margin": 1e6}),
        case_of({"branch.width": 2, "branch.margin": 1e6}),
        case_of({"branch.width": 3, "branch.margin": 1e6}),
    ]
    branches, _ = roll(table, cases)
    assert branches.ambiguous[:3].tolist() == [False, False, True]
    assert branches.best[:3].tolist() == [0, 0, 0]
    assert branches.score[1, 1] == -np.inf
    assert branches.length[1, 1] == 1


def test_rollouts_under_mirostat_are_surprised_as_a_text_is_that_begins() -> None:
    """Each is drawn with mu at twice the target: from 2^(2 tau) / ln V tokens of Zipf's law with
    exponent 1, that is 5.03; and not the likeliest alone, as each branch's own number says."""
    table = np.tile(np.float32(-np.log(np.arange(1, VOCAB + 1))), (VOCAB, 1))
    changes = {
        "truncation.rule": "mirostat",
        "truncation.mirostat_target": 2.0,
        "branch.depth": 5,
        "branch.rollout_temperature": 1.0,
    }
    cases = [case_of(changes, row_id=str(row)) for row in range(BATCH)]
    branches, _ = roll(table, cases)
    drawn = branches.tokens[:, :, 1:5]
    assert {*drawn.ravel().tolist()} == {*range(5)}
