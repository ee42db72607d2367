"""Memory plans, free memory, and errors that come before anything is allocated."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import entropix_jax
from entropix_jax.engine.memory import check_memory, max_slots, plan_memory
from entropix_jax.errors import UserError
from entropix_jax.host import memory as free_memory
from entropix_jax.model import loading
from entropix_jax.model.cache import init_cache
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.model.mesh import param_shardings, parse_mesh, row_shardings, weights_bytes
from entropix_jax.model.precision import choose_precision
from tests.support.model_folders import config_of_folder
from tests.support.models import random_params, tiny_config
from tests.support.runs import Spec, run_specs


def set_free_bytes(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    """Makes every device report `free` bytes."""
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: free)


@pytest.mark.parametrize(
    ("mesh", "vocabulary"), [(None, 64), ("data=2", 64), ("model=2", 64), ("model=2", 63)]
)
def test_the_plan_equals_the_bytes_of_the_arrays(mesh: str | None, vocabulary: int) -> None:
    """Norms, and a vocabulary that does not divide, are replicated."""
    config, precision = tiny_config(vocab_size=vocabulary), choose_precision("float32", "cpu")
    devices = parse_mesh(mesh, jax.devices()[: 1 if mesh is None else 2])
    weights = jax.device_put(random_params(config), param_shardings(devices, config))
    cache = init_cache(config, 8, 64, precision.activations)
    cache = jax.device_put(cache, row_shardings(devices, cache))

    def held(tree: Any) -> int:
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    plan = plan_memory(config, precision, slots=8, capacity=64, mesh=devices if mesh else None)
    assert plan.weights == held(weights)
    assert plan.cache == held((cache.keys, cache.values))
    assert plan.total > plan.weights + plan.cache


@pytest.mark.parametrize("number", [1, 16])
def test_max_slots(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the free memory stays free. A CPU's free memory excludes the loaded weights, while
    the limit of another device includes them. CPU devices share one memory."""
    config, precision = config_of_folder(), choose_precision("float32", "cpu")
    plan = plan_memory(config, precision, slots=number, capacity=1024, mesh=None)
    needed = (plan.total - plan.weights) * 5 // 4 + 1

    def most(free: int | None, mesh: Any = None) -> int:
        set_free_bytes(monkeypatch, free)
        model: Any = SimpleNamespace(config=config, precision=precision, mesh=mesh)
        return max_slots(model, slots=16, capacity=1024)

    assert most(None) == 16
    assert [most(needed), most(needed - 3)] == [number, number - 1]
    assert most(2 * needed, parse_mesh("data=2", jax.devices()[:2])) == min(2 * number, 16)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="gpu")])
    assert [most(plan.weights + needed - less) for less in (0, 3)] == [number, number - 1]


def test_memory_errors_say_how_many_slots_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    config, precision = config_of_folder(), choose_precision("float32", "cpu")
    free = plan_memory(config, precision, slots=6, capacity=64, mesh=None).total
    set_free_bytes(monkeypatch, free)
    assert "weights" in check_memory(config, precision, slots=6, capacity=64, mesh=None)
    with pytest.raises(UserError, match=r"at most 6 slots fit \(--slots 6\)$"):
        check_memory(config, precision, slots=7, capacity=64, mesh=None)
    weights = weights_bytes(config, precision.weights)
    for free, advice in ((weights, r"lower --context"), (weights - 1, r"not even the weights")):
        set_free_bytes(monkeypatch, free)
        with pytest.raises(UserError, match=advice):
            check_memory(config, precision, slots=7, capacity=64, mesh=None)
    set_free_bytes(monkeypatch, None)
    assert check_memory(config, precision, slots=10**9, capacity=64, mesh=None)


def test_every_run_checks_memory_before_it_allocates(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine rejects a cache that does not fit before it is allocated."""
    plan = plan_memory(tiny.config, tiny.precision, slots=64, capacity=4096, mesh=None)
    requests = [Spec([tiny.tokenizer.bos_id or 0], str(i), 4000) for i in range(64)]
    set_free_bytes(monkeypatch, plan.cache + plan.logits)
    run_specs(tiny, requests)
    set_free_bytes(monkeypatch, plan.cache + plan.logits - 1)
    # Some rows wait for slots then. (A fifth of the memory is for prompts.)
    assert run_specs(tiny, requests).engine._layout.slots in range(40, 64)
    set_free_bytes(monkeypatch, (plan.cache + plan.logits) // 64 - 1)
    with pytest.raises(UserError, match=r"1 row of 4096 tokens would not fit"):
        run_specs(tiny, requests)


def test_a_finished_run_frees_its_cache(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users may keep results for long. An unfinished run that is deleted frees its cache, too."""

    def caches() -> int:
        shape = (3, tiny.config.num_kv_heads, 256, tiny.config.head_dim)
        return sum(x.shape == shape for x in jax.live_arrays())

    gc.collect()
    assert caches() == 0
    run = entropix_jax.stream(tiny, "Once", "greedy", samples=3, max_new_tokens=5)
    next(iter(run))
    assert caches() >= 2 * tiny.config.num_layers
    rows = run.run()
    assert (caches(), len(rows)) == (0, 3)
    left = entropix_jax.stream(tiny, "Once", "greedy", samples=3, max_new_tokens=50)
    next(iter(left))
    del left
    set_free_bytes(monkeypatch, 0)
    with pytest.raises(UserError, match="would not fit"):
        entropix_jax.stream(tiny, "Once", "greedy")
    assert caches() == 0


def test_weights_that_do_not_fit_are_not_loaded(
    tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = weights_bytes(tiny.config, jnp.dtype(jnp.float32))
    for free in (held, None):
        set_free_bytes(monkeypatch, free)
        assert load("tiny", dtype="float32").config == tiny.config
    monkeypatch.setattr(loading, "read_params", None)
    for free, dtype, line in (
        (held - 1, "float32", r"tiny: its weights do not fit .* int8 takes less"),
        (held // 5, "int8", r"its weights do not fit .* of [0-9.]+ .B$"),
    ):
        set_free_bytes(monkeypatch, free)
        with pytest.raises(UserError, match=line):
            load("tiny", dtype=dtype)


def test_memory_limits_of_control_groups(tmp_path: Path) -> None:
    """Each level of a control group may have a limit, in both versions. In a container, the path of
    the process may be the host's."""

    def group(folder: Path, limit: object, used: int, cached: int, *, first: bool = False) -> None:
        limit_file, usage_file, prefix = free_memory._GROUP_1 if first else free_memory._GROUP_2
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_file).write_text(f"{limit}\n")
        (folder / usage_file).write_text(f"{used}\n")
        kinds = f"{prefix}inactive_file {cached - 3}\n{prefix}active_file 3\n"
        (folder / "memory.stat").write_text(f"anon 5\n{kinds}")

    def free(line: str) -> list[int]:
        (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
        return sorted(free_memory._free_of_groups(tmp_path / "cgroup", tmp_path / "fs"))

    root = tmp_path / "fs"
    group(root / "slurm" / "job", 1000, 300, 50)
    group(root / "slurm", "max", 5000, 50)
    group(root, 900, 803, 3)
    group(root / "memory" / "docker", 400, 500, 20, first=True)
    assert free("0::/slurm/job/step") == free("0::/slurm/job") == [100, 750]
    assert free("0::/not/seen/from/here") == [100]
    assert (free("4:memory:/docker"), free("3:cpuset:/docker")) == ([0], [])
    assert free_memory._free_of_groups(tmp_path / "none", tmp_path / "fs") == []


glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


@glibc
def test_freed_memory_is_reused() -> None:
    """Large arrays are allocated again without new pages."""
    program = """
        import resource
        import numpy as np
        from entropix_jax.host.heap import reuse_memory

        def faults():
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

        reuse_memory()
        np.ones(1 << 24, np.uint8)
        before = faults()
        for _ in range(20):
            np.ones(1 << 24, np.uint8)
        print(faults() - before)
    """
    command = [sys.executable, "-c", dedent(program)]
    assert int(subprocess.check_output(command, text=True)) < 20


@glibc
def test_commands_allocate_in_one_arena() -> None:
    """The threads of JAX do not get arenas of their own, which would unmap freed memory."""
    program = """
        import ctypes
        import sys
        from entropix_jax.__main__ import main

        sys.argv = ["entropix-jax", "--version"]
        main()
        import jax.numpy as jnp

        (jnp.ones(9) + 1).block_until_ready()
        library = ctypes.CDLL(None)
        library.malloc_info(0, ctypes.c_void_p.in_dll(library, "stdout"))
    """
    printed = subprocess.check_output([sys.executable, "-c", dedent(program)], text=True)
    assert printed.count("<heap nr=") == 1
