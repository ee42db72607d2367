"""The user's cache folder, and JAX's persistent compilation cache in it."""

from __future__ import annotations

import contextlib
import importlib
import os
import stat
import sys
import zlib
from pathlib import Path
from typing import Any

import jax

from entropix_jax.errors import UserError

_SUFFIX = "-cache"  # of JAX's files
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, so that a second start skips compiling.

    Programs in it are run as they are, so a folder that others may write to is not used, and a note
    says so. A folder that JAX's own setting (`JAX_COMPILATION_CACHE_DIR`) names is left alone.
    Where no folder can be written, nothing is kept.
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
    None where none can be written. UserError if it is another user's, or all may write to it."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        own = root.expanduser() / "entropix_jax"
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        (own / name).mkdir(mode=0o700, exist_ok=True)
        for path in (own, own / name):
            found = path.stat()
            # On Windows a home is its user's.
            if sys.platform != "win32" and (
                found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH
            ):
                raise UserError(f"{path}: others could write there")
            path.chmod(0o700)
    except (OSError, RuntimeError):  # not writable; no home at all
        return None
    return own / name if os.access(own / name, os.W_OK) else None


def drop_torn_programs(folder: Path, *, sized: bool) -> None:
    """Removes cache entries that a killed run or a full disk has truncated: JAX would warn of each
    at every start and never replace it. Looks at those alone that are newer than its last look.

    In a cache with a largest size (`sized`) an entry without a time of use gets one: for want of it
    JAX 0.10 would keep no further program. OSError where the folder cannot be read or written.
    """
    mark = folder / ".checked"
    checked = mark.stat().st_mtime if mark.exists() else 0.0
    mark.touch(mode=0o600)  # before the look: what is written meanwhile is seen by the next one
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if path.stat().st_mtime >= checked - 1 and not _is_whole(path.read_bytes()):
                path.unlink()
            elif sized:
                path.with_name(f"{path.name.removesuffix(_SUFFIX)}-atime").touch(mode=0o600)


def _is_whole(data: bytes) -> bool:
    """Whether compressed data reaches its end. What nothing here can decompress counts as whole."""
    decompressor: Any = zlib.decompressobj()
    if data.startswith(_ZSTANDARD):
        try:
            decompressor = importlib.import_module("zstandard").ZstdDecompressor().decompressobj()
        except ImportError:
            return True
    try:
        decompressor.decompress(data)
    except Exception:  # the libraries' own errors
        return False
    return bool(decompressor.eof)
