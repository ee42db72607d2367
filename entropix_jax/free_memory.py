"""What memory a device, a machine, or a container has to give."""

from pathlib import Path

import jax
from jax.sharding import Mesh

# The files of a control group's limit and use, and how the lines begin that tell of cached files,
# which can be let go.
_GROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_GROUP_2 = ("memory.max", "memory.current", "")


def free_share(mesh: Mesh | None, weights: int = 0) -> int | None:
    """What each device of a mesh, or the default one alone, has to give, in bytes; None where it
    does not tell. `weights` is what each holds already of a model."""
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)
    free = free_bytes(devices[0])
    if free is None:
        return None
    # Devices that are a machine's processors share its memory, and weights are not in what is left.
    return free // len(devices) if devices[0].platform == "cpu" else free - weights


def free_bytes(device: jax.Device) -> int | None:
    """What a processor's memory has left, or all that another device has, in bytes; None where it
    does not tell."""
    if device.platform == "cpu":
        return min([*_available(), *_free_of_groups()], default=None)
    stats = device.memory_stats()
    return None if not stats else stats.get("bytes_limit")


def _available(table: Path = Path("/proc/meminfo")) -> list[int]:
    """What Linux can give without swapping, in bytes; nothing on another system."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _free_of_groups(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """What the limits of this process's control groups leave, in bytes: a container's, a job's, or
    a service's. Pages of files count as free."""
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
                cached = sum(int(of[f"{files[2]}{kind}_file"]) for kind in ("inactive", "active"))
            except (OSError, ValueError, KeyError):  # not there; "max"
                continue
            found.append(max(limit - used + cached, 0))
    return found


def as_size(number: int) -> str:
    """Bytes as people read them."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 1e3:.0f} kB"
