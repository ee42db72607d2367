"""Compiled programs that are kept in a folder: none that is torn stays there."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import zlib
from pathlib import Path

_CHECKED = ".checked"  # as old as the last look at the programs
_SUFFIX = "-cache"  # of JAX's files
_MARGIN = 10**9  # nanoseconds by which clocks may differ
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def drop_torn_programs(folder: Path, *, sized: bool) -> None:
    """Removes programs that a killed run or a full disk has left half-written in JAX's cache: JAX
    itself would complain of each at every start, compile it again, and leave it as it is.

    Looks at those alone that are newer than its last look.

    Args:
        folder: of the cache.
        sized: whether the cache has a largest size. A program whose time of use is missing then
            gets one: for want of it JAX 0.10 would keep no further program.

    Raises:
        OSError: the folder cannot be read or written.
    """
    mark = folder / _CHECKED
    now = time.time_ns()
    seen = mark.stat().st_mtime_ns if mark.exists() else 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(_SUFFIX):
                continue
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if entry.stat().st_mtime_ns >= seen and not _is_whole(Path(entry.path)):
                    os.unlink(entry.path)
                elif sized and not (time_of_use := _time_of_use(Path(entry.path))).exists():
                    time_of_use.touch(mode=0o600)
    mark.touch(mode=0o600)
    os.utime(mark, ns=(now - _MARGIN, now - _MARGIN))


def _time_of_use(program: Path) -> Path:
    return program.with_name(program.name.removesuffix(_SUFFIX) + "-atime")


def _is_whole(path: Path) -> bool:
    """Whether a compressed file is there to its end. One that nothing here can read counts."""
    data = path.read_bytes()
    if data.startswith(_ZSTANDARD):
        for name in ("compression.zstd", "zstandard"):  # as JAX looks for them
            with contextlib.suppress(ImportError):
                library = importlib.import_module(name)
                try:
                    library.decompress(data)
                except library.ZstdError:
                    return False
                return True
        return True
    decompressor = zlib.decompressobj()
    try:
        decompressor.decompress(data)
    except zlib.error:
        return False
    return decompressor.eof
