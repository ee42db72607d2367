"""Slots on one device and on two: insertion, more lanes, and shared prefixes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.request import padded_ids
from entropix_jax.engine.slots import (
    Arrival,
    Layout,
    empty_slots,
    fresh_tally,
    insert,
    share_prefix,
    widen,
)
from entropix_jax.engine.state import RUNNING, STOPPED, DecodeState
from entropix_jax.model.mesh import row_shardings
from entropix_jax.packed import pack
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.state import init_sampler_state
from tests.support.meshes import mesh_of_two
from tests.support.models import tiny_config
from tests.support.samplers import LITERAL, params_of

SLOTS, CAPACITY = 4, 8
CONFIG = tiny_config()
MESHES = (None, "data=2")
FLOAT32 = jnp.dtype(jnp.float32)


def layout_of(mesh: str | None, lanes: int = 2) -> Layout:
    return Layout(SLOTS, lanes, 1 if mesh is None else 2)


def random_state(mesh: str | None) -> DecodeState:
    """Returns a state whose leaves are random, except for a valid fork: the first lane of each
    shard has a branch of the shard's first row. All rows draw a position again."""
    rng, layout = np.random.default_rng(0), layout_of(mesh)

    def random(x: jax.Array) -> jax.Array:
        values = rng.integers(0, 2, x.shape) if x.dtype == bool else rng.integers(2, 9, x.shape)
        return jnp.asarray(values.astype(x.dtype))

    empty = empty_slots(
        CONFIG, layout, params_of("top-p"), mechanisms=MECHANISMS, capacity=CAPACITY, dtype=FLOAT32
    )
    state = jax.tree.map(random, empty)
    number = np.arange(len(layout.slot_of), dtype=np.int32)
    in_shard = number % (len(number) // layout.shards)
    forked = (in_shard == 0) | (in_shard == SLOTS // layout.shards)
    fork = replace(
        state.fork,
        parent=jnp.asarray(np.where(forked, number - in_shard, number)),
        branch=jnp.asarray(np.where(forked, in_shard > 0, -1).astype(np.int32)),
    )
    trail = replace(state.sampler.trail, again=jnp.ones_like(state.sampler.trail.again))
    state = replace(state, fork=fork, sampler=replace(state.sampler, trail=trail))
    return state if mesh is None else jax.device_put(state, row_shardings(mesh_of_two(mesh), state))


def arrival(preset: str = LITERAL, cached: int = 0) -> Arrival:
    return Arrival(
        history=np.arange(60, 60 + CAPACITY, dtype=np.int32),
        confidences=np.arange(CAPACITY, dtype=np.float32),
        prompt_length=np.int32(3),
        cached=np.int32(cached),
        budget=np.int32(5),
        keys=np.array([7, 2**32 - 1], np.uint32),
        looks_up=np.bool_(True),
        asks_for_choice=np.bool_(False),
        clarifies=np.bool_(False),
        settings=pack(jax.tree.map(np.asarray, params_of(preset))),
        eos_ids=padded_ids([11, 12]),
        tally=jax.tree.map(lambda x: x + 1, fresh_tally(MECHANISMS)),
        forwards=np.int32(6),
    )


def leaves(tree: Any) -> Mapping[str, np.ndarray]:
    """Returns a copy of each leaf by its path, so that the tree itself can be donated."""
    found = jax.tree_util.tree_leaves_with_path(jax.device_get(jax.tree.map(jnp.copy, tree)))
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("slot", "cached"), [(0, 0), (SLOTS - 1, 0), (1, 5)])
def test_insert(mesh: str | None, slot: int, cached: int) -> None:
    """`insert` sets the row's fields, resets its sampler state, frees the lane that had a branch of
    the slot's previous row, and changes no other row and no cached key or value."""
    state, row, layout = random_state(mesh), arrival(cached=cached), layout_of(mesh)
    before = leaves(state)
    number = layout.indices[slot]
    after = leaves(insert(state, jnp.asarray(number), row, mechanisms=MECHANISMS))
    fresh = init_sampler_state(1, MECHANISMS)
    expected = {
        ".history": row.history,
        ".confidences": row.confidences,
        ".prompt_length": 3,
        ".budget": 5,
        ".keys": row.keys,
        ".looks_up": True,
        ".asks_for_choice": False,
        ".clarifies": False,
        ".forwards": 6,
        ".status": RUNNING,
        ".cache.length": cached,
        ".eos_ids": [11, 12, *[-1] * 30],
        ".fork.branch": -1,
        **{f".settings{name}": leaf for name, leaf in leaves(row.settings).items()},
        **{f".sampler.tally{name}": leaf for name, leaf in leaves(row.tally).items()},
        **{f".sampler.trail{name}": leaf[0] for name, leaf in leaves(fresh.trail).items()},
    }
    assert expected.keys() <= before.keys()
    lane = SLOTS // layout.shards
    for name, values in before.items():
        wanted = values.copy()
        if name in expected:
            wanted[number] = expected[name]
        if slot == 0 and name in (".status", ".fork.branch"):
            wanted[lane] = STOPPED if name == ".status" else -1
        np.testing.assert_array_equal(after[name], wanted, err_msg=name)


@pytest.mark.parametrize("mesh", MESHES)
def test_widen(mesh: str | None) -> None:
    """`widen` keeps rows and branches, each on its device, and adds empty lanes."""
    state, layout = random_state(mesh), layout_of(mesh)
    wide = replace(layout, lanes=5)
    before, sharding = leaves(state), state.history.sharding
    wider = widen(state, layout, 5)
    assert wider.lanes == 5
    if mesh is not None:
        assert {x.sharding for x in jax.tree.leaves(wider)} == {sharding}
    after = leaves(wider)
    per_shard = SLOTS // layout.shards
    places = np.arange(len(wide.slot_of)).reshape(layout.shards, -1)
    kept, new = places[:, : per_shard + 2].reshape(-1), places[:, per_shard + 2 :]
    np.testing.assert_array_equal(wide.slot_of[kept], layout.slot_of)
    for name, values in before.items():
        wanted = kept[values] if name == ".fork.parent" else values
        np.testing.assert_array_equal(after[name][kept], wanted, err_msg=name)
        assert after[name].shape == (len(wide.slot_of), *values.shape[1:])
    assert (after[".status"][new] == STOPPED).all()
    assert (after[".fork.branch"][new] == -1).all()
    assert before[".sampler.trail.again"][0]  # the row of the first slot draws a position again
    assert not after[".sampler.trail.again"][new].any()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("source", "target"), [(0, 1), (3, 0), (2, 2)])
def test_share_prefix(mesh: str | None, source: int, target: int) -> None:
    """`share_prefix` copies the cache, sets its length, and changes nothing else. The source may be
    on another device."""
    state, numbers = random_state(mesh), layout_of(mesh).indices
    before, wanted_sharding = leaves(state), jax.tree.map(lambda x: x.sharding, state)
    source, target = numbers[source], numbers[target]
    shared = share_prefix(state, *map(jnp.int32, (source, target, 5)))
    if mesh is not None:
        assert jax.tree.map(lambda x: x.sharding, shared) == wanted_sharding
    after = leaves(shared)
    for name, values in before.items():
        wanted = values.copy()
        if name.startswith((".cache.keys", ".cache.values")):
            wanted[target] = values[source]
        elif name == ".cache.length":
            wanted[target] = 5
        np.testing.assert_array_equal(after[name], wanted, err_msg=name)
