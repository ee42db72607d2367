"""What a batch will take of each device's memory, told before any of it is taken."""

import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
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
from entropix_jax.preparation import MAX_PREFILL, PREFILL_WINDOW, bucket, chunk_size
from entropix_jax.sampler.params import MAX_DEPTH, MAX_WIDTH
from entropix_jax.sharding import DATA, MODEL, rules_for

# Float32 arrays of a vocabulary for each row: the last token's logits, and what a step makes of
# this one's on the way to a draw.
_LOGITS = 8
_SCORES = 4  # arrays of the size of all scores, while they are measured
_PROMPT_SCORES = 2  # arrays of a layer's scores, while a prompt is read
_INNER, _HIDDEN = 3, 3  # arrays of a layer while a prompt is read: MLP-wide and model-wide ones
_CHUNKS = 2  # of steps whose records are there at a time
_NOTHING = Recording()
# The files of a control group's limit and use, and the line of files that could be let go.
_GROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_GROUP_2 = ("memory.max", "memory.current", "inactive_file")


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
        weights=weights * precision.weights.itemsize,
        cache=rows * capacity * position,
        logits=logits,
        working=max(prompts - logits, branches + stats),
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
        return min([int(psutil.virtual_memory().available), *_free_of_groups()])
    stats = device.memory_stats()
    return None if not stats else stats.get("bytes_limit")


def _free_of_groups(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """What the limits of this process's control groups leave, in bytes: a container's, a job's, or
    a service's. Pages of files that could be let go count as free, as they do elsewhere."""
    found = []
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        first, files = (root, _GROUP_2) if controllers == "" else (root / "memory", _GROUP_1)
        # In a container the path may be the host's: then the first folder is its own.
        place = first / path.lstrip("/")
        for folder in (place, *(above for above in place.parents if above.is_relative_to(first))):
            try:
                limit, used = (int((folder / name).read_text()) for name in files[:2])
                of = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
                cached = int(of[files[2]])
            except (OSError, ValueError, KeyError):  # not there; "max"
                continue
            found.append(max(limit - used + cached, 0))
    return found


def _size(number: int) -> str:
    """Bytes as people read them."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 1e3:.0f} kB"
