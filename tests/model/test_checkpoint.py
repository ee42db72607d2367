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

from entropix_jax.model.checkpoint import save_params
from entropix_jax.model.linear import quantized
from entropix_jax.model.params import Params, count_params, param_specs
from tests.support.model_folders import refusal
from tests.support.models import load_params, random_params, tiny_config

CONFIG = tiny_config(num_layers=1, tied_head=False)
NAMES = [spec.name for spec in jax.tree.leaves(param_specs(CONFIG))]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves(random_params(CONFIG))
    return {name: np.array(leaf) for name, leaf in zip(NAMES, leaves, strict=True)}


def refused(folder: Path) -> str:
    return refusal(folder, lambda: load_params(folder, CONFIG, "float32"))


def assert_same(got: Params, want: Params) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_equal(got, want)


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_from(path: Path, tensors: dict[str, np.ndarray], kind: str, offset: int) -> None:
    """Writes a file whose first tensor starts `offset` bytes past a multiple of 64."""
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
def test_saved_weights_are_loaded(tmp_path: Path, dtype: str, tied: bool) -> None:
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


def test_narrow_weights_are_split_into_blocks(tmp_path: Path) -> None:
    """Narrow matrices with long rows are split into blocks."""
    config = tiny_config(num_layers=1, mlp_width=4100, dtype="bfloat16")
    params = random_params(config, dtype=jnp.bfloat16)
    save_params(tmp_path, params, config)
    loaded = load_params(tmp_path, config, "bfloat16")
    down = loaded.layers[0].down
    assert [block.shape for block in down.blocks] == [(32, 1366), (32, 1367), (32, 1367)]
    chex.assert_trees_all_equal(jnp.concatenate(down.blocks, axis=1), params.layers[0].down)
    chex.assert_trees_all_equal(loaded.layers[0].up, params.layers[0].up)


def test_int8_weights_are_quantized_on_loading(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    save_file(tensors, tmp_path / SINGLE)
    loaded = load_params(tmp_path, CONFIG, "int8")
    params = random_params(CONFIG)
    chex.assert_trees_all_equal(loaded.embedding, quantized(params.embedding))
    chex.assert_trees_all_equal(loaded.layers[0].down, quantized(params.layers[0].down))
    chex.assert_trees_all_equal(loaded.final_norm, params.final_norm)


def test_tensors_may_start_at_any_byte(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Some writers do not align tensors. If they do, and an array could point into the file, loaded
    weights do not change with the file."""
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


def test_surplus_tensors_of_older_files_are_ignored(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    """Older files have a stored tied head, and rotary frequencies, which are always float32."""
    narrow = {name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()}
    narrow["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(narrow, tmp_path / SINGLE)
    params = load_params(tmp_path, tiny_config(num_layers=1, dtype=None), "bfloat16")
    assert params.head is None
    assert params.unembedding is params.embedding


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        *((name, None, "is missing") for name in NAMES),
        (NAMES[3], np.ones((1, 256), np.float32), "has shape [1, 256], expected [16, 32]"),
        ("model.layers.1.input_layernorm.weight", np.ones(4), "has no place"),  # a layer too many
        ("model.layers.0.self_attn.q_proj.bias", np.ones(4), "has no place"),
        (NAMES[3], np.ones((16, 32)), "has type F64, which is not implemented"),
    ],
)
def test_errors_contain_the_tensor(
    tmp_path: Path, tensors: dict[str, np.ndarray], name: str, tensor: Any, message: str
) -> None:
    changed = {**tensors, name: tensor}
    save_file({k: v for k, v in changed.items() if v is not None}, tmp_path / SINGLE)
    assert f"tensor '{name}' {message}" in refused(tmp_path)


def test_errors_of_files_without_weights(tmp_path: Path) -> None:
    """Damaged files are in `test_fuzzing`."""
    assert f"{SINGLE} is missing, and so is {INDEX}" in refused(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert f"{SINGLE}: a Git LFS pointer to the file: run `git lfs pull`" in refused(tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).mkdir()
    assert f"{SINGLE}: not a regular file" in refused(tmp_path)


def test_shards_are_loaded_as_one_model(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    """The index decides about a tensor in two shards. Errors contain the tensor that is not in the
    shard of the index, the missing shard, or the index that points outside the folder."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    weight_map = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(NAMES)}
    for i, shard in enumerate("ab"):
        save_file({name: tensors[name] for name in NAMES[i::2]}, folder / f"{shard}.safetensors")
    write_index(folder, weight_map)
    assert_same(load_params(folder, CONFIG, "float32"), random_params(CONFIG))
    first, second, extra = NAMES[0], NAMES[1], "model.layers.0.extra"
    for changed, message in (
        ({**weight_map, first: weight_map[second]}, f"tensor '{first}' is missing"),
        ({**weight_map, extra: weight_map[second]}, f"tensor '{extra}' is missing"),
    ):
        write_index(folder, changed)
        assert message in refused(folder)
    twice = {name: tensors[name] for name in NAMES[1::2]} | {first: np.zeros(3, np.float32)}
    save_file(twice, folder / "b.safetensors")
    write_index(folder, weight_map)
    assert_same(load_params(folder, CONFIG, "float32"), random_params(CONFIG))
    (folder / "b.safetensors").unlink()
    assert "b.safetensors: no such file" in refused(folder)

    for path in (tmp_path / "outside.safetensors", folder / "sub" / "a.safetensors"):
        save_file(tensors, path)
    outside = ("../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", "", 7)
    for wrong in (*(dict.fromkeys(NAMES, shard) for shard in outside), []):
        write_index(folder, wrong)
        told = f"{INDEX}: 'weight_map' must map tensors to .safetensors files in its folder"
        assert told in refused(folder)
