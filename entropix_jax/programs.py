"""Compiled programs that are kept in a folder: none that is torn stays there."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import zlib
from pathlib import Path

_CHECKED = ".checked"  # as old as the last look at the programs
_SUFFIX, _TIME_SUFFIX = "-cache", "-atime"  # of JAX's files
_MARGIN = 10**9  # nanoseconds by which clocks may differ
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def drop_torn_programs(folder: Path) -> None:
    """Removes programs that a killed run or a full disk has left half-written in JAX's cache: JAX
    itself would complain of each at every start, compile it again, and leave it as it is. One whose
    time of use is missing gets one: for want of it JAX would keep no further program.

    Looks at those alone that are newer than its last look.

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
                if entry.stat().st_mtime_ns < seen:
                    continue
                if _is_whole(Path(entry.path)):
                    Path(entry.path.removesuffix(_SUFFIX) + _TIME_SUFFIX).touch(mode=0o600)
                else:
                    os.unlink(entry.path)
    mark.touch(mode=0o600)
    os.utime(mark, ns=(now - _MARGIN, now - _MARGIN))


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
