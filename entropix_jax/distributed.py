"""Several hosts: who is who among the processes of one run.

Rows do not meet across hosts, so JAX's multi-controller runtime is needed for one thing alone: it
tells each process its number and, on TPUs, connects the hosts' devices as the hardware wants it.
After that each process works by itself, and one that dies takes no other with it.

Where others do not come JAX ends the whole process, and devices that were made as part of a whole
look for the others for good. So the processes meet through children of theirs, but for those with
TPUs, which meet over their own wires.
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

PATIENCE = 300  # seconds to wait for the others


def join(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> tuple[int, int]:
    """Meets the other processes of the run: this one's number, and how many there are.

    Must come before anything else asks JAX for a device. A process that is told its number and how
    many there are, but no coordinator, meets nobody, and can be started again by itself; with TPUs
    all must come.

    Args:
        coordinator: host and port of process 0; None, as for the other two: as the environment says
            it (a TPU VM, Slurm, ...).

    Raises:
        UserError: the environment says nothing, or the others do not come.
    """
    try:
        if _has_tpu():
            return _meet(coordinator, processes, process, PATIENCE)
        if coordinator is None and processes is not None and process is not None:
            return process, processes
        print("note: waiting for the other processes", file=sys.stderr)
        return _sent(coordinator, processes, process, PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"--distributed: the processes do not meet: {_first_line(error)} (outside a TPU VM or "
            "Slurm give --coordinator, --processes and --process)"
        ) from None


def check_place(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Looks whether what a user says of the processes can be; arguments as of `join`.

    Raises:
        UserError: it cannot.
    """
    if coordinator is not None:
        match = re.fullmatch(r"(?:[^\s:]+|\[[^\s\]]+\]):([0-9]{1,5})", coordinator)
        if match is None or not 1 <= int(match[1]) <= 65535:
            raise UserError(
                f"--coordinator {coordinator}: must be HOST:PORT, the port from 1 to 65535"
            )
    check_range("--processes", processes, 1)
    if process is not None and not 0 <= process < (processes or process + 1):
        most = "" if processes is None else f" and under --processes {processes}"
        raise UserError(f"--process must be at least 0{most}, not {process}")


def _meet(
    coordinator: str | None, processes: int | None, process: int | None, patience: int
) -> tuple[int, int]:
    """The meeting, in this process."""
    import jax

    jax.distributed.initialize(coordinator, processes, process, initialization_timeout=patience)
    place = jax.process_index(), jax.process_count()
    jax.distributed.shutdown()
    return place


def _sent(*arguments: str | int | None) -> tuple[int, int]:
    """The meeting, in a child process, which ends with this one, whatever ends it.

    Raises:
        RuntimeError: there is none.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "entropix_jax.distributed", json.dumps(arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,  # left open: it ends with this process
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with child:
        try:
            assert child.stdout is not None
            told = child.stdout.read()
        except BaseException:
            child.kill()
            raise
    if not told:
        raise RuntimeError(f"not all had come after {arguments[-1]} s, or one was lost")
    place = json.loads(told)
    if isinstance(place, str):
        raise RuntimeError(place)
    index, count = place
    return index, count


def _attend() -> None:
    """What the child does: says on standard output who it is, or why that is not known."""

    def end_with_parent() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    place: tuple[int, int] | str
    try:
        place = _meet(*json.loads(sys.argv[1]))
    except (ValueError, RuntimeError) as error:
        place = _first_line(error)
    print(json.dumps(place), flush=True)
    os._exit(0)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _has_tpu() -> bool:
    """Whether JAX would take a TPU. To ask JAX itself would take it."""
    if importlib.util.find_spec("libtpu") is None:
        return False
    wanted = os.environ.get("JAX_PLATFORMS") or "tpu"
    chips = (*Path("/dev").glob("accel*"), *Path("/dev/vfio").glob("[0-9]*"))
    return "tpu" in wanted and bool(chips)


if __name__ == "__main__":
    _attend()
