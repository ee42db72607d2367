"""Meshes, shardings, and rows on eight devices compared with one."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from entropix_jax.engine.state import RUNNING
from entropix_jax.errors import UserError
from entropix_jax.model.cache import init_cache
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.model.mesh import check_mesh, param_shardings, parse_mesh, row_shardings
from tests.support.eight_devices import BATCH, CAPACITY, CONFIG, MESHES, Outcome
from tests.support.meshes import Collective, collectives_of, mesh_of_two
from tests.support.models import logits_of, run, tiny_config
from tests.support.samplers import LANES

ROOT = Path(__file__).parents[2]

# Tolerance relative to the largest value of an array, since eight devices add float32 values in
# another order. We measured 1.1e-5 on an AMD EPYC.
ROUNDING = 5e-5


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    path = tmp_path_factory.mktemp("sharding") / "outcomes"
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_use_fusion_emitters=false"
    environment = {**os.environ, "XLA_FLAGS": flags}
    code = f"from tests.support.eight_devices import main; main({str(path)!r})"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "donated" not in ran.stderr
    return pickle.loads(path.read_bytes())


# Meshes and shardings.


def test_parse_mesh() -> None:
    for text, devices, sizes in (
        (None, 2, (2, 1)),
        ("data=1", 1, (1, 1)),
        (" model = 2 , data=1", 2, (1, 2)),
    ):
        mesh = parse_mesh(text, jax.devices()[:devices])
        assert mesh.axis_names == ("data", "model")
        assert mesh.devices.shape == sizes
        assert set(mesh.devices.flat) == set(jax.devices()[:devices])
    for text in ("", "data=2,", "data=two", "data=٢", "seq=2", "data=2,data=1", "data=0"):
        with pytest.raises(UserError, match=f"^mesh '{text}': not of the form data=N,model=N$"):
            mesh_of_two(text)
    with pytest.raises(
        UserError, match="mesh 'data=2,model=2': 2 x 2 = 4 devices, but there are 2"
    ):
        mesh_of_two("data=2,model=2")


@pytest.mark.parametrize(
    ("mesh", "changes", "slots", "message"),
    [
        ("data=2", {}, 3, "mesh data=2,model=1: 3 slots cannot be split evenly over data=2"),
        ("model=2", {"num_kv_heads": 1}, 4, "mesh data=1,model=2: 1 key/value heads cannot be"),
        ("model=2", {"mlp_width": 47}, 4, "mesh data=1,model=2: 47 units of the MLP cannot be"),
    ],
)
def test_check_mesh(mesh: str, changes: dict[str, int], slots: int, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        check_mesh(mesh_of_two(mesh), tiny_config(**changes), slots)
    check_mesh(mesh_of_two(mesh), tiny_config(vocab_size=63), 4)


def test_weights_are_loaded_onto_their_devices(tiny: LanguageModel) -> None:
    """The vocabulary cannot be split evenly, so its matrices, and no others, are replicated."""
    spread = load("tiny", mesh=mesh_of_two("model=2"))
    wanted = jax.tree.leaves(param_shardings(mesh_of_two("model=2"), tiny.config))
    leaves = (jax.tree.leaves(model.params) for model in (tiny, spread))
    for one, other, sharding in zip(*leaves, wanted, strict=True):
        assert other.sharding == sharding
        np.testing.assert_array_equal(one, other)
    specs = jax.tree.map(lambda x: x.sharding.spec, spread.params)
    layer = specs.layers[-1]
    assert {layer.query, layer.key, layer.value, layer.gate, layer.up} == {P("model")}
    assert {layer.output, layer.down} == {P(None, "model")}
    assert {layer.attention_norm, layer.mlp_norm, specs.final_norm, specs.embedding} == {P()}
    even = tiny_config(vocab_size=64)
    assert param_shardings(mesh_of_two("model=2"), even).embedding.spec == P("model")
    assert param_shardings(mesh_of_two("data=2"), even).embedding.spec == P()
    narrow = load("tiny", dtype="bfloat16", mesh=mesh_of_two("model=2")).params.layers[0].gate
    np.testing.assert_array_equal(narrow, tiny.params.layers[0].gate.astype(jnp.bfloat16))
    assert load("tiny", mesh=parse_mesh(None, jax.devices()[:1])).mesh is None


@pytest.mark.parametrize("mesh", ["data=2", "model=2"])
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_logits_of_the_embedded_model(mesh: str, weights: str) -> None:
    """The vocabulary of 1249 is not split. The vectors of two rows of 8 tokens are few enough to be
    split into terms."""
    models = load("tiny", weights), load("tiny", weights, mesh_of_two(mesh))
    for length in (24, 8):
        tokens = np.random.default_rng(0).integers(0, 1244, (2, length), dtype=np.int32)
        count = np.array([length, length - 7], np.int32)

        def logits(model: LanguageModel, tokens: Any = tokens, count: Any = count) -> np.ndarray:
            length = tokens.shape[1]
            cache = init_cache(model.config, 2, length, jnp.dtype(jnp.float32))
            if model.mesh is not None:
                cache = jax.device_put(cache, row_shardings(model.mesh, cache))
            hidden, _, _ = run(model.params, model.config, tokens, count, cache, window=length)
            return np.asarray(logits_of(model.params, hidden))

        one, spread = map(logits, models)
        assert np.abs(one - spread)[[0, 1], count - 1].max() <= 1e-5 * np.abs(one).max()


# Rows on eight devices.


@pytest.mark.slow
def test_the_compared_rows_use_all_actions(outcomes: dict[str, Outcome]) -> None:
    """Branches, waits for lanes, backspace and ended rows all occur."""
    one = outcomes[""]
    branched = np.array([any(line.branches for line in lines) for lines in one.lines])
    assert {len(line.branches) for line in one.lines[-1]} == {0, 1}
    assert branched.sum() >= BATCH // 2
    assert branched[:8].any()
    assert branched[8:].any()
    assert any(line.best > 0 for lines in one.lines for line in lines)
    waited = [line.waited for lines in one.lines for line in lines]
    assert {wait > 0 for wait in waited} == {True, False}
    assert (one.states[-1].sampler.tally.states["backspace"].backspaced > 0).sum() >= 3
    assert any({*(state.status == RUNNING)} == {True, False} for state in one.states)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_rows_are_the_same_on_every_mesh(outcomes: dict[str, Outcome], mesh: str) -> None:
    """Tokens, counts, flags and branches are equal, however long a fork waits for lanes, and floats
    are equal up to rounding."""
    one, many = outcomes[""], outcomes[mesh]
    for expected, got in zip(one.lines, many.lines, strict=True):
        assert [line.exact for line in got] == [line.exact for line in expected]
        for a, b in zip(expected, got, strict=True):
            bound = ROUNDING * np.nanmax(np.abs(a.numbers))  # NaN: no P(wrong)
            np.testing.assert_allclose(b.numbers, a.numbers, rtol=0, atol=bound)
    compare(one.states[-1], many.states[-1])
    compare(one.answered, many.answered)
    # The other rows continue while one waits for the host.
    steps, other = ([records.live.any() for records in x.held] for x in (one, many))
    assert any(steps)
    assert steps == other


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_state_keeps_its_sharding(outcomes: dict[str, Outcome], mesh: str) -> None:
    """Calls free donated buffers and keep the sharding, so a result is a valid input again."""
    parts = dict(part.split("=") for part in mesh.split(","))
    outcome = outcomes[mesh]
    assert outcome.kept
    for name, (whole, part) in outcome.layout.items():
        wanted = [*whole]
        wanted[0] //= int(parts.get("data", 1))
        if ".cache.keys" in name or ".cache.values" in name:
            wanted[1] //= int(parts.get("model", 1))
        assert part == tuple(wanted), name


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [False, True])
def test_data_shards_exchange_only_flags(outcomes: dict[str, Outcome], lanes: bool) -> None:
    """Branches stay on the device of their row."""
    collectives = collectives_of(outcomes["data=8"].texts[lanes])
    assert {c.kind for c in collectives} == {"all-reduce"}
    assert {c.elements for c in collectives} == {1, 2}  # one flag, or two at once


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [False, True])
def test_collectives_of_the_model_axis(outcomes: dict[str, Outcome], lanes: bool) -> None:
    """Logits are gathered once. All other collectives sum hidden states and means over heads."""
    devices = np.arange(8).reshape(2, 4)
    of_model = {frozenset(row.tolist()) for row in devices}
    of_data = {frozenset(column.tolist()) for column in devices.T}
    found: set[Collective] = set()
    for collective in collectives_of(outcomes["data=2,model=4"].texts[lanes]):
        if collective.groups == of_data:
            assert collective.elements <= 2
            continue
        assert collective.groups == of_model
        found.add(collective)
    batch = BATCH // 2 + (LANES if lanes else 0)
    gathers = [c for c in found if c.kind == "all-gather"]
    assert [c.elements for c in gathers] == [batch * CONFIG.vocab_size]
    sums = [c for c in found if c.kind != "all-gather"]
    assert {c.kind for c in sums} == {"all-reduce"}
    # A layer has two sums of hidden states and a mean over heads, the embedding one sum.
    layers = CONFIG.num_layers
    floor = (2 * layers + 1) * batch * CONFIG.width + layers * batch * CAPACITY
    assert floor <= sum(c.elements for c in sums) <= floor + 16 * layers * batch


def compare(expected: Any, got: Any) -> None:
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, a), b in zip(paths, jax.tree.leaves(got), strict=True):
        name = jax.tree_util.keystr(path)
        if a.dtype == np.float32 and a.size:
            assert np.abs(a - b).max() <= ROUNDING * np.abs(a).max(), name
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)
