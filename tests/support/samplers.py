"""Shared helpers of sampler tests: settings, metrics, proposals, and a tiny random model."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.decode import decode
from entropix_jax.engine.prefill import prefill
from entropix_jax.engine.state import BRANCH_ENDED, FORKS, RUNNING, DecodeState, Program, StepRecord
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.params import Params
from entropix_jax.names import REGIMES
from entropix_jax.sampler.calibration import KNOTS, LEVELS, PERCENTS, Calibration
from entropix_jax.sampler.context import Context, as_configured
from entropix_jax.sampler.draw import row_key
from entropix_jax.sampler.keys import Key, keys
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import Parts, SamplerSettings
from entropix_jax.sampler.state import (
    MAX_ATTEMPTS,
    Observation,
    Proposal,
    SamplerState,
    init_sampler_state,
)
from entropix_jax.stats import AttnStats
from tests.support.models import random_params, tiny_config, uncached

# A sampler file with the documents' numbers as thresholds, and another arm in each regime.
LITERAL = str(Path(__file__).with_name("literal.toml"))
NAMES = [m.name for m in MECHANISMS]
ARMS = [m.name for m in MECHANISMS if m.propose is not None]
RULES = [m.name for m in MECHANISMS if m.rule is not None]
# All parts of a compiled step, so that one program serves all tests.
PARTS = Parts(MECHANISMS, frozenset(NAMES))
# Without rules, penalties, phrases and forced texts, a step compiles in half the time.
FEW = Parts(MECHANISMS, frozenset({*ARMS, "dry", "wrong"}))
# The mechanisms of `LITERAL`, `min-p`, `greedy` and `mirostat`. Requests that have them as `others`
# share one program, whatever their sampler.
SHARED = frozenset(
    {"adaptive", "argmax", "backspace", "branch", "inject", "mirostat", "resample", "sample"}
)
BATCH = 10  # rows
LANES = 9  # enough for the widest fork, but not for all forks at once
CAPACITY = 64  # positions of a row
NUM_LAYERS = 2
NUM_HEADS = 4
# With these settings, rows of `tiny` sample, inject with a cooldown, retract, and branch.
EVERYTHING: dict[str, Any] = {
    "thresholds.h1": 0.2,
    "thresholds.h2": 0.6,
    "regimes.lelv": ["entropy < h1"],
    "regimes.helv": ["entropy > h1", "entropy < h2"],
    "regimes.lehv": ["entropy > h2", "entropy < 2.0"],
    "regimes.hehv": ["entropy > 2.0"],
    "arms.helv": "inject",
    "arms.lehv": "branch",
    "arms.hehv": "backspace",
    "base.temperature": 3.0,
    "base.min_p": 0.0,
    "base.top_p": 1.0,
    "base.top_k": 0,
    "inject.thought": [" and then", "."],
    "inject.cooldown": 3,
    "branch.width": 3,
    "branch.depth": 4,
    "branch.max_share": 1000.0,
    "backspace.reach": 4,
    "backspace.per_row": 1000,
}
VOCAB_SIZE = 1000  # of contexts
EPSILON = 2.0**-7


# All boxes are empty, so that every step is MID, which samples.
PLAIN: Mapping[str, Any] = {
    **{f"regimes.{box}": ["entropy < -1"] for box in REGIMES[:-1]},
    "arms.mid": "sample",
    "loop.max_period": 0,
}


def encode(text: str) -> list[int]:
    """Encodes a text as its bytes."""
    return list(text.encode())


def token_texts() -> list[str]:
    """Returns the text of each byte token."""
    return [chr(i) if i < 128 else "\ufffd" for i in range(256)]


# The properties of a model that a sampler needs.
HOST: Mapping[str, Any] = {
    "num_layers": NUM_LAYERS,
    "epsilon": EPSILON,
    "encode": encode,
    "token_texts": token_texts,
    "vocab_size": VOCAB_SIZE,
}


def scalars() -> dict[str, Key]:
    """Returns the keys of numbers and flags."""
    return {name: key for name, key in keys().items() if key.kind is not None}


def calibration_of(
    entropy: Mapping[float, float], varentropy: Mapping[float, float]
) -> Calibration:
    """Returns quantile tables through these points, from percent to value."""
    points = {"entropy": entropy, "varentropy": varentropy}
    points |= {"attn_entropy_norm": {0: 0.0, 50: 0.44, 100: 1.0}}
    points |= {"agreement": {0: 0.0, 50: 0.65, 100: 1.0}}
    tables = {
        name: np.interp(PERCENTS, [*given], [*given.values()]) for name, given in points.items()
    }
    levels = np.linspace(0, 1, len(LEVELS))
    knots = np.linspace(0, 10, KNOTS)
    spread, share = (1 + knots)[:, None] * levels, 0.9 * levels**2 + 0 * knots[:, None]
    given = {"entropy": knots, "varentropy": spread, "max_prob": share}
    return Calibration(tables, "made up", 1000, {}, given)


LITERAL_THRESHOLDS = np.array([0.3, 2.5, 1.2, 2.5])
# At 30%, 70%, 40% and 60%, these tables have the thresholds of `LITERAL`.
CALIBRATION = calibration_of({0: 0, 30: 0.3, 70: 2.5, 100: 10}, {0: 0, 40: 1.2, 60: 2.5, 100: 25})


def settings_of(sampler: Sampler, **options: Any) -> SamplerSettings:
    """Returns the settings of one row."""
    options = {**HOST, **options}
    if sampler.calibration is None:
        sampler = sampler.resolve(CALIBRATION)
    return sampler.settings(**options)


def used_of(sampler: Sampler) -> frozenset[str]:
    """Returns the mechanisms in the step of a sampler, see `Parts.used`."""
    sampler = sampler.resolve(CALIBRATION)
    return sampler.parts(sampler.settings(**HOST)).used


def params_of(
    preset: str, changes: Mapping[str, Any] | None = None, **options: Any
) -> SamplerSettings:
    """Returns the settings of one row, from a preset with changes."""
    return settings_of(load_sampler(preset).with_values(changes or {}), **options)


def batch_of(*rows: SamplerSettings) -> SamplerSettings:
    """Stacks the settings of rows."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def metrics_of(**values: Any) -> Metrics:
    """Returns metrics of one row, or of many from equally long lists. Missing ones are 0."""
    names = [*Metrics.__dataclass_fields__]
    columns = np.broadcast_arrays(*(values.get(name, 0.0) for name in names))
    return Metrics(**{n: jnp.asarray(x, jnp.float32) for n, x in zip(names, columns, strict=True)})


def metrics_at(points: Sequence[Mapping[str, float]]) -> Metrics:
    """Returns the metrics of a batch, from those of each row."""
    names = {name for point in points for name in point}
    return metrics_of(**{name: [point.get(name, 0.0) for point in points] for name in names})


def context(
    metrics: Metrics | None = None,
    settings: Any = None,
    *,
    may: bool = True,
    thresholds: Sequence[float] = (1.0,) * 4,
    proposal: Any = None,
    log_probs: Any = None,
    **changes: bool,
) -> Context:
    """Returns the context of a row with all actions allowed or forbidden, except for `changes`."""
    metrics = metrics_of() if metrics is None else metrics
    names = "inject", "lookup", "branch", "clarify", "backspace"
    actions = dict.fromkeys(names, may) | changes
    fresh: SamplerState = jax.tree.map(lambda x: jnp.asarray(x[0]), fresh_state(1))
    zero, none = jnp.float32(0), jnp.int32(0)
    return Context(
        log_probs=jnp.zeros(VOCAB_SIZE) if log_probs is None else log_probs,
        metrics=metrics if settings is None else as_configured(metrics, settings),
        logits=jnp.zeros(VOCAB_SIZE),
        observation=Observation(metrics, zero, zero, zero, zero, regime=none, rounds=none),
        settings=settings,
        parts=PARTS,
        vocab_size=VOCAB_SIZE,
        running=jnp.bool_(True),
        tally=fresh.tally,
        trail=fresh.trail,
        attempt=none,
        bans=jnp.full(MAX_ATTEMPTS, -1, jnp.int32),
        remaining=jnp.int32(50),
        eos_ids=jnp.full(2, -1, jnp.int32),
        looks_up=jnp.bool_(False),
        clarifies=jnp.bool_(False),
        may={name: jnp.asarray(may) for name, may in actions.items()},
        thresholds=jnp.asarray(thresholds, jnp.float32),
        history=jnp.zeros(8, jnp.int32),
        confidences=jnp.zeros(8, jnp.float32),
        length=jnp.int32(1),
        generated=jnp.int32(0),
        key=jnp.zeros(2, jnp.uint32),
        branch=jnp.int32(-1),
        proposal=proposal,
    )


def contexts_of(proposal: Any, settings: SamplerSettings, logits: jax.Array) -> Context:
    """Returns contexts of rows without history."""
    log_probs = jax.nn.log_softmax(logits)
    one = lambda *row: context(None, row[1], proposal=row[0], log_probs=row[2])  # noqa: E731
    rows: Context = jax.vmap(one)(proposal, settings, log_probs)
    return rows


def fresh_state(batch: int) -> SamplerState:
    """Returns the state of rows without committed tokens."""
    return init_sampler_state(batch, MECHANISMS)


def with_state(
    state: SamplerState, name: str, *scalar: jax.Array, **fields: jax.Array
) -> SamplerState:
    """Returns the state with changed values in a mechanism's part."""
    part = scalar[0] if scalar else replace(state.tally.states[name], **fields)
    states = {**state.tally.states, name: part}
    return replace(state, tally=replace(state.tally, states=states))


def proposal_of(
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    num_candidates: Any = 1,
) -> Proposal:
    """Returns a batch of proposals from scalars and equally long lists."""
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    ints = {"top_k": top_k, "num_candidates": num_candidates, "action": 0}
    rows = np.broadcast_shapes((1,), *map(np.shape, [*floats.values(), *ints.values()]))
    return Proposal(
        **{name: jnp.asarray(np.broadcast_to(x, rows), jnp.float32) for name, x in floats.items()},
        **{name: jnp.asarray(np.broadcast_to(x, rows), jnp.int32) for name, x in ints.items()},
    )


def attn_stats(batch: int) -> AttnStats:
    """Returns attention statistics that are equal in all rows, layers and heads."""
    heads, layers = (batch, NUM_LAYERS, NUM_HEADS), (batch, NUM_LAYERS)
    return AttnStats(
        entropy=jnp.ones(heads, jnp.float32),
        varentropy=jnp.zeros(heads, jnp.float32),
        divergence=jnp.zeros(layers, jnp.float32),
        interaction=jnp.ones(layers, jnp.float32),
        keys=jnp.full(batch, 16.0, jnp.float32),
    )


def tiny_model() -> tuple[ModelConfig, Params]:
    """Returns a random model whose vocabulary is larger than the draw's head, and whose logits are
    sharp enough for all regimes of `entropix` except one."""
    config = tiny_config(vocab_size=300, num_layers=NUM_LAYERS, tied_head=False)
    params = random_params(config)
    return config, replace(params, head=5.0 * params.head)


@dataclass
class Job:
    """One row of a batch."""

    prompt: Sequence[int]
    sampler: SamplerSettings
    budget: int = 12
    seed: int = 0
    row_id: str = "0"


@dataclass
class Line:
    """The result of one step for one row."""

    tokens: list[int]  # one token, or those of a branch
    position: int
    status: int
    waited: int  # steps that a fork waited for lanes
    exact: tuple[Any, ...]  # values that must be equal wherever the row runs
    numbers: np.ndarray  # values that may differ by rounding
    # Of a fork:
    branches: tuple[list[int], ...] = ()  # the tokens of each
    scores: tuple[float, ...] = ()
    best: int = 0
    ambiguous: bool = False

    @property
    def token(self) -> int:
        return self.tokens[0]


def start(
    config: ModelConfig,
    params: Params,
    jobs: Sequence[Job],
    capacity: int,
    eos_ids: Sequence[int] = (-1, -1),
) -> DecodeState:
    """Returns the state of a batch whose prompts are cached, except for their last tokens."""
    state = uncached(
        config,
        [job.prompt for job in jobs],
        [job.budget for job in jobs],
        np.stack([row_key(job.seed, job.row_id) for job in jobs]),
        batch_of(*(job.sampler for job in jobs)),
        np.asarray(eos_ids, np.int32),
        capacity=capacity,
        lanes=LANES,
    )
    tokens = state.history[: len(jobs), : capacity // 2]
    count = state.prompt_length[: len(jobs)] - 1
    return prefill(params, state, tokens, count, config=config, window=capacity)


def generate(
    model: tuple[ModelConfig, Params],
    jobs: Sequence[Job],
    *,
    eos_ids: Sequence[int] = (-1, -1),
    chunks: Iterable[int] = (),
) -> list[list[Line]]:
    """Runs rows to their ends in `chunks` of steps, the last ones of 32, in the programs without
    and with lanes. Other rows fill the batch, so that all tests share one shape and two programs.
    """
    config, params = model
    number = len(jobs)
    jobs = [*jobs, *[replace(jobs[0], budget=1)] * (BATCH - number)]
    state = start(config, params, jobs, CAPACITY, eos_ids)
    recorder, program, forked = Recorder(BATCH), Program(FEW, CAPACITY), False
    steps = itertools.chain(chunks, itertools.repeat(32))
    while np.any(np.isin(state.status, (RUNNING, FORKS, BRANCH_ENDED))):
        state, records, forked = decode(
            params,
            state,
            jnp.int32(next(steps)),
            config=config,
            max_steps=32,
            program=replace(program, lanes=bool(forked)),
        )
        recorder.add(jax.device_get(records).unpack())
    return recorder.lines[:number]


class Recorder:
    """A collector of records, as a line for each token or fork of each row."""

    def __init__(self, rows: int) -> None:
        self.lines: list[list[Line]] = [[] for _ in range(rows)]
        self._steps = 0
        self._forked: dict[int, int] = {}  # the step in which each row was forked
        self._waited: dict[int, int] = {}
        self._paths: dict[int, list[list[StepRecord]]] = {}  # each token's record
        self._forced: dict[int, Line] = {}  # forks whose first token is forced

    def add(self, records: StepRecord) -> None:
        """Adds the records of a call."""
        number = len(self.lines)
        lanes_first = [*range(number, records.live.shape[1]), *range(number)]
        for step in range(records.live.shape[0]):
            self._steps += 1
            for row in lanes_first:
                if records.live[step, row] or records.joined.joins[step, row]:
                    self._add(jax.tree.map(lambda x, at=(step, row): x[at], records))

    def _add(self, record: StepRecord) -> None:
        row = int(record.parent)
        if record.branch == 0 and row in self._forked:
            self._waited[row] = self._steps - self._forked.pop(row) - 1
        if record.width:
            self._forked[row] = self._steps
            self._paths[row] = [
                [replace(record, choice=replace(record.choice, token=token, logprob=logprob))]
                for token, logprob in zip(
                    record.candidates[: record.width], record.logprobs, strict=False
                )
            ]
        elif record.joined.joins:
            self._join(row, record)
        elif record.branch >= 0:
            if record.status != BRANCH_ENDED:
                self._paths[row][record.branch].append(record)
        elif not record.rewinds:
            line = self._line([record], record)
            fork = self._forced.pop(row, None)
            if fork is not None:
                line = replace(fork, status=line.status, exact=(fork.exact, line.exact))
            self.lines[row].append(line)

    def _join(self, row: int, record: StepRecord) -> None:
        paths = self._paths.pop(row)
        branches = tuple([int(one.choice.token) for one in path] for path in paths)
        best, committed = int(record.joined.best), int(record.joined.committed)
        ambiguous = bool(record.joined.ambiguous)
        scores = record.joined.scores[: len(paths)]
        line = self._line(paths[best][: max(committed, 1)], record)
        line = replace(
            line,
            waited=self._waited.pop(row),
            exact=(*line.exact, best, ambiguous, branches),
            numbers=np.concatenate([line.numbers, scores]),
            branches=branches,
            scores=tuple(scores.tolist()),
            best=best,
            ambiguous=ambiguous,
        )
        if committed:
            self.lines[row].append(line)
        else:
            self._forced[row] = line

    def _line(self, taken: Sequence[StepRecord], after: StepRecord) -> Line:
        first = taken[0]
        choice, seen = first.choice, first.choice.observation
        tokens = [int(one.choice.token) for one in taken]
        regimes = [int(one.choice.observation.regime) for one in taken]
        floats = [x for one in taken for x in jax.tree.leaves(one.choice) if x.dtype == np.float32]
        return Line(
            tokens=tokens,
            position=int(first.position),
            status=int(after.status),
            waited=0,
            exact=(
                int(choice.proposal.action),
                regimes,
                tokens,
                int(first.position),
                int(after.forwards),
                int(after.status),
                int(first.settled),
                int(seen.rounds),
                int(choice.proposal.top_k),
            ),
            numbers=np.array(floats),
        )


def other_value(key: str, old: Any) -> Any:
    """Returns another allowed value of a scalar."""
    number = scalars()[key]
    if number.kind is bool:
        return not old
    if key in ("loop.max_period", "loop.repeats"):  # the two limit each other
        return old - 1
    halfway = (old + number.high) / 2 if number.high < 1000 else old + 3
    if halfway == old or halfway > number.high:
        halfway = (old + number.low) / 2
    return int(halfway) if number.kind is int else float(np.float32(halfway))
