from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from entropix_jax.errors import UserError
from entropix_jax.model.cache import init_cache
from entropix_jax.model.checkpoint import load_params, open_tensors, save_params
from entropix_jax.model.linear import quantized
from entropix_jax.model.llama import forward
from entropix_jax.model.params import Params, count_params, param_specs
from tests.support.models import random_params, tiny_config

CONFIG = tiny_config(num_layers=1, tied_head=False)
NAMES = [spec.name for spec in jax.tree.leaves(param_specs(CONFIG))]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves(random_params(CONFIG))
    return {name: np.array(leaf) for name, leaf in zip(NAMES, leaves, strict=True)}


def refusal(folder: Path, config: Any = CONFIG) -> str:
    with pytest.raises(UserError) as error:
        load_params(folder, config, "float32")
    message = str(error.value)
    assert str(folder) in message
    assert "\n" not in message
    return message


def assert_same(got: Params, want: Params) -> None:
    assert (got.head is None) == (want.head is None)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert isinstance(a, jax.Array)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def write_shards(folder: Path, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    """Two shards and an index, as large checkpoints have them; returns the index's map."""
    shards: dict[str, dict[str, np.ndarray]] = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, tensor) in enumerate(tensors.items()):
        shards["ab"[i % 2] + ".safetensors"][name] = tensor
    for file, part in shards.items():
        save_file(part, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_from(path: Path, tensors: dict[str, np.ndarray], kind: str, offset: int) -> None:
    """A file whose first tensor starts `offset` bytes past a multiple of 64."""
    header, body = {}, b""
    for name, tensor in tensors.items():
        offsets = [len(body), len(body) + tensor.nbytes]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        body += tensor.tobytes()
    text = json.dumps(header).encode()
    text += b" " * ((offset - 8 - len(text)) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_is_loaded(tmp_path: Path, dtype: str, tied: bool) -> None:
    config = tiny_config(tied_head=tied, dtype=dtype)
    params = random_params(config, dtype=dtype)
    save_params(tmp_path, params, config)
    assert_same(load_params(tmp_path, config, dtype), params)
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    assert_same(load_params(tmp_path, config, "bfloat16"), narrow)
    assert sorted(p.name for p in tmp_path.iterdir()) == [SINGLE]
    stored = load_file(tmp_path / SINGLE)
    assert sum(t.size for t in stored.values()) == count_params(config)
    assert ("lm_head.weight" in stored) is not tied


def test_each_name_has_its_place(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Against the layout's names, spelled out: two matrices of one shape cannot change places."""
    save_file(tensors, tmp_path / SINGLE)
    params = load_params(tmp_path, CONFIG, "float32")
    layer = params.layers[0]
    for name, leaf in {
        "model.embed_tokens.weight": params.embedding,
        "model.layers.0.input_layernorm.weight": layer.attention_norm,
        "model.layers.0.self_attn.q_proj.weight": layer.query,
        "model.layers.0.self_attn.k_proj.weight": layer.key,
        "model.layers.0.self_attn.v_proj.weight": layer.value,
        "model.layers.0.self_attn.o_proj.weight": layer.output,
        "model.layers.0.post_attention_layernorm.weight": layer.mlp_norm,
        "model.layers.0.mlp.gate_proj.weight": layer.gate,
        "model.layers.0.mlp.up_proj.weight": layer.up,
        "model.layers.0.mlp.down_proj.weight": layer.down,
        "model.norm.weight": params.final_norm,
        "lm_head.weight": params.unembedding,
    }.items():
        np.testing.assert_array_equal(np.asarray(leaf), tensors.pop(name))
    assert not tensors


def test_weights_lie_as_their_products_read_them(tmp_path: Path) -> None:
    """For float32 activations narrow matrices with long rows come in blocks; without a word on
    activations as they are stored."""
    config = tiny_config(num_layers=1, mlp_width=4100, dtype="bfloat16")
    params = random_params(config, dtype=jnp.bfloat16)
    save_params(tmp_path, params, config)
    assert_same(load_params(tmp_path, config, "bfloat16"), params)
    loaded = load_params(tmp_path, config, "bfloat16", arrange=True)
    down = loaded.layers[0].down
    assert [block.shape for block in down.blocks] == [(32, 1366), (32, 1367), (32, 1367)]
    chex.assert_trees_all_equal(jnp.concatenate(down.blocks, axis=1), params.layers[0].down)
    chex.assert_trees_all_equal(loaded.layers[0].up, params.layers[0].up)
    save_params(tmp_path, loaded, config)
    assert_same(load_params(tmp_path, config, "bfloat16"), params)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind", [{}, {"qkv_bias": True, "qk_norm": True}])
def test_packed_layers_compute_the_same(tmp_path: Path, kind: dict[str, Any], dtype: str) -> None:
    config = tiny_config(**kind)
    save_params(tmp_path, random_params(config), config)
    plain, packed = (load_params(tmp_path, config, dtype, packed=one) for one in (False, True))
    assert len(jax.tree.leaves(packed)) < len(jax.tree.leaves(plain))
    tokens, count = jnp.arange(8, dtype=jnp.int32).reshape(2, 4), jnp.full(2, 4)
    outputs = []
    for params in (plain, packed):
        cache = init_cache(config, 2, 8, jnp.dtype("float32"))
        hidden, stats, _ = forward(params, config, tokens, count, cache, window=8)
        outputs.append((hidden, stats.entropy))
    chex.assert_trees_all_close(*outputs, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="packed weights are not written"):
        save_params(tmp_path, packed, config)


def test_eight_bits_are_made_on_the_way_in(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, tmp_path / SINGLE)
    loaded = load_params(tmp_path, CONFIG, "int8", arrange=True)
    params = random_params(CONFIG)
    chex.assert_trees_all_equal(loaded.embedding, quantized(params.embedding))
    chex.assert_trees_all_equal(loaded.layers[0].down, quantized(params.layers[0].down))
    chex.assert_trees_all_equal(loaded.final_norm, params.final_norm)
    with pytest.raises(UserError, match="weights of 8 bits are not written"):
        save_params(tmp_path / "int8", loaded, CONFIG)
    assert not (tmp_path / "int8").exists()


def test_tensors_may_lie_at_any_byte(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Other writers do not align what they write. Where they do, and an array could point into the
    file, loaded weights do not hang on it."""
    narrow = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    want = random_params(CONFIG, dtype=jnp.bfloat16)
    for offset in range(4):
        write_from(tmp_path / SINGLE, narrow, "BF16", offset)
        assert_same(load_params(tmp_path, replace(CONFIG, dtype="bfloat16"), "bfloat16"), want)
    write_from(tmp_path / SINGLE, tensors, "F32", 0)
    params = load_params(tmp_path, CONFIG, "float32")
    with (tmp_path / SINGLE).open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(b"\xff" * (size - size // 2))
    assert_same(params, random_params(CONFIG))


def test_what_older_files_also_carry_is_left_out(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    """A tied head stored all the same, and rotary frequencies (float32 whatever the rest is)."""
    config = tiny_config(num_layers=1, dtype=None)
    narrow = {name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()}
    narrow["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(narrow, tmp_path / SINGLE)
    params = load_params(tmp_path, config, "bfloat16")
    assert params.head is None
    assert params.unembedding is params.embedding
    embedding = open_tensors(tmp_path, config)["model.embed_tokens.weight"]
    assert str(embedding.dtype) == "bfloat16"


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_is_missing_or_misshapen_is_named(
    tmp_path: Path, tensors: dict[str, np.ndarray], name: str
) -> None:
    old = tensors.pop(name)
    save_file(tensors, tmp_path / SINGLE)
    assert f"'{name}' is missing" in refusal(tmp_path)
    tensors[name] = np.ascontiguousarray(old.reshape(1, -1))  # the same numbers
    save_file(tensors, tmp_path / SINGLE)
    told = f"tensor '{name}' has shape {[1, old.size]}, expected {list(old.shape)}"
    assert told in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("model.layers.1.input_layernorm.weight", np.float32, "has no place"),  # a layer too many
        ("model.layers.0.self_attn.q_proj.bias", np.float32, "has no place"),
        (NAMES[3], np.float64, "has type F64, which is not implemented"),
    ],
)
def test_a_tensor_without_a_place_or_of_another_type_is_named(
    tmp_path: Path, tensors: dict[str, np.ndarray], name: str, dtype: Any, message: str
) -> None:
    tensors[name] = tensors.get(name, np.ones(4)).astype(dtype)
    save_file(tensors, tmp_path / SINGLE)
    assert f"{SINGLE}: tensor '{name}' {message}" in refusal(tmp_path)


def test_what_is_no_file_of_weights_is_named(tmp_path: Path) -> None:
    """Damaged files are `test_fuzzing`'s."""
    assert f"{SINGLE} is missing, and so is {INDEX}" in refusal(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert f"{SINGLE}: not a valid safetensors file" in refusal(tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).mkdir()
    assert f"{SINGLE}: not a regular file" in refusal(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", "", 7]
)
def test_an_index_that_points_elsewhere_is_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], shard: Any
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, tmp_path / "outside.safetensors")
    (folder / "sub").mkdir()
    save_file(tensors, folder / "sub" / "a.safetensors")
    write_index(folder, dict.fromkeys(NAMES, shard))
    told = f"{INDEX}: 'weight_map' must map tensors to .safetensors files beside it"
    assert told in refusal(folder)
    write_index(folder, [])
    assert told in refusal(folder)


def test_shards_are_one_model(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Or else the tensor that is not where the index says is named, or the missing shard."""
    weight_map = write_shards(tmp_path, tensors)
    assert_same(load_params(tmp_path, CONFIG, "float32"), random_params(CONFIG))
    for shard in ("a.safetensors", "b.safetensors"):  # one of them has the first tensor already
        part = {n: t for n, t in tensors.items() if weight_map[n] == shard}
        save_file({**part, NAMES[0]: tensors[NAMES[0]]}, tmp_path / shard)
    assert NAMES[0] in refusal(tmp_path)
    write_shards(tmp_path, tensors)
    write_index(tmp_path, {**weight_map, NAMES[0]: weight_map[NAMES[1]]})
    assert NAMES[0] in refusal(tmp_path)
    write_index(tmp_path, {**weight_map, "model.layers.0.extra": weight_map[NAMES[1]]})
    assert f"{weight_map[NAMES[1]]}: tensor 'model.layers.0.extra' is missing" in refusal(tmp_path)
    write_index(tmp_path, {n: f for n, f in weight_map.items() if n != NAMES[4]})
    assert NAMES[4] in refusal(tmp_path)
    write_index(tmp_path, weight_map)
    (tmp_path / "b.safetensors").unlink()
    assert "b.safetensors is missing" in refusal(tmp_path)
