"""The user's cache folder, and the compiled programs in it: none that is torn stays there."""

from __future__ import annotations

import contextlib
import importlib
import os
import stat
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import jax

from entropix_jax.errors import UserError

_CHECKED = ".checked"  # as old as the last look at the programs
_SUFFIX = "-cache"  # of JAX's files
_MARGIN = 10**9  # nanoseconds by which clocks may differ
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, so that a second start skips compiling.

    The folder is made for the user alone. Programs in it are run as they are, so one that is
    another user's, or that all may write to, is not used, and a note says so. A folder that JAX's
    own setting (`JAX_COMPILATION_CACHE_DIR`) names is left alone. Where no folder can be written,
    nothing is kept. What a killed run has left half-written there goes.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        try:
            folder = user_folder("xla")
        except UserError as error:
            print(
                f"note: {error}: compiled programs are not kept "
                "(remove it, or name another folder in XDG_CACHE_HOME)",
                file=sys.stderr,
            )
            return
        if folder is None:
            return
        config: Any = jax.config
        with contextlib.suppress(OSError):
            drop_torn_programs(folder, sized=config.jax_compilation_cache_max_size != -1)
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def user_folder(name: str) -> Path | None:
    """A folder of the user's cache folder, for what can be made again: made for the user alone.
    None where none can be written.

    Raises:
        UserError: it is another user's, or all may write to it.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        own = root.expanduser() / "entropix_jax"
        folder = own / name
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in (own, folder):
            if not _is_own(path):
                raise UserError(f"{path}: others could write there")
        for path in (own, folder):
            path.chmod(0o700)
    except (OSError, RuntimeError):  # not writable; no home at all
        return None
    return folder if os.access(folder, os.W_OK) else None


def _is_own(folder: Path) -> bool:
    """Whether a folder is this user's, and not open to all."""
    if sys.platform == "win32":  # where a home is its user's
        return True
    found = folder.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH


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
