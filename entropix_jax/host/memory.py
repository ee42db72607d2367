"""Free memory of a device, a machine or a container."""

import os
import re
from pathlib import Path

import jax
from jax.sharding import Mesh

# Control groups, version 1 and 2: the files of a group's limit and use, and the prefix of the lines
# of memory.stat that count cached files, which can be evicted.
_GROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_GROUP_2 = ("memory.max", "memory.current", "")


def free_share(mesh: Mesh | None, weights: int = 0) -> int | None:
    """Free bytes per device of a mesh, or of the default device; None where unknown. `weights` are
    the bytes of a model that each device already holds."""
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)
    free = free_bytes(devices[0])
    if free is None:
        return None
    # CPU devices share the machine's memory, whose free bytes already exclude loaded weights.
    return free // len(devices) if devices[0].platform == "cpu" else free - weights


def free_bytes(device: jax.Device) -> int | None:
    """A CPU's available memory, or all memory of another device, in bytes; None where unknown."""
    if device.platform == "cpu":
        return min([*_free_of_machine(), *_free_of_groups()], default=None)
    stats = device.memory_stats()
    return None if not stats else stats.get("bytes_limit")


def _free_of_machine(meminfo: Path = Path("/proc/meminfo")) -> list[int]:
    """Available bytes of the machine; all bytes where only these are known (macOS)."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
        return [int(found[1]) * 1024] if found else []
    except OSError:  # not Linux
        try:
            return [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        except (AttributeError, ValueError, OSError):
            return []


def _free_of_groups(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """Bytes that the limits of this process's control groups leave (of a container, job or
    service). Cached files count as free."""
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
        # In a container the path may be the host's, and its own group the root.
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
    """Formats bytes."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 1e3:.0f} kB"
