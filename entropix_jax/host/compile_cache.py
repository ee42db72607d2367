"""Compiled programs in the user's cache folder."""

import os
import stat
import sys
from pathlib import Path

import jax


def traced_folder() -> Path | None:
    """Returns the folder of traced programs, None unless compiled ones are in a folder of ours."""
    chosen = Path(jax.config.jax_compilation_cache_dir or "")  # type: ignore[attr-defined]
    return chosen.with_name("traced") if chosen.parts[-2:] == ("entropix_jax", "xla") else None


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, so that a second start skips compiling.

    Programs in it are run as they are, so a folder that others may write to is not used, and a note
    says so. A folder that JAX's own setting (`JAX_COMPILATION_CACHE_DIR`) names is left alone.
    Where no folder can be written, nothing is kept.
    """
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        try:
            own = folder.expanduser() / "entropix_jax"
            own.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = own.stat()
            # On Windows a home is its user's.
            if sys.platform != "win32" and (
                found.st_uid != os.geteuid() or found.st_mode & stat.S_IWOTH
            ):
                problem = "directory is writable by other users: compiled programs are not cached"
                hint = "remove it, or set XDG_CACHE_HOME"
                print(f"note: {own}: {problem} ({hint})", file=sys.stderr)
                return
            own.chmod(0o700)
        except (OSError, RuntimeError):  # not writable; no home at all
            return
        if not os.access(own, os.W_OK):
            return
        jax.config.update("jax_compilation_cache_dir", str(own / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
