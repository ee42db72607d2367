"""What the tests of the sampler share: parameters, metrics, proposals, and a tiny random model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.calibrated import fit_thresholds
from entropix_jax.engine.decode import decode, prefill
from entropix_jax.engine.state import (
    RUNNING,
    BranchLog,
    DecodeState,
    Recording,
    StepRecord,
    init_state,
)
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.loading import CALIBRATION_FILE
from entropix_jax.model.params import Params
from entropix_jax.names import REGIMES
from entropix_jax.sampler.keys import row_key
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.proposal import Proposal, RowView
from entropix_jax.sampler.sampler import Sampler, scalars
from entropix_jax.sampler.settings import RULES, SamplerSettings
from entropix_jax.sampler.state import SamplerState, init_sampler_state
from entropix_jax.stats import AttnStats
from tests.support.models import random_params, tiny_config

ARMS = [mechanism.name for mechanism in MECHANISMS]
BATCH = 10  # rows
CAPACITY = 64  # positions of a row
NUM_LAYERS = 2
NUM_HEADS = 4
EPSILON = 2.0**-7


# No box holds anything: every step is MID, and MID a plain draw.
PLAIN: Mapping[str, Any] = {
    **{f"regimes.{box}": ["entropy < -1"] for box in REGIMES[:-1]},
    "arms.mid": "sample",
    "loop.max_period": 0,
}


def calibrated(sampler: Sampler, folder: Path) -> Sampler:
    """The sampler as it is for a model of that folder, with the thresholds that lie there alone."""
    model: Any = SimpleNamespace(calibration_file=folder / CALIBRATION_FILE)
    return fit_thresholds(sampler, model, "read")


def encode(text: str) -> list[int]:
    """A tokenizer of bytes."""
    return list(text.encode())


def settings_of(sampler: Sampler, **options: Any) -> SamplerSettings:
    """The parameters of one row."""
    options = {"num_layers": NUM_LAYERS, "epsilon": EPSILON, "encode": encode, **options}
    return sampler.settings(**options)


def params_of(
    preset: str, changes: Mapping[str, Any] | None = None, **options: Any
) -> SamplerSettings:
    """The parameters of one row: a preset with changes."""
    return settings_of(load_sampler(preset).with_values(changes or {}), **options)


def batch_of(*rows: SamplerSettings) -> SamplerSettings:
    """The parameters of a batch."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def metrics_of(**values: Any) -> Metrics:
    """One row's metrics, or those of many from equally long lists; what is not named is 0."""
    names = [*Metrics.__dataclass_fields__]
    columns = np.broadcast_arrays(*(values.get(name, 0.0) for name in names))
    return Metrics(**{n: jnp.asarray(x, jnp.float32) for n, x in zip(names, columns, strict=True)})


def metrics_at(points: Sequence[Mapping[str, float]]) -> Metrics:
    """The metrics of a batch, from each row's."""
    names = {name for point in points for name in point}
    return metrics_of(**{name: [point.get(name, 0.0) for point in points] for name in names})


def view(may: bool = True, **changes: bool) -> RowView:
    """A row that may take every action, or none, but for the changes."""
    actions = {"inject": may, "branch": may, "backspace": may} | changes
    return RowView(may={name: jnp.asarray(may) for name, may in actions.items()}, own={})


def fresh_state(batch: int, vocab_size: int) -> SamplerState:
    """The state of rows that have committed nothing yet."""
    return init_sampler_state(batch, vocab_size, MECHANISMS)


def with_own(state: SamplerState, name: str, **fields: jax.Array) -> SamplerState:
    """The state with other values in a mechanism's part of it."""
    own = {**state.tally.own, name: replace(state.tally.own[name], **fields)}
    return replace(state, tally=replace(state.tally, own=own))


def proposal_of(
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    draws: Any = 1,
    rule: Any = "nucleus",
) -> Proposal:
    """A batch of proposals from scalars and equally long lists; a rule goes by its name."""
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    ints = {"top_k": top_k, "draws": draws, "rule": np.vectorize(RULES.index)(rule), "action": 0}
    rows = np.broadcast_shapes((1,), *map(np.shape, [*floats.values(), *ints.values()]))
    return Proposal(
        **{name: jnp.asarray(np.broadcast_to(x, rows), jnp.float32) for name, x in floats.items()},
        **{name: jnp.asarray(np.broadcast_to(x, rows), jnp.int32) for name, x in ints.items()},
    )


def attn_stats(batch: int, *, entropy: float = 1.0, keys: float = 16.0) -> AttnStats:
    """Attention statistics that are the same in all rows, layers and heads."""
    heads, layers = (batch, NUM_LAYERS, NUM_HEADS), (batch, NUM_LAYERS)
    return AttnStats(
        entropy=jnp.full(heads, entropy, jnp.float32),
        varentropy=jnp.zeros(heads, jnp.float32),
        divergence=jnp.zeros(layers, jnp.float32),
        interaction=jnp.ones(layers, jnp.float32),
        keys=jnp.full(batch, keys, jnp.float32),
    )


def tiny_model() -> tuple[ModelConfig, Params]:
    """A random model whose vocabulary is larger than the draw's head, and whose logits are sharp
    enough for all regimes of `entropix` but one."""
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
    """What one step did to one row."""

    action: str
    regime: str
    entropy: float
    tokens: list[int]  # one, or a branch's
    logprobs: list[float]
    position: int
    forwards: int
    rolled_out: int
    finish: int
    branching: int  # rows that branched in the same step
    exact: tuple[Any, ...]  # all that must be the same wherever the row runs
    numbers: np.ndarray  # and all that may differ by rounding

    @property
    def token(self) -> int:
        return self.tokens[0]


def start(config: ModelConfig, params: Params, jobs: Sequence[Job], capacity: int) -> DecodeState:
    """The state of a batch whose prompts are cached, all but their last tokens."""
    state = init_state(
        config,
        [job.prompt for job in jobs],
        [job.budget for job in jobs],
        np.stack([row_key(job.seed, job.row_id) for job in jobs]),
        capacity=capacity,
        dtype=jnp.dtype(jnp.float32),
        mechanisms=jobs[0].sampler.mechanisms,
    )
    tokens = state.history[:, : capacity // 2]
    count = state.prompt_length - 1
    return prefill(params, state, tokens, count, config=config, window=capacity)


def generate(
    model: tuple[ModelConfig, Params],
    jobs: Sequence[Job],
    *,
    eos_ids: Sequence[int] = (-1, -1),
    chunks: Iterable[int] = (32,) * 9,
    rows: int = BATCH,
    look: Callable[[DecodeState], None] = lambda state: None,
) -> list[list[Line]]:
    """Runs rows to their ends, so many steps at a time, and looks at the state in between. Others
    fill the batch up to `rows`: one shape, one program for all tests."""
    config, params = model
    number = len(jobs)
    jobs = [*jobs, *[replace(jobs[0], budget=1)] * (rows - number)]
    state = start(config, params, jobs, CAPACITY)
    sampler = batch_of(*(job.sampler for job in jobs))
    actions = [mechanism.name for mechanism in sampler.mechanisms]
    lines: list[list[Line]] = [[] for _ in jobs]
    look(state)
    for chunk in chunks:
        state, records, log = decode(
            params,
            sampler,
            jnp.asarray(eos_ids, jnp.int32),
            state,
            jnp.int32(chunk),
            config=config,
            window=CAPACITY,
            max_steps=32,
            recording=Recording(),
        )
        records, log = jax.device_get((records, log))
        look(state)
        for step, row in zip(*np.nonzero(records.live), strict=True):
            one = jax.tree.map(lambda x, at=(step, row): x[at], records)
            branching = int(np.sum(records.branch[step] >= 0))
            lines[row].append(line_of(one, log, branching, actions))
        if not np.any(state.finish == RUNNING):
            break
    return lines[:number]


def line_of(
    record: StepRecord, log: BranchLog, branching: int = 0, actions: Sequence[str] = ARMS
) -> Line:
    choice = record.choice
    tokens, logprobs, rolled_out = [int(choice.token)], [float(choice.logprob)], 0
    exact = [record.may_backspace, choice.observation.looping, choice.proposal.top_k]
    floats = jax.tree.leaves(choice)
    if record.branch >= 0:
        branches, count = log.branches, int(log.committed[record.branch])
        entry = jax.tree.map(lambda x: x[record.branch], branches)
        rolled_out = int(entry.length.sum())
        tokens = entry.tokens[entry.best, :count].tolist()
        logprobs = entry.logprobs[:count].tolist()
        exact += [entry.best, entry.ambiguous]
        exact += [path[:n].tolist() for path, n in zip(entry.tokens, entry.length, strict=True)]
        exact += entry.observation.regime[:count].tolist()
        told = (entry.observation, entry.logprobs, log.sequence_varentropy[record.branch])
        floats += [x[:count] for x in jax.tree.leaves(told)] + [entry.score]
    action = actions[int(choice.proposal.action)]
    regime = REGIMES[choice.observation.regime]
    return Line(
        action=action,
        regime=regime,
        entropy=float(choice.observation.metrics.entropy),
        tokens=tokens,
        logprobs=logprobs,
        position=int(record.position),
        forwards=int(record.forwards),
        rolled_out=rolled_out,
        finish=int(record.finish),
        branching=branching,
        exact=(action, regime, tokens, record.position, record.forwards, record.finish, *exact),
        numbers=np.concatenate([np.ravel(x) for x in floats if x.dtype == np.float32]),
    )


def tokens_of(lines: Sequence[Line]) -> list[int]:
    """The tokens that a row kept: one in another's place stands in it."""
    tokens: dict[int, int] = {}
    for line in lines:
        tokens |= dict(enumerate(line.tokens, line.position))
    return list(tokens.values())


def other_value(key: str, old: Any) -> Any:
    """Another allowed value of a scalar."""
    number = scalars()[key]
    if number["type"] is bool:
        return not old
    if key.startswith("loop."):  # the two limit each other
        return old - 1
    halfway = (old + number["high"]) / 2 if number["high"] < 1000 else old + 3
    if halfway == old:
        halfway = (old + number["low"]) / 2
    return int(halfway) if number["type"] is int else float(np.float32(halfway))
