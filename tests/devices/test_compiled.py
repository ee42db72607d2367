"""Decode and prefill, compiled for an H100 and a TPU v5e.

No program runs. The bounds were measured with the versions of JAX that the extras `devices-cuda`
and `devices-tpu` pin. A change that lowers a figure lowers its bound.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from devices import DECODE, H100, PLATFORM, PREFILL, V5E, count_waits, read_program
from llama_1b import LLAMA_3_2_1B

from entropix_jax.engine.memory import plan_memory
from entropix_jax.model.precision import choose_precision
from entropix_jax.platforms import traced_for_all

ROOT = Path(__file__).parents[2]
CONTEXT = 2048
# Versions of packages that belong to the compiler may change figures slightly.
SLACK = 1.02
# In XLA's format. A condition is not indented.
LAUNCHES = """\
000: kCopy [source | sink] kCopy
001: kWhile [prev=000 (1) | sink]
condition:
    002: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        003: kCustomKernel [source | sink] loop_select_fusion grid: [1, 1, 1]
        004: kConditional [source | sink]
          false_branch:
            005: kCopy [source | sink] kCopy
    007: kConditional [source | sink]
      false_branch:
        No thunks.      true_branch:
        008: kConditional [source | sink]
"""
ALL_IN_A_GRAPH = """\
000: kCommandBuffer [source | sink]
    001: kCopy [source | next=002 (1)] kCopy
    002: kWhile [prev=001 (1) | next=006 (1)]
condition:
        003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
      body:
        005: kConditional [source | sink]
"""
TPU = """\
  %first = (f32[4]{0}, s32[4]{0}) custom-call(%l), backend_config={"estimated_cycles":"250"}
  %sort.1 = f32[64]{0} sort(%l), dimensions={0}, to_apply=%less
  %all = bf16[8,16]{1,0} all-reduce(%near), backend_config={"estimated_cycles":"50"}
  %gathered = (f32[32]{0}, f32[64]{0}) all-gather-start(%l), dimensions={0}
  %done = f32[64]{0} all-gather-done(%gathered)
"""


@dataclass(frozen=True)
class Bounds:
    """Upper bounds."""

    temporary: float = math.inf  # GB, in addition to the arguments
    sorts: float = math.inf
    cycles: float = math.inf  # millions, of a TPU, without the kernels that write the cache


# We have not measured the H100 since the default preset branches.
BOUNDS: dict[tuple[str, str, int], Bounds] = {
    (H100, DECODE, 1): Bounds(),
    (H100, DECODE, 64): Bounds(),
    (V5E, DECODE, 1): Bounds(temporary=0.0558, sorts=2, cycles=5.91),
    (V5E, DECODE, 64): Bounds(temporary=0.765, sorts=4, cycles=38.5),
    (V5E, PREFILL, 64): Bounds(temporary=0.0397, sorts=0, cycles=10.5),
}


def python_for(device: str) -> Path:
    """Returns the interpreter with the compiler for a device, made by `scripts/test --devices`."""
    platform = PLATFORM[device]
    named = os.environ.get(f"ENTROPIX_DEVICES_{platform.upper()}")
    return Path(named or ROOT / f".venv-devices-{platform}" / "bin" / "python")


def planned(device: str, batch: int) -> int:
    """Returns the planned bytes of a device, before any compilation, without lanes."""
    precision = choose_precision("bfloat16", PLATFORM[device])
    with traced_for_all(True):  # else the cache has the layout of a CPU
        plan = plan_memory(LLAMA_3_2_1B, precision, slots=batch, capacity=CONTEXT, mesh=None)
    return plan.total


@pytest.mark.devices
@pytest.mark.parametrize(("device", "program", "batch"), BOUNDS)
def test_figures_are_within_bounds(device: str, program: str, batch: int, tmp_path: Path) -> None:
    python, file = python_for(device), tmp_path / "figures.json"
    if not python.exists():
        pytest.skip(f"{python} is missing: scripts/test --devices makes it")
    command = [str(python), str(ROOT / "scripts" / "devices.py"), device, "--programs", program]
    command += ["--batch", str(batch), "--context", str(CONTEXT), "--prompt", "128"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--json", str(file)], env=environment, check=True)
    (figures,) = json.loads(file.read_text(encoding="utf-8"))
    most = BOUNDS[device, program, batch]
    assert figures["temporary_bytes"] / 1e9 <= most.temporary * SLACK
    assert figures["cycles"] / 1e6 <= most.cycles * SLACK
    assert figures["sorts"] <= most.sorts
    assert figures["waits"] == 0
    if program == DECODE:
        taken = figures["argument_bytes"] + figures["temporary_bytes"]
        assert 0.8 < planned(device, batch) / taken < 1.05


def test_read_program() -> None:
    exchanges = {"all-reduce": 1, "all-gather": 1}
    assert read_program(TPU) == {"sorts": 1, "exchanges": exchanges, "cycles": 300}


def test_loops_outside_graphs_wait_for_the_host() -> None:
    assert count_waits(LAUNCHES) == 3
    assert count_waits(ALL_IN_A_GRAPH) == 0
