"""What a batch will take of each device's memory, told before any of it is taken."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from entropix_jax.branching import lanes_of
from entropix_jax.config import ModelConfig
from entropix_jax.decode_state import LOG_STEPS, Recording
from entropix_jax.errors import UserError
from entropix_jax.free_memory import as_size, free_bytes
from entropix_jax.precision import Precision
from entropix_jax.preparation import (
    MAX_PREFILL,
    MAX_STEPS,
    PREFILL_WINDOW,
    bucket,
    chunk_size,
)
from entropix_jax.sampler.params import MAX_DEPTH, MAX_WIDTH
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
    if precision.weights != precision.activations:
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
    loaded: bool = False,
    option: str | None = None,
) -> str:
    """One line that says what a batch will take of each device, and of how much.

    Args:
        mesh: the devices that share the batch; None is the default one alone.
        loaded: the weights are there already.
        option: of a command, that says how many slots there are.

    Raises:
        UserError: it does not fit; the line names the most rows that do.
    """
    shape = _shape_of(mesh)
    wanted = plan_memory(
        config, precision, slots=slots, capacity=capacity, recording=recording, **shape
    )
    free = _free_share(mesh, wanted.weights if loaded else 0)
    if free is None:
        return f"memory of each device: {wanted}"
    told = f"{wanted}: {as_size(wanted.total)} of {as_size(free)}"
    if wanted.total <= free:
        return f"memory of each device: {told}"
    fitting = most_slots(
        config,
        precision,
        slots=slots,
        capacity=capacity,
        mesh=mesh,
        recording=recording,
        loaded=loaded,
    )
    advice = (
        f"at most {fitting} would" + (f" ({option} {fitting})" if option else "")
        if fitting
        else f"not even {shape['data']} would: fewer tokens a row need less"
    )
    rows = "1 row" if slots == 1 else f"{slots} rows side by side"
    raise UserError(f"{rows} of {capacity} tokens would not fit into memory: {told}; {advice}")


def most_slots(
    config: ModelConfig,
    precision: Precision,
    *,
    slots: int,
    capacity: int,
    mesh: Mesh | None = None,
    recording: Recording = _NOTHING,
    loaded: bool = False,
) -> int:
    """How many rows, up to `slots`, a batch may have to fit into memory: a multiple of the devices
    that share them, 0 where it does not fit at all, `slots` where no device tells what it has. The
    arguments are those of `check_memory`."""
    shape = _shape_of(mesh)

    def plan(number: int) -> MemoryPlan:
        return plan_memory(
            config, precision, slots=number, capacity=capacity, recording=recording, **shape
        )

    free = _free_share(mesh, plan(1).weights if loaded else 0)
    if free is None:
        return slots
    fitting = bisect_right(range(1, slots + 1), free, key=lambda number: plan(number).total)
    return fitting - fitting % shape["data"]


def _shape_of(mesh: Mesh | None) -> dict[str, int]:
    return {"data": 1, "model": 1} if mesh is None else dict(mesh.shape)


def _free_share(mesh: Mesh | None, loaded: int) -> int | None:
    """What each device has for a batch, in bytes, of which loaded weights may have taken theirs."""
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    free = free_bytes(device)
    if free is None or device.platform != "cpu":
        return free
    # Devices that are a machine's processors share its memory.
    return free // (1 if mesh is None else mesh.size) + loaded
