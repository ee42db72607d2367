"""Compiles the engine's programs for an H100 or a TPU v5e, without the hardware.

    .venv-devices-tpu/bin/python scripts/devices.py v5e
    .venv-devices-tpu/bin/python scripts/devices.py v5e --programs decode --batch 64 --mesh model=8
    .venv-devices-cuda/bin/python scripts/devices.py h100 --json /tmp/figures.json

Llama-3.2-1B's shape in bfloat16, as `Engine` runs it: `decode` (steps while no row is forked),
`forked` (steps with the lanes of forks) and `prefill` (a part of a prompt). Nothing runs: figures
are JAX's memory analysis, and counts in the text of the compiled program. `scripts/test --devices`
makes the environments. They need the device's compiler, but neither the device nor its driver.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

H100, V5E = "h100", "v5e"
DECODE, FORKED, PREFILL = "decode", "forked", "prefill"
PLATFORM = {H100: "cuda", V5E: "tpu"}
COLLECTIVES = r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
# The compiler would ask a GPU's driver for these. Without the versions of driver and runtime it
# takes them for too old, and leaves conditionals and loops out of CUDA graphs.
_H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 13 minor: 0 }
dnn_version_info { major: 9 minor: 28 }
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  cuda_compute_capability { major: 9 }
  driver_version: "13.0.0"
  kernel_mode_driver_version: "580.159.4"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  core_count: 132
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  device_memory_size: 84929347584
  l2_cache_size: 52428800
}
"""


def prepare(device: str, folder: str) -> None:
    """Sets what JAX and the compilers read when they are imported. XLA's dumps go to the folder."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # what is read from it is not dumped
    flags = [f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text"]
    if PLATFORM[device] == "tpu":
        # Else it asks the network which TPU this machine is part of.
        os.environ["TPU_SKIP_MDS_QUERY"] = "1"
        # There is no TPU that two processes could use at once.
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        flags.append("--xla_gpu_autotune_level=0")  # there is nothing to time kernels on
    os.environ["XLA_FLAGS"] = " ".join(flags)


def topology(device: str, mesh: str | None) -> Any:
    """Returns the devices, as far as a compiler needs them: one, or eight TPUs for a mesh."""
    from jax.experimental import topologies

    if device == H100:
        return topologies.get_topology_desc(platform="cuda", target_config=_H100, topology="1x1x1")
    shape = "2x2" if mesh is None else "2x4"
    return topologies.get_topology_desc(platform="tpu", topology_name=f"v5e:{shape}")


def trace(args: argparse.Namespace, program: str, batch: int, devices: Any) -> Any:
    """Returns the traced program, with the shapes and shardings with which `Engine` calls it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
    from llama_1b import LLAMA_3_2_1B as CONFIG

    from entropix_jax.engine.calibrated import CalibratedSampler
    from entropix_jax.engine.decode import decode
    from entropix_jax.engine.loop import shared_lanes
    from entropix_jax.engine.prefill import prefill
    from entropix_jax.engine.programs import decode_in_graph
    from entropix_jax.engine.prompts import TOGETHER, may_join
    from entropix_jax.engine.shapes import MAX_STEPS
    from entropix_jax.engine.slots import Layout, empty_slots
    from entropix_jax.engine.state import Program
    from entropix_jax.model.mesh import DATA, param_shardings, parse_mesh, row_shardings
    from entropix_jax.model.params import param_specs
    from entropix_jax.model.precision import choose_precision
    from entropix_jax.sampler.calibration import generic_calibration
    from entropix_jax.sampler.presets import load_sampler

    mesh = None
    whole: jax.sharding.Sharding = SingleDeviceSharding(devices[0])
    if args.mesh is not None:
        mesh = parse_mesh(args.mesh, devices)
        whole = NamedSharding(mesh, PartitionSpec())

    def placed(tree: Any, shardings: Any) -> Any:
        if shardings is None:
            shardings = jax.tree.map(lambda _: whole, tree)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
        )

    def integers(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

    precision = choose_precision("bfloat16", PLATFORM[args.device])
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, precision.weights), param_specs(CONFIG)
    )
    # The tokens of texts and the values of thresholds change no shape.
    calibration = generic_calibration()
    sampler = load_sampler(args.sampler).resolve(calibration)
    settings = sampler.settings(
        num_layers=CONFIG.num_layers,
        epsilon=2.0**-8,
        encode=lambda text: [1, 2, 3],
        token_texts=list,
        vocab_size=CONFIG.vocab_size,
    )
    shards = 1 if mesh is None else mesh.shape[DATA]
    lanes = shared_lanes(batch // shards, CalibratedSampler(sampler, settings, calibration).lanes)
    state = jax.eval_shape(
        lambda: empty_slots(
            CONFIG,
            Layout(batch, lanes, shards),
            settings,
            mechanisms=sampler.mechanisms,
            capacity=args.context,
            dtype=precision.activations,
        )
    )
    params = placed(params, None if mesh is None else param_shardings(mesh, CONFIG))
    state = placed(state, None if mesh is None else row_shardings(mesh, state))
    if program == PREFILL:
        together = batch >= TOGETHER and may_join(args.prompt, args.prompt)
        rows = TOGETHER if together else 1
        prompts = integers(rows, args.prompt), integers(rows)
        slots = None if batch == 1 else integers(rows)
        return prefill.trace(params, state, *prompts, slots, config=CONFIG, window=args.prompt)
    steps = decode_in_graph if args.device == H100 else decode
    parts, lanes_run = sampler.parts(settings), program == FORKED
    return steps.trace(
        params,
        state,
        integers(),
        integers(),
        config=CONFIG,
        max_steps=MAX_STEPS,
        program=Program(parts, args.context, lanes=lanes_run),
    )


def compile_program(
    args: argparse.Namespace, program: str, batch: int, folder: Path
) -> dict[str, Any]:
    """Returns the figures of a program, which is compiled anew."""
    import jax

    from entropix_jax.platforms import traced_for_all

    devices = topology(args.device, args.mesh).devices
    started = time.perf_counter()
    with traced_for_all(True):
        traced = trace(args, program, batch, devices)
    with jax.default_device(devices[0]):  # of which Pallas asks the kind
        lowered = traced.lower(lowering_platforms=(PLATFORM[args.device],))
    compiled = lowered.compile()
    seconds, memory = time.perf_counter() - started, compiled.memory_analysis()
    launches = ""
    if args.device == H100:
        dumps = folder.glob(f"*.jit_{traced.fun_name}.thunk_sequence_after_thunk_passes.txt")
        launches = max(dumps, key=lambda path: path.stat().st_mtime).read_text(encoding="utf-8")
    return {
        "device": args.device,
        "program": program,
        "rows": batch,
        "mesh": args.mesh,
        "jax": jax.__version__,
        "seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        **read_program(compiled.as_text()),
        "waits": count_waits(launches),
    }


def read_program(text: str) -> dict[str, Any]:
    """Counts in a compiled program, each loop and branch once: sorts, exchanges between devices,
    and the cycles that a TPU's compiler estimates, without kernels of our own."""
    cycles = re.findall(r'"estimated_cycles":"(\d+)"', text)
    return {
        "sorts": len(re.findall(r" sort\(", text)),
        "exchanges": dict(Counter(re.findall(COLLECTIVES, text))),
        "cycles": sum(map(int, cycles)),
    }


def count_waits(launches: str) -> int:
    """Counts the loops and conditionals outside of CUDA graphs, for which a GPU waits for the host,
    in XLA's listing of a program's launches. Parts of a graph are indented below it."""
    waits, graph = 0, -1
    for indent, kind in re.findall(r"^( *)\d+: (k\w+)", launches, re.M):
        if len(indent) > graph >= 0:
            continue
        graph = len(indent) if kind == "kCommandBuffer" else -1
        waits += kind in ("kWhile", "kConditional")
    return waits


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints all figures; sizes are in GB."""
    table = Table(*("device", "program", "rows", "mesh", "compile", "arguments", "temporary"))
    for name in ("waits", "sorts", "exchanges", "million cycles"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            *(str(row[name] or "") for name in ("device", "program", "rows", "mesh")),
            f"{row['seconds']:.0f} s",
            *(f"{row[name] / 1e9:.2f}" for name in ("argument_bytes", "temporary_bytes")),
            *(str(row[name]) for name in ("waits", "sorts")),
            ", ".join(f"{count} {kind}" for kind, count in row["exchanges"].items()),
            f"{row['cycles'] / 1e6:.1f}" if row["cycles"] else "",
        )
    Console(width=140).print(table)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=PLATFORM)
    parser.add_argument(
        "--programs", nargs="+", choices=(DECODE, FORKED, PREFILL), default=[DECODE, PREFILL]
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 64], help="rows")
    parser.add_argument("--mesh", help="of eight TPUs, for example model=8")
    parser.add_argument("--sampler", default="entropix", help="a preset, or a sampler file")
    parser.add_argument("--context", type=int, default=2048, help="cache positions of a row")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt read at once")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(args.device, folder)
        rows = [
            compile_program(args, program, batch, Path(folder))
            for program in args.programs
            for batch in args.batch
        ]
    print_table(rows)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
