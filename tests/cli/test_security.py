"""Untrusted files cannot run code, and no network is used without request."""

import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from entropix_jax.errors import UserError
from entropix_jax.host.compile_cache import use_compilation_cache
from entropix_jax.model.loading import load
from entropix_jax.text.chat_template import render
from tests.support.model_folders import config_of_folder
from tests.support.models import load_params


@pytest.fixture(name="own")
def copied_model(folder: str, tmp_path: Path) -> Path:
    """A copy of a model folder, to be changed."""
    return shutil.copytree(folder, tmp_path / "model")


# Checkpoints.


class _Intruder:
    """An object that creates a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


@pytest.mark.parametrize("name", ["pytorch_model-1-of-2.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_not_read(own: Path, tmp_path: Path, name: str) -> None:
    """Pickles next to safetensors are ignored. Without safetensors, the error says what to do."""
    intruder = pickle.dumps(_Intruder(tmp_path / "intruded"))
    (own / name).write_bytes(intruder)
    load(str(own))
    (own / "model.safetensors").unlink()
    said = rf"{name} is not read, .* run code.*convert them to safetensors.*save_pretrained"
    with pytest.raises(UserError, match=said):
        load(str(own))
    (own / "model.safetensors").write_bytes(intruder)
    with pytest.raises(UserError, match="not a valid safetensors file"):
        load(str(own))
    assert not (tmp_path / "intruded").exists()
    pickle.loads(intruder)  # shows that the pickle would have run code
    assert (tmp_path / "intruded").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_in_a_model_folder_is_rejected(own: Path, name: str) -> None:
    raw = json.loads((own / name).read_text())
    (own / name).write_text(json.dumps({**raw, "auto_map": None}))
    load(str(own))
    (own / "own.py").write_text("raise SystemExit")
    (own / name).write_text(json.dumps({**raw, "auto_map": {"AutoModel": "own.Model"}}))
    with pytest.raises(UserError, match=rf"{name}: 'auto_map' names code .* which is never run"):
        load(str(own))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_and_pipes_in_a_folder(own: Path, tmp_path: Path, name: str) -> None:
    """Links, as in the hub's cache, are followed only to files of the right kind. Pipes do not
    block."""
    path = own / name
    path.rename(tmp_path / "0a1b")
    path.symlink_to("../0a1b")
    load(str(own))
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=rf"{name}: not (a valid safetensors|valid JSON)") as caught:
        load(str(own))
    assert "root:" not in str(caught.value)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=rf"{name}: .*not a regular file"):
        load(str(own))


def test_out_of_bounds_tensors_do_not_crash(own: Path) -> None:
    """The safetensors library raises an error if tensors are out of bounds."""
    header = {"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 2**64 - 1]}}
    text = json.dumps(header).encode()
    (own / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(UserError, match="not a valid safetensors file"):
        load_params(own, config_of_folder(), "float32")


# Chat templates.


def test_templates_are_sandboxed() -> None:
    messages = [{"role": "user", "content": "Why?"}]
    for template, error in {
        "{% for i in range(10**9) %}a{% endfor %}": "OverflowError: Range too big",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "RecursionError",
        "{{ ''.__class__.__mro__ }}": "SecurityError",
        "{{ messages.clear() }}": "SecurityError",
        "{% include '/etc/passwd' %}": "TypeError: no loader",
    }.items():
        with pytest.raises(UserError, match=f"^T: the chat template fails: {error}"):
            render(template, {"messages": messages}, "T")
    assert len(messages) == 1


# The network.

IMPORTING = """
import pkgutil, sys
asked = []
def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        asked.append((event, arguments[1:]))
sys.addaudithook(watch)
import entropix_jax
for module in pkgutil.walk_packages(entropix_jax.__path__, "entropix_jax."):
    if not module.name.endswith("__main__"):
        try:
            __import__(module.name)
        except entropix_jax.errors.UserError as error:
            assert "pip install 'entropix-jax[harness]'" in str(error), error
print(len([name for name in sys.modules if name.startswith("entropix_jax.")]), asked)
"""


def test_importing_uses_no_network() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    number, _, asked = ran.stdout.partition(" ")
    assert asked == "[]\n", ran.stderr
    assert int(number) > 50


# The cache of compiled programs.


def test_the_compilation_cache_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", chosen.__setitem__)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "entropix_jax"

    def is_used() -> bool:
        chosen.clear()
        use_compilation_cache()
        return "jax_compilation_cache_dir" in chosen

    for _ in range(2):
        assert is_used()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o755)  # as in an earlier version
    folder.chmod(0o777)
    assert not is_used()
    said = capsys.readouterr().err
    assert said.startswith(f"note: {folder}: directory is writable by other users")
    assert said.count("\n") == 1
    folder.chmod(0o700)
    assert is_used()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # another user owns the folder
    assert not is_used()
