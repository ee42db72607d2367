"""What a batch will take of each device's memory, told before any of it is taken."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import jax
import psutil
from jax.sharding import AbstractMesh

from entropix_jax.branching import lanes_of
from entropix_jax.config import ModelConfig
from entropix_jax.decode_state import LOG_STEPS, Recording
from entropix_jax.engine import MAX_STEPS
from entropix_jax.errors import UserError
from entropix_jax.params import param_specs
from entropix_jax.precision import Precision
from entropix_jax.preparation import MAX_PREFILL, MIN_WINDOW, bucket, chunk_size
from entropix_jax.sampler.params import MAX_DEPTH, MAX_WIDTH
from entropix_jax.sharding import DATA, MODEL, rules_for

# Float32 arrays of a vocabulary for each row: the last token's logits, and what a step makes of
# this one's on the way to a draw.
_LOGITS = 8
_SCORES = 4  # arrays of the size of all scores, while they are measured
_CHUNKS = 2  # of steps whose records are there at a time
_NOTHING = Recording()


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one device will hold."""

    weights: int
    cache: int
    logits: int
    working: int  # a prefill's scores, or a step's and the branches' own slots
    records: int = 0  # of what each step did besides the choice

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.logits + self.working + self.records

    def __str__(self) -> str:
        records = f", records {_size(self.records)}" if self.records else ""
        return (
            f"weights {_size(self.weights)}, cache {_size(self.cache)}, "
            f"logits {_size(self.logits)}, working space {_size(self.working)}{records}"
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

    An estimate: what XLA needs besides is not known before it has compiled.

    Raises:
        UserError: a model that `model` devices cannot share.
    """
    mesh: Any = AbstractMesh((data, model), (DATA, MODEL))
    weights = sum(
        math.prod(sharding.shard_shape(spec.shape))
        for spec, sharding in zip(
            jax.tree.leaves(param_specs(config)),
            jax.tree.leaves(rules_for(mesh, config).params(config)),
            strict=True,
        )
    )
    rows = -(-slots // data)
    width = precision.activations.itemsize
    position = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width // model
    lanes = min(lanes_of(rows), rows)
    branches = lanes * (capacity + MAX_WIDTH * MAX_DEPTH) * position
    chunk = chunk_size(config, capacity, 1, MAX_PREFILL)
    position_scores = config.num_heads * bucket(capacity, MIN_WINDOW) * 4 // model
    prompts = chunk * position_scores
    # A step measures the attention of all layers at once, the branches' too.
    stats = max(rows, lanes * MAX_WIDTH) * config.num_layers * position_scores * _SCORES
    note = 8 * recording.top + 4 * config.num_layers * config.num_heads * recording.layers
    log = (rows + LOG_STEPS * MAX_STEPS) * MAX_DEPTH
    return MemoryPlan(
        weights=weights * precision.weights.itemsize,
        cache=rows * capacity * position,
        logits=_LOGITS * (rows + lanes * MAX_WIDTH) * config.vocab_size * 4,
        working=max(prompts, branches + stats),
        records=_CHUNKS * (MAX_STEPS * rows + log) * note,
    )


def check_memory(
    config: ModelConfig,
    precision: Precision,
    device: jax.Device,
    *,
    slots: int,
    capacity: int,
    data: int = 1,
    model: int = 1,
    recording: Recording = _NOTHING,
) -> str:
    """One line that says what a batch will take of each device, and of how much.

    Raises:
        UserError: it does not fit; the line names the most slots that do.
    """

    def plan(number: int) -> MemoryPlan:
        return plan_memory(
            config,
            precision,
            slots=number,
            capacity=capacity,
            data=data,
            model=model,
            recording=recording,
        )

    wanted, free = plan(slots), free_bytes(device)
    if free is None:
        return f"memory of each device: {wanted}"
    # Devices that are a machine's processors share its memory.
    share = free // (data * model) if device.platform == "cpu" else free
    told = f"{wanted}: {_size(wanted.total)} of {_size(share)}"
    if wanted.total <= share:
        return f"memory of each device: {told}"
    fitting = bisect_right(range(1, slots), share, key=lambda number: plan(number).total)
    fitting -= fitting % data
    advice = (
        f"at most {fitting} slots fit (--slots {fitting})"
        if fitting
        else "not even one slot for each fits: fewer tokens a row (--context) need less"
    )
    raise UserError(
        f"{slots} slots of {capacity} tokens do not fit into a device: {told}; {advice}"
    )


def free_bytes(device: jax.Device) -> int | None:
    """What a device has to give, in bytes, before anything is put there; None where it does not
    tell."""
    if device.platform == "cpu":
        return int(psutil.virtual_memory().available)
    stats = device.memory_stats()
    return None if not stats else stats.get("bytes_limit")


def _size(number: int) -> str:
    """Bytes as people read them."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 1e3:.0f} kB"
