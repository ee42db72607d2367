"""Several hosts: who is who among the processes of one run.

Rows do not meet across hosts, so JAX's multi-controller runtime is needed for one thing alone: it
tells each process its number and connects the hosts' devices as the hardware wants it. After that
each process works by itself, and one that dies takes no other with it.
"""

import jax
from jax.extend.backend import clear_backends

from entropix_jax.errors import UserError


def join(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> tuple[int, int]:
    """Meets the other processes of the run: this one's number, and how many there are.

    Must come before anything else asks JAX for a device.

    Args:
        coordinator: host and port of process 0; None, as for the other two: as the environment says
            it (a TPU VM, Slurm, ...).

    Raises:
        UserError: the environment says nothing, or the others do not come.
    """
    try:
        jax.distributed.initialize(coordinator, processes, process)
        index, count = jax.process_index(), jax.process_count()
        platform = jax.default_backend()
        jax.distributed.shutdown()
    except (ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"--distributed: the processes do not meet: {first} (outside a TPU VM or Slurm give "
            "--coordinator, --processes and --process)"
        ) from None
    if platform != "tpu":
        # Devices that were made as part of the whole would look for the others when they first
        # meet each other. A TPU's meet over their own wires.
        clear_backends()
    return index, count
