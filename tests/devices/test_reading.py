"""What is read off a compiled program, on programs small enough to read by hand."""

from __future__ import annotations

from pathlib import Path

import devices
import pytest
from device_program import H100, V5E
from device_reading import Array, read_program

# A loop of three kernels: one copies an array, one writes a slot of it in place, one sorts. A
# conditional copies once more, in one of its branches.
GPU = """\
HloModule jit_decode, is_scheduled=true

FileNames
1 "/home/entropix_jax/model/attention.py"

FunctionNames
1 "attend.<locals>.masked"

FileLocations
1 {file_name_id=1 function_name_id=1 line=81 end_line=81 column=17 end_column=72}

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%fused_masked (p.0: bf16[4,8], p.1: pred[4,8]) -> bf16[4,8] {
  %p.0 = bf16[4,8]{1,0} parameter(0)
  %p.1 = pred[4,8]{1,0} parameter(1)
  ROOT %select.1 = bf16[4,8]{1,0} select(%p.1, %p.0, %p.0)
}

%fused_written (p.2: bf16[4,8], p.3: bf16[1,8], p.4: s32[]) -> bf16[4,8] {
  %p.2 = bf16[4,8]{1,0} parameter(0)
  %p.3 = bf16[1,8]{1,0} parameter(1)
  %p.4 = s32[] parameter(2)
  ROOT %put.1 = bf16[4,8]{1,0} dynamic-update-slice(%p.2, %p.3, %p.4, %p.4)
}

%fused_sorted (p.5: f32[16]) -> f32[16] {
  %p.5 = f32[16]{0} parameter(0)
  ROOT %sort.1 = f32[16]{0} sort(%p.5), dimensions={0}, to_apply=%less
}

%fused_taken (p.6: bf16[4,8], p.7: s32[]) -> bf16[1,8] {
  %p.6 = bf16[4,8]{1,0} parameter(0)
  %p.7 = s32[] parameter(1)
  ROOT %slice.1 = bf16[1,8]{1,0} dynamic-slice(%p.6, %p.7, %p.7), dynamic_slice_sizes={1,8}
}

%less (a: f32[], b: f32[]) -> pred[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%no (n: bf16[4,8]) -> bf16[4,8] {
  ROOT %n = bf16[4,8]{1,0} parameter(0)
}

%yes (y: bf16[4,8]) -> bf16[4,8] {
  %y = bf16[4,8]{1,0} parameter(0)
  ROOT %copy.1 = bf16[4,8]{1,0} copy(%y)
}

%body (s: (s32[], bf16[4,8], pred[4,8], f32[16])) -> (s32[], bf16[4,8], pred[4,8], f32[16]) {
  %s = (s32[], bf16[4,8]{1,0}, pred[4,8]{1,0}, f32[16]{0}) parameter(0)
  %at = s32[] get-tuple-element(%s), index=0
  %keys = bf16[4,8]{1,0} get-tuple-element(%s), index=1
  %mask = pred[4,8]{1,0} get-tuple-element(%s), index=2
  %logits = f32[16]{0} get-tuple-element(%s), index=3
  %taken = bf16[1,8]{1,0} fusion(%keys, %at), kind=kLoop, calls=%fused_taken
  %masked = bf16[4,8]{1,0} fusion(%keys, %mask), kind=kLoop, calls=%fused_masked, \
metadata={op_name="jit(decode)/while/body/select_n" stack_frame_id=1}
  %written = bf16[4,8]{1,0} fusion(%masked, %taken, %at), kind=kLoop, calls=%fused_written
  %sorted = f32[16]{0} fusion(%logits), kind=kCustom, calls=%fused_sorted
  %either = bf16[4,8]{1,0} conditional(%at, %written, %written), branch_computations={%no, %yes}
  ROOT %next = (s32[], bf16[4,8]{1,0}, pred[4,8]{1,0}, f32[16]{0}) \
tuple(%at, %either, %mask, %sorted)
}

%more (m: (s32[], bf16[4,8], pred[4,8], f32[16])) -> pred[] {
  %m = (s32[], bf16[4,8]{1,0}, pred[4,8]{1,0}, f32[16]{0}) parameter(0)
  ROOT %always = pred[] constant(true)
}

ENTRY %main (i: s32[], k: bf16[4,8], v: pred[4,8], l: f32[16]) -> bf16[4,8] {
  %i = s32[] parameter(0)
  %k = bf16[4,8]{1,0} parameter(1)
  %v = pred[4,8]{1,0} parameter(2)
  %l = f32[16]{0} parameter(3)
  %before = bf16[4,8]{1,0} copy(%k)
  %start = (s32[], bf16[4,8]{1,0}, pred[4,8]{1,0}, f32[16]{0}) tuple(%i, %before, %v, %l)
  %loop = (s32[], bf16[4,8]{1,0}, pred[4,8]{1,0}, f32[16]{0}) while(%start), condition=%more, \
body=%body
  ROOT %out = bf16[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""
SEQUENCE = """\
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
        006: kCustomKernel [source | sink] sort_1 grid: [1, 1, 1]
    007: kConditional [source | sink]
      false_branch:
        No thunks.      true_branch:
        008: kConditional [source | sink]
          true_branch:
            009: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1]
010: kCustomKernel [source | sink] loop_add_fusion_2 grid: [1, 1, 1]
"""
# The same where the loop is part of a graph.
GRAPH = """\
000: kCommandBuffer [source | sink]
    001: kCopy [source | next=002 (1)] kCopy
    002: kWhile [prev=001 (1) | next=006 (1)]
condition:
        003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1]
      body:
        004: kCustomKernel [source | sink] sort_1 grid: [1, 1, 1]
        005: kConditional [source | sink]
          true_branch:
            006: kCopy [source | sink] kCopy
    007: kCopy [prev=002 (1) | sink] kCopy
"""
# Of a TPU: a prefetch into near memory, a write back, a top-k, and two exchanges.
TPU = """\
HloModule jit_prefill, is_scheduled=true

ENTRY %main (w: bf16[8,16], l: f32[64]) -> bf16[8,16] {
  %w = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %l = f32[64]{0:T(128)} parameter(1)
  %fetch = (bf16[8,16]{1,0:T(8,128)(2,1)S(1)}, bf16[8,16]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) \
copy-start(%w)
  %near = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} copy-done(%fetch)
  %all = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} all-reduce(%near), replica_groups={{0,1}}
  %back = (bf16[8,16]{1,0:T(8,128)(2,1)}, bf16[8,16]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) \
copy-start(%all)
  %gathered = (f32[32]{0:T(128)}, f32[64]{0:T(128)}) all-gather-start(%l), dimensions={0}
  %first = (f32[4]{0:T(128)}, s32[4]{0:T(128)}) custom-call(%l), custom_call_target="TopK", \
backend_config={"estimated_cycles":"250"}
  ROOT %out = bf16[8,16]{1,0:T(8,128)(2,1)} copy-done(%back)
}
"""
# A kernel that writes into the cache that it is given, and says how much it moves.
WRITTEN = """\
HloModule jit_prefill, is_scheduled=true

ENTRY %main (n: bf16[4,8], c: bf16[4,16]) -> bf16[4,16] {
  %n = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %c = bf16[4,16]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %out = bf16[4,16]{1,0:T(8,128)(2,1)} custom-call(%n, %c), \
custom_call_target="tpu_custom_call", output_to_operand_aliasing={{}: (1, {})}, \
backend_config={"custom_call_config":{"cost_estimate":{"flops":"0","bytes_accessed":"48"}}}
}
"""


# A kernel of our own, which writes into its second operand.
KERNEL = r"""
HloModule jit_prefill, is_scheduled=true

ENTRY %main (q: bf16[8], k: bf16[4,8]) -> bf16[4,8] {
  %q = bf16[8]{0} parameter(0)
  %k = bf16[4,8]{1,0} parameter(1)
  %both = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) custom-call(%q, %k), \
custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{0}: (1, {})}, \
backend_config={name = "attend", serialized_metadata = "{\22bytes\22: \2248\22}"}
  ROOT %out = bf16[4,8]{1,0} get-tuple-element(%both), index=0
}
""".replace("\\\n", "")


def is_large(array: Array) -> bool:
    return array.dtype == "bf16" and array.size >= 32


def test_a_step_of_a_gpu() -> None:
    """What is sliced counts as the slice, what is written in place as what is put there; branches
    count apart, and a loop or conditional outside of a graph has the host wait."""
    figures = read_program(GPU, SEQUENCE, in_loop=True, large=is_large, vocab=16)
    whole, one, mask, logits = 64, 16, 32, 64
    moved = (one + one) + (whole + mask + whole) + (one + one + 4) + (logits + logits)
    assert figures.bytes_moved - moved == 4  # the slice's index
    assert figures.copies == {"bf16[4,8] model/attention.py masked": 1}
    assert figures.by_place["model/attention.py masked"] == (whole + mask + whole, 1, 0)
    assert figures.copied_bytes == whole
    assert figures.call_copies == {"bf16[4,8] copy": 1}
    assert (figures.sorts, figures.top_ks) == (1, 0)
    assert (figures.kernels, figures.sort_kernels, figures.graphs) == (3, 1, 1)
    assert (figures.syncs, figures.branch_kernels, figures.branch_syncs) == (2, 2, 1)


def test_a_loop_that_is_part_of_a_graph() -> None:
    """No host waits for it, or for a conditional in it."""
    figures = read_program(GPU, GRAPH, in_loop=True, large=is_large, vocab=16)
    assert (figures.kernels, figures.sort_kernels, figures.graphs) == (2, 1, 0)
    assert (figures.syncs, figures.branch_kernels, figures.branch_syncs) == (0, 1, 0)


def test_a_program_of_a_tpu() -> None:
    """What is fetched into near memory is read, not copied; what is written back is."""
    figures = read_program(TPU, None, in_loop=False, large=is_large, vocab=64)
    assert figures.copies == {"bf16[8,16] transfers": 1}
    assert (figures.sorts, figures.top_ks) == (0, 1)
    assert figures.collectives == {"all-reduce": 1, "all-gather": 1}
    assert figures.collective_bytes == 256 + 256
    assert figures.cycles == 250
    assert figures.by_place["custom-call"] == (256 + 16 + 16, 1, 250)


def test_a_kernel_says_what_it_moves() -> None:
    """And what it makes is no copy where it is written into what it was given."""
    figures = read_program(KERNEL, "000: kKernel", in_loop=False, large=is_large, vocab=64)
    assert figures.bytes_moved == 48
    assert figures.copies == {"bf16[8,8] custom-call": 1}


def test_what_is_made_where_it_is_taken_is_not_read_whole() -> None:
    """Of the operands of a gather of sums, as much as it takes."""
    gather = """
HloModule jit_prefill, is_scheduled=true

%fused (p.0: f32[64], p.1: f32[64], p.2: s32[2,1]) -> f32[2] {
  %p.0 = f32[64]{0} parameter(0)
  %p.1 = f32[64]{0} parameter(1)
  %p.2 = s32[2,1]{1,0} parameter(2)
  %sum = f32[64]{0} add(%p.0, %p.1)
  ROOT %taken = f32[2]{0} gather(%sum, %p.2), offset_dims={}, slice_sizes={1}
}

ENTRY %main (a: f32[64], b: f32[64], i: s32[2,1]) -> f32[2] {
  %a = f32[64]{0} parameter(0)
  %b = f32[64]{0} parameter(1)
  %i = s32[2,1]{1,0} parameter(2)
  ROOT %out = f32[2]{0} fusion(%a, %b, %i), kind=kLoop, calls=%fused
}
"""
    figures = read_program(gather, "000: kKernel", in_loop=False, large=is_large, vocab=64)
    assert figures.bytes_moved == 8 + 8 + 8 + 8  # twice two numbers, two indices, two results


def test_a_kernel_that_updates_in_place() -> None:
    figures = read_program(WRITTEN, None, in_loop=False, large=is_large, vocab=64)
    assert figures.copies == {}
    assert figures.bytes_moved == 48


def test_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "ROOT", tmp_path)
    for platform in ("CUDA", "TPU"):
        monkeypatch.setenv(f"ENTROPIX_DEVICES_{platform}", str(tmp_path / "python"))
    assert devices.main(["--devices", H100, V5E]) == devices.EXIT_MISSING == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == [
        "pip install -e '.[devices-cuda]'",
        "pip install -e '.[devices-tpu]'",
    ]
