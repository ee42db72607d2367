"""Compiles one of the engine's programs for a device that is not there, and reads what came of it.

    python scripts/device_program.py WANTED OUTPUT FOLDER     as JSON, a file and a folder for dumps

`scripts/devices.py` runs this in a process of its own for each program: what it sets is read once,
when JAX is imported. It needs the device's compiler, which JAX's package for that device
brings, and neither the device nor its driver.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from device_reading import Array, read_program

H100, V5E = "h100", "v5e"
DECODE, FORKED, PREFILL = "decode", "forked", "prefill"
PLATFORM = {H100: "cuda", V5E: "tpu"}
# The module that the compiler comes with, by platform.
COMPILER = {"cuda": "jax_cuda13_plugin", "tpu": "libtpu"}
# What the GPU's compiler asks a driver otherwise. Without the versions of driver and runtime it
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


@dataclass(frozen=True)
class Wanted:
    """A program to compile: for which device, which of the engine's, and its shapes."""

    device: str
    program: str
    batch: int
    mesh: str | None = None  # over eight devices; None: one device
    sampler: str = "entropix"
    context: int = 2048  # cache positions of a row, all of which a step reads
    prompt: int = 512  # tokens of a prompt that are read at once

    @property
    def shape(self) -> str:
        """In words."""
        mesh = "" if self.mesh is None else f", {self.mesh}"
        prompt = f", {self.prompt} tokens" if self.program == PREFILL else ""
        return f"{self.batch} x {self.context}{mesh}{prompt}"


def prepare(wanted: Wanted, folder: Path) -> None:
    """Sets what JAX and the compilers read when they are imported. What XLA dumps goes to the
    folder."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # what is read from it is not dumped
    flags = [f"--xla_dump_to={folder}", "--xla_dump_hlo_as_text"]
    if PLATFORM[wanted.device] == "tpu":
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


def topology(wanted: Wanted) -> Any:
    """The devices, as far as a compiler needs them."""
    from jax.experimental import topologies

    if wanted.device == H100:
        return topologies.get_topology_desc(platform="cuda", target_config=_H100, topology="1x1x1")
    shape = "2x2" if wanted.mesh is None else "2x4"
    return topologies.get_topology_desc(platform="tpu", topology_name=f"v5e:{shape}")


def arguments(wanted: Wanted) -> tuple[Any, Any, Any]:
    """Weights and state as `Engine` has them, shapes alone, and how numbers are sharded."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
    from llama_1b import LLAMA_3_2_1B as CONFIG

    from entropix_jax.engine.engine import shared_lanes
    from entropix_jax.engine.preparation import CalibratedSampler
    from entropix_jax.engine.slots import Layout, empty_slots, lanes_for
    from entropix_jax.model.mesh import DATA, parse_mesh, rules_for
    from entropix_jax.model.params import PACKED, pack, param_specs
    from entropix_jax.model.precision import choose_precision
    from entropix_jax.sampler.calibration import generic_calibration
    from entropix_jax.sampler.presets import load_sampler

    devices = topology(wanted).devices
    rules = None
    whole: jax.sharding.Sharding = SingleDeviceSharding(devices[0])
    if wanted.mesh is not None:
        rules = rules_for(parse_mesh(wanted.mesh, devices), CONFIG)
        whole = NamedSharding(rules.mesh, PartitionSpec())

    def placed(tree: Any, shardings: Any) -> Any:
        if shardings is None:
            shardings = jax.tree.map(lambda _: whole, tree)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
        )

    precision = choose_precision("bfloat16", PLATFORM[wanted.device])
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, precision.weights), param_specs(CONFIG)
    )
    if rules is None and PLATFORM[wanted.device] in PACKED:
        layers = jax.eval_shape(lambda layers: tuple(map(pack, layers)), params.layers)
        params = replace(params, layers=layers)
    # The tokens of texts and the values of thresholds change no shape.
    calibration = generic_calibration()
    sampler = load_sampler(wanted.sampler).resolve(calibration)
    settings = sampler.settings(
        num_layers=CONFIG.num_layers,
        epsilon=2.0**-8,
        encode=lambda text: [1, 2, 3],
        token_texts=list,
        vocab_size=CONFIG.vocab_size,
    )
    shards = 1 if rules is None else rules.mesh.shape[DATA]
    needed = lanes_for(CalibratedSampler(sampler, settings, calibration))
    lanes = shared_lanes(wanted.batch // shards, needed) if needed else 0
    state = jax.eval_shape(
        lambda: empty_slots(
            CONFIG,
            Layout(wanted.batch, lanes, shards),
            settings,
            capacity=wanted.context,
            dtype=precision.activations,
        )
    )
    return (
        placed(params, None if rules is None else rules.params(CONFIG)),
        placed(state, None if rules is None else rules.rows(state)),
        whole,
    )


def trace(wanted: Wanted, params: Any, state: Any, whole: Any) -> Any:
    """The traced program, called as `Engine` calls it."""
    import jax
    import jax.numpy as jnp
    from llama_1b import LLAMA_3_2_1B as CONFIG

    from entropix_jax.engine.decode import decode, decode_in_graph, prefill
    from entropix_jax.engine.preparation import MAX_STEPS
    from entropix_jax.engine.prompts import TOGETHER, may_join
    from entropix_jax.engine.state import Recording

    def integers(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

    if wanted.program == PREFILL:
        together = wanted.batch >= TOGETHER and may_join(wanted.prompt, wanted.prompt)
        rows = TOGETHER if together else 1
        slots = None if wanted.batch == 1 else integers(rows)
        prompt = integers(rows, wanted.prompt)
        return prefill.trace(
            params, state, prompt, integers(rows), slots, config=CONFIG, window=wanted.prompt
        )
    steps = decode_in_graph if PLATFORM[wanted.device] == "cuda" else decode
    return steps.trace(
        params,
        state,
        integers(),
        integers(),
        config=CONFIG,
        window=wanted.context,
        max_steps=MAX_STEPS,
        recording=Recording(),
        lanes=wanted.program == FORKED,
    )


def compile_program(wanted: Wanted, folder: Path) -> dict[str, Any]:
    """The figures of a program, which is compiled anew."""
    prepare(wanted, folder)
    import jax

    from entropix_jax.platforms import traced_for_all

    platform = PLATFORM[wanted.device]
    with traced_for_all(True):
        params, state, whole = arguments(wanted)
    times = [time.perf_counter()]
    with traced_for_all(True):
        traced = trace(wanted, params, state, whole)
    times.append(time.perf_counter())
    with jax.default_device(topology(wanted).devices[0]):  # of which Pallas asks the kind
        lowered = traced.lower(lowering_platforms=(platform,))
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())

    text, sequence = compiled.as_text(), None
    (folder / "program.txt").write_text(text, encoding="utf-8")
    if platform == "cuda":
        dumps = folder.glob(f"*.jit_{traced.fun_name}.thunk_sequence_after_thunk_passes.txt")
        newest = max(dumps, key=lambda path: path.stat().st_mtime)
        sequence = newest.read_text(encoding="utf-8")
    figures = read_program(
        text,
        sequence,
        in_loop=wanted.program != PREFILL,
        large=large_arrays(wanted, params, state),
        vocab=params.embedding.shape[0],
    )
    memory = compiled.memory_analysis()
    return {
        **asdict(wanted),
        "jax": jax.__version__,
        "seconds": [after - before for before, after in pairwise(times)],
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        **asdict(figures),
    }


def large_arrays(wanted: Wanted, params: Any, state: Any) -> Callable[[Array], bool]:
    """Whether an array of a device is a layer's keys or values, with or without those of lanes, or
    a matrix, in any order."""
    import jax

    def of_device(x: Any) -> tuple[int, ...]:
        shape: tuple[int, ...] = x.sharding.shard_shape(x.shape)
        return shape

    rows, *keys = of_device(state.cache.keys[0])
    sizes = [number * math.prod(keys) for number in (rows, rows - state.lanes)]
    matrices = [sorted(of_device(x)) for x in jax.tree.leaves(params) if x.ndim == 2]
    if wanted.program == PREFILL:  # whose activations have the shapes of matrices
        matrices = []

    def is_large(array: Array) -> bool:
        is_cache = array.size in sizes and {*keys[1:]} <= {*array.shape}
        is_matrix = sorted(size for size in array.shape if size > 1) in matrices
        return array.dtype == "bf16" and (is_cache or is_matrix)

    return is_large


if __name__ == "__main__":
    wanted, output, folder = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(compile_program(Wanted(**wanted), folder)), encoding="utf-8")
