"""Rows that take slots, on one device and on two: what lies in a slot, and in those beside it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.engine.decode import prefill
from entropix_jax.engine.slots import (
    Arrival,
    Layout,
    empty_slots,
    fresh_tally,
    insert,
    lanes_for,
    padded_ids,
    share_prefix,
    widen,
)
from entropix_jax.engine.state import (
    BRANCH_ENDED,
    FINISHED_EOS,
    FINISHED_LENGTH,
    FINISHED_STOP,
    FORKS,
    RUNNING,
    DecodeState,
    Recording,
    extras_of,
    finish_of,
)
from entropix_jax.errors import UserError
from entropix_jax.model.finite import NOWHERE
from entropix_jax.model.mesh import place, rules_for
from entropix_jax.sampler.keys import row_key
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.state import init_sampler_state
from tests.support.meshes import collectives_of, two
from tests.support.models import tiny_config
from tests.support.runs import calibrated
from tests.support.samplers import CAPACITY as LONG
from tests.support.samplers import (
    LITERAL,
    Job,
    Line,
    Told,
    advance,
    attn_stats,
    generate,
    params_of,
    plain,
    tiny_model,
)

SLOTS, CAPACITY = 4, 8
CONFIG = tiny_config()
MESHES = (None, "data=2")
FLOAT32 = jnp.dtype(jnp.float32)


def layout_of(mesh: str | None, lanes: int = 2) -> Layout:
    return Layout(SLOTS, lanes, 1 if mesh is None else 2)


def full(mesh: str | None) -> DecodeState:
    """A state of which every leaf holds something, and something else in each row; but whose
    branches are whose, as it must be: the first lane of each shard has one of its first row."""
    rng, layout = np.random.default_rng(0), layout_of(mesh)

    def anything(x: jax.Array) -> jax.Array:
        values = rng.integers(0, 2, x.shape) if x.dtype == bool else rng.integers(2, 9, x.shape)
        return jnp.asarray(values.astype(x.dtype))

    empty = empty_slots(CONFIG, layout, params_of("top-p"), capacity=CAPACITY, dtype=FLOAT32)
    state = jax.tree.map(anything, empty)
    number = np.arange(len(layout.slot_of), dtype=np.int32)
    in_shard = number % (len(number) // layout.shards)
    forked = (in_shard == 0) | (in_shard == SLOTS // layout.shards)
    fork = replace(
        state.fork,
        parent=jnp.asarray(np.where(forked, number - in_shard, number)),
        branch=jnp.asarray(np.where(forked, in_shard > 0, -1).astype(np.int32)),
    )
    state = replace(state, fork=fork)
    return state if mesh is None else place(state, rules_for(two(mesh), CONFIG).rows(state))


def arrival(preset: str = LITERAL, cached: int = 0) -> Arrival:
    return Arrival(
        history=np.arange(60, 60 + CAPACITY, dtype=np.int32),
        confidences=np.arange(CAPACITY, dtype=np.float32),
        prompt_length=np.int32(3),
        cached=np.int32(cached),
        budget=np.int32(5),
        key=np.array([7, 2**32 - 1], np.uint32),
        asks_for_text=np.bool_(True),
        asks_for_choice=np.bool_(False),
        settings=params_of(preset),
        eos_ids=padded_ids([11, 12]),
        tally=jax.tree.map(lambda x: x + 1, fresh_tally(MECHANISMS)),
        forwards=np.int32(6),
    )


def leaves(tree: Any) -> Mapping[str, np.ndarray]:
    """A copy by name: what the host still looks at is not donated."""
    found = jax.tree_util.tree_leaves_with_path(jax.device_get(jax.tree.map(jnp.copy, tree)))
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("slot", "cached"), [(0, 0), (SLOTS - 1, 0), (1, 5)])
def test_a_row_takes_its_slot(mesh: str | None, slot: int, cached: int) -> None:
    """All that is told of it, and all else as in a row that has not begun; but the cache stays as
    it was, and so do the other rows. The lane that has a branch of the row before it is free. Where
    the cache was unsound counts within what it has of the text."""
    state, row, layout = full(mesh), arrival(cached=cached), layout_of(mesh)
    before = leaves(state)
    number = layout.numbers[slot]
    after = leaves(insert(state, jnp.asarray(number), row))
    fresh, unsound = init_sampler_state(1, MECHANISMS), before[".unsound"][number]
    told = {
        ".history": row.history,
        ".confidences": row.confidences,
        ".prompt_length": 3,
        ".budget": 5,
        ".keys": row.key,
        ".asks_for_text": True,
        ".asks_for_choice": False,
        ".forwards": 6,
        ".finish": RUNNING,
        ".unsound": unsound if unsound[0] < cached else [NOWHERE, NOWHERE],
        ".cache.length": cached,
        ".eos_ids": [11, 12, *[-1] * 30],
        ".fork.branch": -1,
        **{f".settings{name}": leaf for name, leaf in leaves(row.settings).items()},
        **{f".sampler.tally{name}": leaf for name, leaf in leaves(row.tally).items()},
        **{f".sampler.trail{name}": leaf[0] for name, leaf in leaves(fresh.trail).items()},
    }
    assert told.keys() <= before.keys()
    lane = SLOTS // layout.shards
    for name, values in before.items():
        wanted = values.copy()
        if name in told:
            wanted[number] = told[name]
        if slot == 0 and name in (".finish", ".fork.branch"):
            wanted[lane] = FINISHED_STOP if name == ".finish" else -1
        np.testing.assert_array_equal(after[name], wanted, err_msg=name)


@pytest.mark.parametrize("mesh", MESHES)
def test_more_lanes(mesh: str | None) -> None:
    """The rows and their branches as they were, each on its device, beside further lanes without
    any."""
    state, layout = full(mesh), layout_of(mesh)
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
    assert (after[".finish"][new] == FINISHED_STOP).all()
    assert (after[".fork.branch"][new] == -1).all()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("source", "target"), [(0, 1), (3, 0), (2, 2)])
def test_a_prefix_is_shared(mesh: str | None, source: int, target: int) -> None:
    """The cache's slots are copied, so many of them count, and nothing else changes; where it is
    unsound if it counts. The row may lie on another device."""
    state, numbers = full(mesh), layout_of(mesh).numbers
    before, wanted_sharding = leaves(state), jax.tree.map(lambda x: x.sharding, state)
    source, target = numbers[source], numbers[target]
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
        if name == ".unsound" and values[source][0] >= 5:
            wanted[target] = NOWHERE
        np.testing.assert_array_equal(after[name], wanted, err_msg=name)


def test_devices_exchange_one_row_of_the_cache() -> None:
    """And not the caches of all rows, to find the one that is shared."""
    state = full("data=2")
    jitted: Any = share_prefix
    text = jitted.lower(state, *map(jnp.int32, (0, 3, 5))).compile().as_text()
    collectives = collectives_of(text)
    assert collectives
    row = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CAPACITY * CONFIG.head_dim
    # And what little else the row has in its state.
    assert sum(collective.elements for collective in collectives) < row + 8


def test_end_tokens_are_padded() -> None:
    for number in (0, 1, 32):
        ids = [*range(5, 5 + number)]
        padded = padded_ids(ids)
        assert padded.dtype == np.int32
        assert padded.tolist() == [*ids, *[-1] * (32 - number)]
    with pytest.raises(UserError, match="33 end tokens, at most 32"):
        padded_ids([*range(33)])


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


def test_how_a_row_ends() -> None:
    left = jnp.asarray([1, 0, 0, 1, -1])
    token = jnp.asarray([7, 7, 5, 5, 6])
    eos_ids = jnp.asarray([[5, 6], [5, 6], [5, 6], [5, -1], [5, -1]])
    expected = [RUNNING, FINISHED_LENGTH, FINISHED_EOS, FINISHED_EOS, FINISHED_LENGTH]
    assert finish_of(left, token, eos_ids).tolist() == expected


# Lanes

FORKING = {
    **{f"regimes.{box}": ["entropy < -1"] for box in ("lelv", "helv", "lehv")},
    "regimes.hehv": ["entropy > -1"],
    "arms.hehv": "branch",
    "branch.width": 4,
    "branch.depth": 3,
    "branch.min_p": 0.0,
    "branch.top_p": 1.0,
    "branch.max_share": 1e6,
    "loop.max_period": 0,
}


class House:
    """Slots of a model, whose rows are read and run."""

    def __init__(self, lanes: int) -> None:
        self.config, self.params = MODEL
        self.layout = Layout(SLOTS, lanes, 1)
        settings, sizes = plain(params_of("top-p")), {"capacity": LONG, "dtype": FLOAT32}
        self.state = empty_slots(self.config, self.layout, settings, **sizes)
        self.told = Told(SLOTS)

    def insert(self, number: int, job: Job) -> None:
        row = Arrival(
            history=np.pad(np.array(job.prompt, np.int32), (0, LONG - len(job.prompt))),
            confidences=np.zeros(LONG, np.float32),
            prompt_length=np.int32(len(job.prompt)),
            cached=np.int32(0),
            budget=np.int32(job.budget),
            key=row_key(job.seed, job.row_id),
            asks_for_text=np.bool_(False),
            asks_for_choice=np.bool_(False),
            settings=job.sampler,
            eos_ids=padded_ids([]),
            tally=fresh_tally(MECHANISMS),
            forwards=np.int32(0),
        )
        tokens, count = jnp.asarray(row.history)[None], jnp.asarray([len(job.prompt) - 1])
        state = insert(self.state, jnp.int32(number), row)
        where = {"config": self.config, "window": LONG}
        self.state = prefill(self.params, state, tokens, count, jnp.asarray([number]), **where)
        self.told.begin(number)

    def run(self, steps: int = 99) -> None:
        for state, records in advance(self.params, self.state, steps, config=self.config):
            self.state = state
            self.told.add(records)

    def stop(self, number: int) -> None:
        finish = self.state.finish.at[number].set(FINISHED_STOP)
        self.state = replace(self.state, finish=finish)


MODEL = tiny_model()
JOBS = [Job([5, 6, 7 + i], plain(params_of(LITERAL, FORKING)), row_id=str(i)) for i in range(2)]


def test_what_lanes_a_row_may_need(tiny: Any) -> None:
    def lanes(**changes: Any) -> int:
        values = {key.replace("__", "."): value for key, value in changes.items()}
        return lanes_for(calibrated(tiny, load_sampler(LITERAL).with_values(values)))

    assert (
        lanes(branch__width=5)
        == lanes(branch__width=5, arms__lehv="explore", arms__loop="branch")
        == 4
    )
    assert lanes(branch__width=1) == lanes(arms__lehv="explore") == 0
    own = load_sampler("greedy").with_arm("own", lambda *_: pytest.fail("never chosen"))
    assert lanes_for(calibrated(tiny, own.with_values({"arms.mid": "own"}))) == 7


@pytest.fixture(scope="module")
def alone() -> list[list[Line]]:
    return [generate(MODEL, [job], rows=1)[0] for job in JOBS]


def check_same(lines: list[Line], expected: list[Line]) -> None:
    assert expected
    assert [line.exact for line in lines] == [line.exact for line in expected]
    assert {len(line.branches) for line in lines} == {4}


def test_a_later_row_has_more_branches_than_there_were_lanes(alone: list[list[Line]]) -> None:
    """It waits until there are enough, and both rows are what they are alone."""
    house = House(1)
    narrow = replace(JOBS[0], sampler=plain(params_of(LITERAL, {**FORKING, "branch.width": 2})))
    house.insert(0, narrow)
    house.run(2)
    house.state = widen(house.state, house.layout, 3)
    house.insert(2, JOBS[1])
    house.run()
    check_same(house.told.lines[2], alone[1])
    (expected,) = generate(MODEL, [narrow], rows=1)
    assert [line.exact for line in house.told.lines[0]] == [line.exact for line in expected]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_row_that_is_stopped_frees_its_lanes(alone: list[list[Line]], steps: int) -> None:
    """While it waits for them, too, and amid its branches; the row beside it, which waited for
    them, is what it is alone."""
    house = House(3)
    for number in range(2):
        house.insert(number, JOBS[number])
    house.run(steps)
    finish = np.asarray(house.state.finish)
    assert (finish[0] == FORKS) == (steps == 1)
    assert finish[1] == FORKS
    house.stop(0)
    house.run()
    check_same(house.told.lines[1], alone[1])
    assert (np.asarray(house.state.finish)[SLOTS:] == FINISHED_STOP).all()
    assert (np.asarray(house.state.fork.branch) == -1).all()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_row_comes_where_branches_of_another_one_are(
    alone: list[list[Line]], stopped: bool
) -> None:
    """Whether or not the device has been told that the other one is over."""
    house = House(3)
    house.insert(1, JOBS[1])
    house.run(2)
    running = np.asarray(house.state.finish)[SLOTS:]
    assert np.isin(running, (RUNNING, BRANCH_ENDED)).all()
    if stopped:
        house.stop(1)
    house.insert(1, JOBS[0])
    assert (np.asarray(house.state.finish)[SLOTS:] == FINISHED_STOP).all()
    house.run()
    check_same(house.told.lines[1], alone[0])
