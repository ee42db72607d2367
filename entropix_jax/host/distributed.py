"""Multi-host runs: the index of this process, and the number of processes.

Rows on different hosts are independent, so JAX's multi-controller runtime is needed only to assign
process indices and, on TPUs, to initialize the hosts' devices together. After that each process
runs by itself, and survives the death of others.

If a process is missing, JAX kills the others, and devices that were initialized in a cluster keep
looking for it. So without TPUs the rendezvous runs in child processes.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from entropix_jax.errors import UserError, check_range

PATIENCE = 300  # seconds to wait for the other processes


def join(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> tuple[int, int]:
    """Waits for the other processes of the run; returns this one's index and their number.

    The arguments are HOST:PORT of process 0, the number of processes, and the index of this one;
    None is what the environment says (a TPU VM, Slurm, ...). Given both numbers but no coordinator,
    a process waits for nobody, so that it can be restarted by itself; with TPUs all must start.
    Must be called before anything initializes a JAX device. UserError if the environment says
    nothing, or processes are missing after `PATIENCE` seconds.
    """
    try:
        if _has_tpu():
            return _rendezvous(coordinator, processes, process, PATIENCE)
        if coordinator is None and processes is not None and process is not None:
            return process, processes
        print("note: waiting for the other processes", file=sys.stderr)
        return _rendezvous_in_child(coordinator, processes, process, PATIENCE)
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--distributed: the processes do not meet: {reason}"
            " (outside a TPU VM or Slurm give --coordinator, --processes and --process)"
        ) from None


def check_place(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Refuses (UserError) arguments of `join` that are wrong by themselves."""
    address = "host:1" if coordinator is None else coordinator
    match = re.fullmatch(r"(?:[^\s:]+|\[[^\s\]]+\]):([0-9]{1,5})", address)
    if match is None or not 1 <= int(match[1]) <= 65535:
        raise UserError(f"--coordinator {address}: must be HOST:PORT, the port from 1 to 65535")
    check_range("--processes", processes, 1)
    if process is not None and not 0 <= process < (processes or process + 1):
        most = "" if processes is None else f" and under --processes {processes}"
        raise UserError(f"--process must be at least 0{most}, not {process}")


def _rendezvous(
    coordinator: str | None, processes: int | None, process: int | None, patience: int
) -> tuple[int, int]:
    import jax

    jax.distributed.initialize(coordinator, processes, process, initialization_timeout=patience)
    place = jax.process_index(), jax.process_count()
    jax.distributed.shutdown()
    return place


def _rendezvous_in_child(*arguments: str | int | None) -> tuple[int, int]:
    """The rendezvous in a child process, which ends with this one. RuntimeError if it fails."""
    child = subprocess.Popen(
        [sys.executable, "-m", "entropix_jax.host.distributed", json.dumps(arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,  # the child ends when it is closed
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with child:
        try:
            assert child.stdout is not None
            answer = child.stdout.read()
        except BaseException:
            child.kill()
            raise
    if not answer:
        raise RuntimeError(f"not all had come after {arguments[-1]} s, or one was lost")
    place = json.loads(answer)
    if isinstance(place, str):
        raise RuntimeError(place)
    return tuple(place)


def _run_child() -> None:
    """The child: prints its index and the number of processes, or an error, as JSON."""

    def end_with_parent() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    place: tuple[int, int] | str
    try:
        place = _rendezvous(*json.loads(sys.argv[1]))
    except (ValueError, RuntimeError) as error:
        place = str(error)
    print(json.dumps(place), flush=True)
    os._exit(0)


def _has_tpu() -> bool:
    """Whether JAX would use a TPU. Asking JAX itself would claim it."""
    if importlib.util.find_spec("libtpu") is None:
        return False
    wanted = os.environ.get("JAX_PLATFORMS") or "tpu"
    chips = (*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*"))
    return "tpu" in wanted and bool(chips)


if __name__ == "__main__":
    _run_child()
