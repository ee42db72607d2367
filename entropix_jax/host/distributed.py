"""Multi-host runs: the index of this process, and the number of processes.

Rows on different hosts are independent, so a process needs nothing of the others, and survives
their death. Only the hosts of a TPU slice initialize their devices together: JAX's runtime connects
them for that, and no longer.
"""

import importlib.util
import os
from pathlib import Path

from entropix_jax.errors import UserError

PATIENCE = 300  # seconds to wait for the other hosts of a TPU slice


def join(processes: int | None = None, process: int | None = None) -> tuple[int, int]:
    """Returns the index of this process and the number of processes: those given, or Slurm's, or
    those of a TPU slice.

    The hosts of a slice wait for each other, so this must be called before anything initializes a
    JAX device. UserError if nothing says which process this is, or hosts are missing after
    `PATIENCE` seconds.
    """
    if process is not None and processes is not None:
        return process, processes
    if not _has_tpu():
        try:
            return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        except KeyError:
            hint = "outside a TPU VM or Slurm give --processes and --process"
            raise UserError(f"--distributed: {hint}") from None
    import jax

    try:
        jax.distributed.initialize(initialization_timeout=PATIENCE)
        place = jax.process_index(), jax.process_count()
        jax.distributed.shutdown()
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"--distributed: the processes could not connect: {reason}") from None
    return place


def _has_tpu() -> bool:
    """Whether JAX would use a TPU. Asking JAX itself would claim it."""
    if importlib.util.find_spec("libtpu") is None:
        return False
    wanted = os.environ.get("JAX_PLATFORMS") or "tpu"
    chips = (*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*"))
    return "tpu" in wanted and bool(chips)
