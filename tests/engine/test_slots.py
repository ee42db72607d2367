"""Rows that take slots, on one device and on two: what lies in a slot, and in those beside it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.slots import Arrival, Slots, empty_slots, insert, padded_ids, share_prefix
from entropix_jax.engine.state import (
    FINISHED_EOS,
    FINISHED_LENGTH,
    RUNNING,
    Recording,
    extras_of,
    finish_of,
    init_log,
)
from entropix_jax.errors import UserError
from entropix_jax.model.finite import NOWHERE
from entropix_jax.model.mesh import place, rules_for
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.mechanisms.branch import MAX_DEPTH
from entropix_jax.sampler.state import init_sampler_state
from tests.support.meshes import collectives_of, two
from tests.support.models import tiny_config
from tests.support.samplers import attn_stats, params_of

SLOTS, CAPACITY = 4, 8
CONFIG = tiny_config()
MESHES = (None, "data=2")
FLOAT32 = jnp.dtype(jnp.float32)


def full(mesh: str | None) -> Slots:
    """Slots of which every leaf holds something, and something else in each row."""
    rng = np.random.default_rng(0)

    def anything(x: jax.Array) -> jax.Array:
        values = rng.integers(0, 2, x.shape) if x.dtype == bool else rng.integers(2, 9, x.shape)
        return jnp.asarray(values.astype(x.dtype))

    empty = empty_slots(CONFIG, SLOTS, params_of("top-p"), capacity=CAPACITY, dtype=FLOAT32)
    slots = jax.tree.map(anything, empty)
    return slots if mesh is None else place(slots, rules_for(two(mesh), CONFIG).rows(slots))


def arrival(preset: str = "entropix") -> Arrival:
    return Arrival(
        history=np.arange(60, 60 + CAPACITY, dtype=np.int32),
        prompt_length=np.int32(3),
        budget=np.int32(5),
        key=np.array([7, 2**32 - 1], np.uint32),
        asks_for_text=np.bool_(True),
        asks_for_choice=np.bool_(False),
        sampler=params_of(preset),
        eos_ids=padded_ids([11, 12]),
    )


def leaves(tree: Any) -> Mapping[str, np.ndarray]:
    """A copy by name: what the host still looks at is not donated."""
    found = jax.tree_util.tree_leaves_with_path(jax.device_get(jax.tree.map(jnp.copy, tree)))
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("number", [0, SLOTS - 1])
def test_a_row_takes_its_slot(mesh: str | None, number: int) -> None:
    """All that is told of it, and all else as in a row that has not begun; but the cache stays as
    it was, and so do the other rows."""
    slots, row = full(mesh), arrival()
    before = leaves(slots)
    after = leaves(insert(slots, jnp.int32(number), row))
    fresh = init_sampler_state(1, CONFIG.vocab_size, MECHANISMS)
    told = {
        ".state.history": row.history,
        ".state.prompt_length": 3,
        ".state.budget": 5,
        ".state.keys": row.key,
        ".state.asks_for_text": True,
        ".state.asks_for_choice": False,
        ".state.forwards": 0,
        ".state.finish": RUNNING,
        ".state.unsound": [NOWHERE, NOWHERE],
        ".state.cache.length": 0,
        ".eos_ids": [11, 12, *[-1] * 6],
        **{f".sampler{name}": leaf for name, leaf in leaves(row.sampler).items()},
        **{f".state.sampler{name}": leaf[0] for name, leaf in leaves(fresh).items()},
    }
    assert told.keys() <= before.keys()
    for name, values in before.items():
        wanted = values.copy()
        if name in told:
            wanted[number] = told[name]
        np.testing.assert_array_equal(after[name], wanted, err_msg=name)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("source", "target"), [(0, 1), (3, 0), (2, 2)])
def test_a_prefix_is_shared(mesh: str | None, source: int, target: int) -> None:
    """The cache's slots are copied, so many of them count, and nothing else changes. The row may
    lie on another device."""
    state = full(mesh).state
    before, wanted_sharding = leaves(state), jax.tree.map(lambda x: x.sharding, state)
    shared = share_prefix(state, *map(jnp.int32, (source, target, 5)))
    if mesh is not None:
        assert jax.tree.map(lambda x: x.sharding, shared) == wanted_sharding
    after = leaves(shared)
    for name, values in before.items():
        wanted = values.copy()
        if name.startswith((".cache.keys", ".cache.values", ".unsound")):
            wanted[target] = values[source]
        elif name == ".cache.length":
            wanted[target] = 5
        np.testing.assert_array_equal(after[name], wanted, err_msg=name)


def test_devices_exchange_one_row_of_the_cache() -> None:
    """And not the caches of all rows, to find the one that is shared."""
    state = full("data=2").state
    jitted: Any = share_prefix
    text = jitted.lower(state, *map(jnp.int32, (0, 3, 5))).compile().as_text()
    collectives = collectives_of(text)
    assert collectives
    row = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CAPACITY * CONFIG.head_dim
    # And what little else the row has in its state.
    assert sum(collective.elements for collective in collectives) < row + 8


def test_end_tokens_are_padded() -> None:
    for number in (0, 1, 8):
        ids = [*range(5, 5 + number)]
        padded = padded_ids(ids)
        assert padded.dtype == np.int32
        assert padded.tolist() == [*ids, *[-1] * (8 - number)]
    with pytest.raises(UserError, match="9 end tokens, at most 8"):
        padded_ids([*range(9)])


# What is recorded of a step, and how a row ends

B, V = 3, 40


def test_the_likeliest_tokens_are_each_rows_own() -> None:
    logits = np.random.default_rng(0).normal(size=(B, V)).astype(np.float32) * 3
    stats = attn_stats(B)
    extras = extras_of(jnp.asarray(logits), stats, Recording(top=4, layers=True))
    z = logits.astype(np.float64)
    probs = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    order = np.argsort(-probs, axis=1)[:, :4]
    np.testing.assert_array_equal(extras.top_ids, order)
    np.testing.assert_allclose(
        extras.top_probs, np.take_along_axis(probs, order, axis=1), rtol=1e-6
    )
    np.testing.assert_array_equal(extras.layers, stats.entropy)


def test_the_log_has_room_for_what_is_recorded_of_each_token() -> None:
    shape = (B, CONFIG.num_layers, CONFIG.num_heads)
    stats = replace(attn_stats(B), entropy=jnp.zeros(shape))
    for recording in (Recording(), Recording(top=3), Recording(layers=True)):
        one = extras_of(jnp.zeros((B, V)), stats, recording)
        assert one.top_ids.shape == one.top_probs.shape == (B, recording.top)
        notes = init_log(CONFIG, 5, recording).branches.notes
        for room, leaf in zip(jax.tree.leaves(notes), jax.tree.leaves(one), strict=True):
            assert room.shape == (5, MAX_DEPTH, *leaf.shape[1:])
            assert room.dtype == leaf.dtype


def test_how_a_row_ends() -> None:
    left = jnp.asarray([1, 0, 0, 1, -1])
    token = jnp.asarray([7, 7, 5, 5, 6])
    eos_ids = jnp.asarray([[5, 6], [5, 6], [5, 6], [5, -1], [5, -1]])
    expected = [RUNNING, FINISHED_LENGTH, FINISHED_EOS, FINISHED_EOS, FINISHED_LENGTH]
    assert finish_of(left, token, eos_ids).tolist() == expected
