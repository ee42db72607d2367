"""What a batch will take of each device's memory, told before any of it is taken."""

import gc
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from entropix_jax.branching import lanes_of
from entropix_jax.config import ModelConfig
from entropix_jax.decode_state import LOG_STEPS, Recording
from entropix_jax.errors import UserError
from entropix_jax.free_memory import as_size, free_share
from entropix_jax.precision import Precision
from entropix_jax.preparation import (
    MAX_PREFILL,
    MAX_STEPS,
    PREFILL_WINDOW,
    bucket,
    chunk_size,
)
from entropix_jax.sampler.mechanisms.branch import MAX_DEPTH, MAX_WIDTH
from entropix_jax.sharding import DATA, MODEL, weights_bytes

# Float32 arrays of a vocabulary for each row: the last token's logits, and what a step makes of
# this one's on the way to a draw.
_LOGITS = 8
_SCORES = 4  # arrays of the size of all scores, while they are measured
_PROMPT_SCORES = 2  # arrays of a layer's scores, while a prompt is read
_INNER, _HIDDEN = 3, 3  # arrays of a layer while a prompt is read: MLP-wide and model-wide ones
_CHUNKS = 2  # of steps whose records are there at a time
_NOTHING = Recording()


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one device will hold."""

    weights: int
    cache: int
    logits: int
    working: int  # a step's scores and branches, or what a prompt takes beyond a step's logits
    records: int = 0  # of what each step did besides the choice

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.logits + self.working + self.records

    def __str__(self) -> str:
        records = f", records {as_size(self.records)}" if self.records else ""
        return (
            f"weights {as_size(self.weights)}, cache {as_size(self.cache)}, "
            f"logits {as_size(self.logits)}, working space {as_size(self.working)}{records}"
        )


def plan_memory(
    config: ModelConfig,
    precision: Precision,
    *,
    slots: int,
    capacity: int,
    data: int = 1,
    model: int = 1,
    recording: Recording = _NOTHING,
) -> MemoryPlan:
    """What a batch of `slots` rows with `capacity` cache slots each takes per device, where `data`
    devices share the rows and `model` devices share each row's heads and matrices.

    Counted are the weights and the cache as they lie in memory; of a step the logits of all rows
    and branches and what a draw makes of them, the attention scores of all layers, and of the lanes
    that branch their rows of the cache (no copies where each row has a lane) with the branches' own
    slots; of a prompt's part the scores of a layer, its activations (of every layer where weights
    are widened: XLA on a CPU gives each room of its own), and the row of the cache that it is read
    into. Steps and prompts take turns: the larger of the two counts. Not counted: the runtime and
    the programs (0.6 GB of a process), and the compiler while it works, which may take 1 GB.

    At Llama-3.2-1B's shape that is within a tenth of what XLA itself says on a CPU; for other
    devices it is an estimate.

    Raises:
        UserError: a model that `model` devices cannot share.
    """
    mesh: Any = AbstractMesh((data, model), (DATA, MODEL))
    rows = -(-slots // data)
    width = precision.activations.itemsize
    position = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width // model
    lanes = min(lanes_of(rows), rows)
    logits = _LOGITS * (rows + lanes * MAX_WIDTH) * config.vocab_size * 4
    prefix = capacity if lanes < rows else 0
    branches = lanes * (prefix + MAX_WIDTH * MAX_DEPTH) * position
    chunk = min(chunk_size(config, capacity, 1, MAX_PREFILL), bucket(capacity, 1))
    reads = min(bucket(capacity, PREFILL_WINDOW), capacity)
    position_scores = config.num_heads * reads * 4 // model
    scores = _PROMPT_SCORES * chunk * position_scores
    inner = _INNER * chunk * config.mlp_width // model * width
    hidden = _HIDDEN * chunk * config.width * width
    # Of the last layer a prompt needs keys and values alone.
    others = config.num_layers - 1
    if precision.activations == jnp.float32 != precision.weights:  # on a CPU
        prompts = scores + others * (inner + hidden)
    else:
        prompts = max(scores, inner) + hidden
    prompts += capacity * position * others // config.num_layers if rows > 1 else 0
    # A step measures the attention of all layers at once, the branches' too.
    stats = max(rows, lanes * MAX_WIDTH) * config.num_layers * position_scores * _SCORES
    note = 8 * recording.top + 4 * config.num_layers * config.num_heads * recording.layers
    log = (rows + LOG_STEPS * MAX_STEPS) * MAX_DEPTH
    return MemoryPlan(
        weights=weights_bytes(config, precision.weights, mesh),
        cache=rows * capacity * position,
        logits=logits,
        working=max(prompts - logits, branches + stats),
        records=_CHUNKS * (MAX_STEPS * rows + log) * note,
    )


def check_memory(
    config: ModelConfig,
    precision: Precision,
    *,
    slots: int,
    capacity: int,
    mesh: Mesh | None = None,
    recording: Recording = _NOTHING,
) -> str:
    """One line that says what a batch will take of each device, and of how much, before any of it
    is there. `mesh` are the devices that share it; None is the default one alone.

    Raises:
        UserError: it does not fit; the line names the most slots that do.
    """
    plan = _plan_of(config, precision, capacity, mesh, recording)
    wanted, free = plan(slots), free_share(mesh)
    if free is None:
        return f"memory of each device: {wanted}"
    told = f"{wanted}: {as_size(wanted.total)} of {as_size(free)}"
    if wanted.total <= free:
        return f"memory of each device: {told}"
    fitting = _most(plan, slots, free, mesh)
    if fitting:
        advice = f"at most {fitting} slots fit (--slots {fitting})"
    elif wanted.weights <= free:
        advice = "not even one slot for each fits: fewer tokens a row (--context) need less"
    else:
        advice = "not even the weights fit"
    raise UserError(
        f"{slots} slots of {capacity} tokens do not fit into a device: {told}; {advice}"
    )


def most_slots(
    config: ModelConfig, precision: Precision, *, slots: int, capacity: int, mesh: Mesh | None
) -> int:
    """How many slots, up to `slots`, a batch may have to fit into memory beside weights that are
    there already: a multiple of the devices that share them. 0 where it does not fit at all,
    `slots` where the devices do not tell what they have."""
    plan = _plan_of(config, precision, capacity, mesh, _NOTHING)
    weights = plan(1).weights
    free = free_share(mesh, weights)
    return slots if free is None else _most(plan, slots, free + weights, mesh)


def check_cache(
    config: ModelConfig, precision: Precision, *, slots: int, capacity: int, mesh: Mesh | None
) -> None:
    """Refuses rows whose cache and logits alone do not fit beside weights that are there already:
    what else they take depends on their prompts.

    Raises:
        UserError: they do not fit.
    """
    plan = _plan_of(config, precision, capacity, mesh, _NOTHING)(slots)
    needed, free = plan.cache + plan.logits, free_share(mesh, plan.weights)
    if free is not None and needed > free:
        gc.collect()  # an earlier run's cache may be held by nothing but a circle
        free = free_share(mesh, plan.weights)
    if free is not None and needed > free:
        rows = "1 row" if slots == 1 else f"{slots} rows side by side"
        raise UserError(
            f"{rows} of {capacity} tokens would not fit into memory: cache {as_size(plan.cache)}, "
            f"logits {as_size(plan.logits)}: {as_size(needed)} of {as_size(free)}; fewer rows, or "
            "fewer tokens of each, need less"
        )


def _plan_of(
    config: ModelConfig,
    precision: Precision,
    capacity: int,
    mesh: Mesh | None,
    recording: Recording,
) -> Callable[[int], MemoryPlan]:
    """The plan for a number of slots."""
    shape = {DATA: 1, MODEL: 1} if mesh is None else mesh.shape

    def plan(slots: int) -> MemoryPlan:
        return plan_memory(
            config,
            precision,
            slots=slots,
            capacity=capacity,
            data=shape[DATA],
            model=shape[MODEL],
            recording=recording,
        )

    return plan


def _most(plan: Callable[[int], MemoryPlan], slots: int, free: int, mesh: Mesh | None) -> int:
    fitting = bisect_right(range(1, slots + 1), free, key=lambda number: plan(number).total)
    return fitting - fitting % (1 if mesh is None else mesh.shape[DATA])
