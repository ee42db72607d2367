"""What memory a device, a machine, or a container has to give."""

from pathlib import Path

import jax
import psutil

# The files of a control group's limit and use, and the line of files that could be let go.
_GROUP_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_GROUP_2 = ("memory.max", "memory.current", "inactive_file")


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


def as_size(number: int) -> str:
    """Bytes as people read them."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number / 1e3:.0f} kB"
