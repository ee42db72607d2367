"""What the tests of the sampler share: parameters, metrics, proposals, and a tiny random model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.calibrated import fit_thresholds
from entropix_jax.engine.decode import decode, prefill
from entropix_jax.engine.state import BranchLog, DecodeState, Recording, StepRecord, init_state
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
NUM_LAYERS = 2
NUM_HEADS = 4
EPSILON = 2.0**-7


def calibrated(sampler: Sampler, folder: Path) -> Sampler:
    """The sampler as it is for a model of that folder, with the thresholds that lie there alone."""
    model: Any = SimpleNamespace(calibration_file=folder / CALIBRATION_FILE)
    return fit_thresholds(sampler, model, "read")


# No box holds anything: every step is MID, and MID a plain draw.
PLAIN: Mapping[str, Any] = {
    **{f"regimes.{box}": ["entropy < -1"] for box in REGIMES[:-1]},
    "arms.mid": "sample",
    "loop.max_period": 0,
}


def encode(text: str) -> list[int]:
    """A tokenizer of bytes."""
    return list(text.encode())


def params_of(
    preset: str, changes: Mapping[str, Any] | None = None, **options: Any
) -> SamplerSettings:
    """The parameters of one row: a preset with changes."""
    options = {"num_layers": NUM_LAYERS, "epsilon": EPSILON, "encode": encode, **options}
    return load_sampler(preset).with_values(changes or {}).settings(**options)


def batch_of(*rows: SamplerSettings) -> SamplerSettings:
    """The parameters of a batch."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def metrics_of(**values: float) -> Metrics:
    """One row's metrics; what is not named is 0."""
    fields = dict.fromkeys(Metrics.__dataclass_fields__, 0.0) | values
    return Metrics(**{name: jnp.float32(value) for name, value in fields.items()})


def view(may: bool = True, **changes: bool) -> RowView:
    """A row that may take every action, or none, but for the changes."""
    actions = {"inject": may, "branch": may, "backspace": may} | changes
    return RowView(may={name: jnp.asarray(may) for name, may in actions.items()}, own={})


def changed(settings: SamplerSettings, name: str, **values: Any) -> SamplerSettings:
    """One row's settings with other values in a mechanism's section."""
    section = settings.own[name]
    arrays = {
        key: np.asarray(v, np.asarray(getattr(section, key)).dtype) for key, v in values.items()
    }
    return replace(settings, own={**settings.own, name: replace(section, **arrays)})


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
    rules = np.vectorize(RULES.index)(rule)
    columns = np.broadcast_arrays(
        *map(np.atleast_1d, (temperature, top_k, top_p, min_p, draws, rules))
    )
    rows = columns[0].shape[0]
    return Proposal(
        action=jnp.zeros(rows, jnp.int32),
        temperature=jnp.asarray(columns[0], jnp.float32),
        top_k=jnp.asarray(columns[1], jnp.int32),
        top_p=jnp.asarray(columns[2], jnp.float32),
        min_p=jnp.asarray(columns[3], jnp.float32),
        draws=jnp.asarray(columns[4], jnp.int32),
        rule=jnp.asarray(columns[5], jnp.int32),
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
class Step:
    """What was recorded of one step of one row, as plain values."""

    token: int
    position: int
    regime: str
    action: str
    finish: int
    forwards: int
    record: StepRecord = field(repr=False)

    def numbers(self) -> np.ndarray:
        """All floats of the record in one row."""
        leaves = jax.tree.leaves(self.record)
        return np.concatenate([np.ravel(x) for x in leaves if x.dtype == np.float32])


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
    chunks: Sequence[int] = (32,),
    capacity: int = 64,
    max_steps: int = 32,
    rows: int = BATCH,
) -> list[list[Step]]:
    """Runs a batch, `chunks` steps at a time, and returns each row's steps. Other rows fill it up
    to `rows`: one shape, one program for all tests."""
    config, params = model
    number = len(jobs)
    jobs = [*jobs, *[replace(jobs[0], budget=1)] * (rows - number)]
    state = start(config, params, jobs, capacity)
    sampler = batch_of(*(job.sampler for job in jobs))
    actions = [mechanism.name for mechanism in sampler.mechanisms]
    steps: list[list[Step]] = [[] for _ in jobs]
    for chunk in chunks:
        state, records, log = decode(
            params,
            sampler,
            jnp.asarray(eos_ids, jnp.int32),
            state,
            jnp.int32(chunk),
            config=config,
            window=capacity,
            max_steps=max_steps,
            recording=Recording(),
        )
        host, entries = jax.tree.map(np.asarray, (records, log))
        for i in range(max_steps):
            for row, taken in enumerate(steps):
                one = jax.tree.map(lambda x, i=i, row=row: x[i, row], host)
                if one.live:
                    taken += _steps(one, entries, actions)
    return steps[:number]


def tokens_of(steps: Sequence[Step]) -> list[int]:
    """The tokens that a row kept: one in another's place stands in it."""
    tokens: dict[int, int] = {}
    for step in steps:
        tokens[step.position] = step.token
    return list(tokens.values())


def _steps(record: StepRecord, log: BranchLog, actions: Sequence[str]) -> list[Step]:
    """The token of a step, or the tokens of the branch that it committed."""
    if record.branch < 0:
        return [_step(record, actions)]
    entry = jax.tree.map(lambda x: x[record.branch], replace(log, count=log.committed))
    steps = []
    for depth in range(int(entry.committed)):
        branches = entry.branches
        observation = jax.tree.map(lambda x, depth=depth: x[depth], branches.observation)
        choice = replace(
            record.choice,
            token=branches.tokens[branches.best, depth],
            logprob=branches.logprobs[depth],
            sequence_varentropy=entry.sequence_varentropy[depth],
            observation=observation,
        )
        one = replace(record, choice=choice, position=record.position + depth)
        steps.append(_step(one, actions))
    return steps


def _step(record: StepRecord, actions: Sequence[str]) -> Step:
    choice = record.choice
    return Step(
        token=int(choice.token),
        position=int(record.position),
        regime=REGIMES[choice.observation.regime],
        action=actions[int(choice.proposal.action)],
        finish=int(record.finish),
        forwards=int(record.forwards),
        record=record,
    )


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
