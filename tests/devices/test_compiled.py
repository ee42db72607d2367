"""What the compilers for an H100 and a TPU v5e make of a step and of reading a prompt.

Nothing runs. The bounds are what is true now, of the versions of JAX that the extras `devices-cuda`
and `devices-tpu` pin: a change that lowers a figure lowers its bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import devices
import pytest
from device_program import DECODE, FORKED, H100, PLATFORM, PREFILL, V5E, Wanted
from jax.sharding import AbstractMesh
from llama_1b import LLAMA_3_2_1B

from entropix_jax.engine.memory import plan_memory
from entropix_jax.model.mesh import DATA, MODEL
from entropix_jax.model.precision import choose_precision
from entropix_jax.platforms import traced_for_all
from tests.support.samplers import LITERAL

pytestmark = pytest.mark.devices

# A version of a package that comes with the compiler may move figures a little.
SLACK = 1.02


@dataclass(frozen=True)
class Most:
    """Upper bounds."""

    temporary: float  # GB beside the arguments
    moved: float  # GB read and written, see `device_reading.Figures`
    kernels: int
    copies: int = 0  # of a whole array of the cache, or of a weight
    sorts: int = 0  # of the vocabulary
    call_copies: int = 0  # once in each call
    syncs: int = 0
    branch_syncs: int = 0
    cycles: float = 0  # millions, of a TPU, without its 32 kernels that write the cache
    collectives: int = 0


MOST: dict[Wanted, Most] = {
    Wanted(H100, DECODE, 1): Most(temporary=0.006, moved=2.57, kernels=252),
    Wanted(H100, DECODE, 64): Most(temporary=0.311, moved=8.87, kernels=305),
    Wanted(H100, PREFILL, 1): Most(temporary=0.053, moved=5.29, kernels=278),
    Wanted(H100, PREFILL, 64): Most(temporary=0.072, moved=6.44, kernels=316),
    Wanted(H100, PREFILL, 64, prompt=128): Most(temporary=0.0442, moved=4.45, kernels=282),
    Wanted(V5E, DECODE, 1): Most(temporary=0.038, moved=2.57, kernels=1167, cycles=4.07),
    Wanted(V5E, DECODE, 64): Most(temporary=0.77, moved=10.14, kernels=1524, cycles=28.0),
    Wanted(V5E, DECODE, 64, "model=8"): Most(
        temporary=0.25, moved=1.57, kernels=1538, cycles=5.63, collectives=35
    ),
    Wanted(V5E, DECODE, 64, "data=8"): Most(
        temporary=0.091, moved=3.18, kernels=1572, cycles=6.48, collectives=2
    ),
    Wanted(V5E, FORKED, 64, sampler=LITERAL): Most(
        temporary=0.996, moved=10.87, kernels=1840, cycles=33.5
    ),
    Wanted(V5E, PREFILL, 1): Most(temporary=0.037, moved=2.0, kernels=828, copies=4, cycles=9.58),
    Wanted(V5E, PREFILL, 64): Most(temporary=0.036, moved=2.99, kernels=807, cycles=9.68),
    Wanted(V5E, PREFILL, 64, prompt=128): Most(
        temporary=0.0397, moved=2.14, kernels=1014, cycles=9.74
    ),
}


def check(figures: dict[str, Any], most: Most) -> list[str]:
    """What is above its bound, each with what there is."""
    copies, call_copies = figures["copies"], figures["call_copies"]
    found = {
        "temporary": (figures["temporary_bytes"] / 1e9, most.temporary * SLACK),
        "moved": (figures["bytes_moved"] / 1e9, most.moved * SLACK),
        "kernels": (figures["kernels"], most.kernels * SLACK),
        "cycles": (figures["cycles"] / 1e6, most.cycles * SLACK),
        "copies": (sum(copies.values()), most.copies),
        "call_copies": (sum(call_copies.values()), most.call_copies),
        "sorts": (figures["sorts"], most.sorts),
        "syncs": (figures["syncs"], most.syncs),
        "branch_syncs": (figures["branch_syncs"], most.branch_syncs),
        "collectives": (sum(figures["collectives"].values()), most.collectives),
    }
    details = {"copies": copies, "call_copies": call_copies, "collectives": figures["collectives"]}
    return [
        f"{name}: {number:.6g}, at most {bound:.6g} {details.get(name, '')}".rstrip()
        for name, (number, bound) in found.items()
        if number > bound
    ]


def planned(wanted: Wanted) -> int:
    """The bytes of a device that are planned before anything is compiled."""
    precision = choose_precision("bfloat16", PLATFORM[wanted.device])
    mesh: Any = None
    if wanted.mesh is not None:
        sizes = {DATA: 1, MODEL: 1} | {wanted.mesh.split("=")[0]: 8}
        mesh = AbstractMesh((sizes[DATA], sizes[MODEL]), (DATA, MODEL))
    with traced_for_all(True):  # else the cache is one of a CPU
        plan = plan_memory(
            LLAMA_3_2_1B, precision, slots=wanted.batch, capacity=wanted.context, mesh=mesh
        )
    return plan.total


@pytest.mark.parametrize(
    "wanted", MOST, ids=lambda wanted: f"{wanted.device} {wanted.program} {wanted.shape}"
)
def test_no_figure_rises(wanted: Wanted) -> None:
    if devices.python_for(wanted.device) is None:
        pytest.skip(devices.missing(wanted.device))
    figures = devices.measured(wanted)
    assert check(figures, MOST[wanted]) == [], figures
    if wanted.program == DECODE:
        assert (
            0.9 < planned(wanted) / (figures["argument_bytes"] + figures["temporary_bytes"]) < 1.05
        )
