"""Memory: what a batch will take, what there is, and the refusal before anything is taken."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import entropix_jax
from entropix_jax import free_memory, loading
from entropix_jax.cache import init_cache
from entropix_jax.decode_state import Recording, init_log
from entropix_jax.errors import UserError
from entropix_jax.free_memory import free_bytes
from entropix_jax.generation import Generation
from entropix_jax.loading import load
from entropix_jax.memory import check_memory, most_slots, plan_memory
from entropix_jax.params import init_params
from entropix_jax.precision import choose_precision
from entropix_jax.preparation import MAX_STEPS
from entropix_jax.results import Request
from entropix_jax.sharding import parse_mesh, place, rules_for, weights_bytes
from tests.folders import config_of_folder
from tests.models import random_params, tiny_config


def give(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    """Lets every device have so many bytes to give."""
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: free)


def test_the_plan_of_memory_counts_what_there_is() -> None:
    """Weights and cache are what the arrays hold; rows and devices scale as they should."""
    config, precision = config_of_folder(), choose_precision("float32", "cpu")
    one = plan_memory(config, precision, slots=1, capacity=64)
    many = plan_memory(config, precision, slots=8, capacity=64)
    weights = init_params(config, jax.random.key(0), precision.weights)
    cache = init_cache(config, 8, 64, precision.activations)
    assert one.weights == many.weights == sum(x.nbytes for x in jax.tree.leaves(weights))
    assert many.cache == sum(x.nbytes for x in (*cache.keys, *cache.values)) == 8 * one.cache
    assert plan_memory(config, precision, slots=8, capacity=64, data=4).cache == 2 * one.cache
    assert plan_memory(config, precision, slots=8, capacity=64, model=2).cache == 4 * one.cache


@pytest.mark.parametrize("vocabulary", [64, 63])
def test_the_plan_of_memory_knows_what_is_not_split(vocabulary: int) -> None:
    """A vocabulary that does not divide, and norms, lie whole on each device."""
    config, precision = tiny_config(vocab_size=vocabulary), choose_precision("float32", "cpu")
    rules = rules_for(parse_mesh("model=2", jax.devices()[:2]), config)
    weights = place(random_params(config), rules.params(config))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(weights))
    assert plan_memory(config, precision, slots=2, capacity=64, model=2).weights == held


def test_the_plan_of_memory_counts_records() -> None:
    """What a chunk of steps records of a trace's extras, in steps and in what branched."""
    config, precision = config_of_folder(), choose_precision("float32", "cpu")
    recording = Recording(top=50, layers=True)
    plain = plan_memory(config, precision, slots=8, capacity=64)
    full = plan_memory(config, precision, slots=8, capacity=64, recording=recording)
    log = jax.eval_shape(lambda: init_log(config, 8 + 4 * MAX_STEPS, recording)).branches.notes
    steps = MAX_STEPS * 8 * (50 * 8 + config.num_layers * config.num_heads * 4)
    notes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(log))
    assert full.total - plain.total == full.records == 2 * (steps + notes)
    assert "records" in str(full)
    assert "records" not in str(plain)


def test_what_does_not_fit_names_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    config, precision = config_of_folder(), choose_precision("float32", "cpu")
    free = plan_memory(config, precision, slots=6, capacity=64).total
    give(monkeypatch, free)
    assert "weights" in check_memory(config, precision, slots=6, capacity=64)
    with pytest.raises(UserError, match=r"at most 6 slots fit \(--slots 6\)$"):
        check_memory(config, precision, slots=7, capacity=64)
    weights = weights_bytes(config, precision.weights)
    for free, advice in ((weights, r"fewer tokens a row"), (weights - 1, r"not even the weights")):
        give(monkeypatch, free)
        with pytest.raises(UserError, match=advice):
            check_memory(config, precision, slots=7, capacity=64)
    give(monkeypatch, None)
    assert check_memory(config, precision, slots=10**9, capacity=64)


@pytest.mark.parametrize("number", [1, 4, 16])
def test_most_slots(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are there already are not in what a processor's memory has left, and are in what
    another device has."""
    config, precision = config_of_folder(), choose_precision("float32", "cpu")
    plan = plan_memory(config, precision, slots=number, capacity=1024)

    def most(free: int | None) -> int:
        give(monkeypatch, free)
        return most_slots(config, precision, slots=16, capacity=1024, mesh=None)

    assert most(None) == 16
    assert most(plan.total - plan.weights) == number
    assert most(plan.total - plan.weights - 1) == number - 1
    accelerator = SimpleNamespace(platform="gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [accelerator])
    assert most(plan.total) == number
    assert most(plan.total - 1) == number - 1


def test_devices_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config, precision = config_of_folder(), choose_precision("float32", "cpu")
    mesh = parse_mesh("data=2", jax.devices()[:2])
    each = plan_memory(config, precision, slots=6, capacity=64, data=2)
    each_needs = each.total - each.weights

    def most(free: int) -> int:
        give(monkeypatch, free)
        return most_slots(config, precision, slots=8, capacity=64, mesh=mesh)

    assert most(2 * each_needs) == 6
    assert most(2 * each_needs - 2) == 4  # a row less for each of the two


def test_every_run_looks_before_it_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for rows: the engine refuses a cache that does not fit before it is there."""
    model = load("tiny")
    plan = plan_memory(model.config, model.precision, slots=64, capacity=4096)
    requests = [Request([model.tokenizer.bos_id or 0], str(i), 4000) for i in range(64)]
    give(monkeypatch, plan.cache + plan.logits)
    Generation(model, requests)
    give(monkeypatch, plan.cache + plan.logits - 1)
    with pytest.raises(UserError, match=r"64 rows side by side of 4096 tokens would not fit"):
        Generation(model, requests)
    Generation(model, requests[:63])
    with pytest.raises(UserError, match=r"1000 rows .* fewer rows, or fewer tokens of each"):
        entropix_jax.generate(model, "Once", samples=1000, max_new_tokens=4000)


def test_a_run_that_has_ended_holds_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results may be kept for long. One that was left early and dropped holds none either."""
    model = load("tiny")

    def caches() -> int:
        shape = (3, model.config.num_kv_heads, 256, model.config.head_dim)
        return sum(x.shape == shape for x in jax.live_arrays())

    gc.collect()
    assert caches() == 0
    run = entropix_jax.stream(model, "Once", "greedy", samples=3, max_new_tokens=5)
    next(iter(run))
    assert caches() >= 2 * model.config.num_layers
    rows = run.run()
    assert (caches(), len(rows)) == (0, 3)
    left = entropix_jax.stream(model, "Once", "greedy", samples=3, max_new_tokens=50)
    next(iter(left))
    del left
    give(monkeypatch, 0)
    with pytest.raises(UserError, match="would not fit"):
        entropix_jax.stream(model, "Once", "greedy")
    assert caches() == 0


def test_weights_that_do_not_fit_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("tiny").config
    held = weights_bytes(config, jnp.dtype(jnp.float32))
    for free in (held, None):
        give(monkeypatch, free)
        assert load("tiny", dtype="float32").config == config
    give(monkeypatch, held - 1)
    monkeypatch.setattr(loading, "read_params", None)
    with pytest.raises(UserError, match=r"tiny: its weights do not fit .* int8 takes less"):
        load("tiny", dtype="float32")
    give(monkeypatch, held // 5)
    with pytest.raises(UserError, match=r"its weights do not fit .* of [0-9.]+ .B$"):
        load("tiny", dtype="int8")


def test_the_limits_of_a_container_or_a_job(tmp_path: Path) -> None:
    """Control groups in both versions: each level may have a limit, and in a container the path
    that the process is told may be the host's."""

    def group(folder: Path, limit: object, used: int, cached: int, *, first: bool = False) -> None:
        names = free_memory._GROUP_1 if first else free_memory._GROUP_2
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        kinds = f"{names[2]}inactive_file {cached - 3}\n{names[2]}active_file 3\n"
        (folder / "memory.stat").write_text(f"anon 5\n{kinds}")

    def free(line: str) -> list[int]:
        (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
        return sorted(free_memory._free_of_groups(tmp_path / "cgroup", tmp_path / "fs"))

    group(tmp_path / "fs" / "slurm" / "job", 1000, 300, 50)
    group(tmp_path / "fs" / "slurm", "max", 5000, 50)
    group(tmp_path / "fs", 900, 803, 3)
    assert free("0::/slurm/job/step") == [100, 750]
    assert free("0::/slurm/job") == [100, 750]
    assert free("0::/not/seen/from/here") == [100]
    group(tmp_path / "fs" / "memory" / "docker", 400, 500, 20, first=True)
    assert free("4:memory:/docker") == [0]
    assert free("3:cpuset:/docker") == []
    assert free_memory._free_of_groups(tmp_path / "none", tmp_path / "fs") == []


def test_what_is_free_is_the_least_of_all_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2 kB\nSwapFree: 5 kB\n")
    assert free_memory._available(tmp_path / "meminfo") == [2048]
    assert free_memory._available(tmp_path / "none") == []  # not Linux
    cases: list[tuple[list[int], list[int], int | None]] = [
        ([1000], [], 1000),
        ([1000], [5000, 2000], 1000),
        ([1000], [5000, 20], 20),
        ([], [], None),
    ]
    for available, limits, free in cases:
        monkeypatch.setattr(free_memory, "_available", lambda available=available: available)
        monkeypatch.setattr(free_memory, "_free_of_groups", lambda limits=limits: limits)
        assert free_bytes(jax.devices("cpu")[0]) == free
