"""Files from others run no code, and nothing reaches out that was not asked to."""

from __future__ import annotations

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
from entropix_jax.model.checkpoint import load_params
from entropix_jax.model.loading import load
from entropix_jax.text.chat_template import render_chat
from tests.support.model_folders import config_of_folder, write_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


# Checkpoints.


class _Intruder:
    """What, unpickled, leaves a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "pytorch_model-1-of-2.bin"]
)
def test_pickles_are_not_read(folder: Path, tmp_path: Path, name: str) -> None:
    """Neither alone, which is said with a way out, nor beside weights of the right kind."""
    intruder = pickle.dumps(_Intruder(tmp_path / "intruded"))
    (folder / name).write_bytes(intruder)
    load(str(folder))
    (folder / "model.safetensors").unlink()
    said = rf"{name}, which can run code.*convert them to safetensors.*save_pretrained"
    with pytest.raises(UserError, match=said):
        load(str(folder))
    (folder / "model.safetensors").write_bytes(intruder)
    with pytest.raises(UserError, match="not a valid safetensors file"):
        load(str(folder))
    assert not (tmp_path / "intruded").exists()
    pickle.loads(intruder)  # which is what would have happened
    assert (tmp_path / "intruded").exists()


def test_pickles_come_before_what_else_is_missing(tmp_path: Path) -> None:
    """The layout in which Llama's weights were first published has no config.json."""
    (tmp_path / "consolidated.00.pth").touch()
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(UserError, match=r"consolidated\.00\.pth, which can run code"):
        load(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_of_the_folders_own_is_refused(folder: Path, name: str) -> None:
    raw = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**raw, "auto_map": None}))
    load(str(folder))
    (folder / "own.py").write_text("raise SystemExit")
    (folder / name).write_text(json.dumps({**raw, "auto_map": {"AutoModel": "own.Model"}}))
    with pytest.raises(UserError, match=rf"{name}: 'auto_map' names code .* which is not run"):
        load(str(folder))


def test_links_into_the_hubs_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    """There a snapshot is made of links; what they lead to is safetensors or refused."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    path = folder / "model.safetensors"
    path.rename(blobs / "0a1b")
    path.symlink_to("../blobs/0a1b")
    load(str(folder))
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="not a valid safetensors file") as caught:
        load(str(folder))
    assert "root:" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_pipes_in_a_folder_are_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UserError, match=rf"{name}: .*not a regular file"):
        load(str(folder))


def test_the_library_raises_and_does_not_crash(folder: Path) -> None:
    """A header within which tensors lie beyond all bounds."""
    header = {"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 2**64 - 1]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(UserError, match="not a valid safetensors file"):
        load_params(folder, config_of_folder(), "float32")


# Chat templates.


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% for i in range(10**9) %}a{% endfor %}", "OverflowError: Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ messages[0].__class__.__base__ }}", "SecurityError"),
        ("{{ messages.clear() }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "TypeError: no loader"),
    ],
)
def test_templates_are_sandboxed(template: str, error: str) -> None:
    messages = [{"role": "user", "content": "Why?"}]
    with pytest.raises(UserError, match=f"^T: the chat template fails: {error}"):
        render_chat(template, messages, origin="T", special_tokens={}, add_generation_prompt=True)
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


def test_importing_asks_nothing_of_a_network() -> None:
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


def test_the_hub_is_asked_for_an_id_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def download(repo: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append((repo, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load(str(folder))
    load("tiny")
    assert asked == []
    load("owner/name")
    assert [repo for repo, _ in asked] == ["owner/name"]
    kinds = {Path(pattern).suffix for pattern in asked[0][1]}
    assert kinds == {".json", ".jinja", ".safetensors", ".model"}


# The cache of compiled programs.


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is set of JAX, with a cache folder of one's own."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return found


def test_compiled_programs_are_kept_from_others(chosen: dict[str, Any], tmp_path: Path) -> None:
    own, programs = tmp_path / "entropix_jax", tmp_path / "entropix_jax" / "xla"
    for _ in range(2):
        use_compilation_cache()
        assert chosen["jax_compilation_cache_dir"] == str(programs)
        assert [stat.S_IMODE(p.stat().st_mode) for p in (own, programs)] == [0o700, 0o700]
        own.chmod(0o755)  # as an earlier version left it
        programs.chmod(0o775)


@pytest.mark.parametrize("name", ["entropix_jax", "entropix_jax/xla"])
def test_a_cache_that_others_could_write_to_is_not_used(
    chosen: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    (tmp_path / "entropix_jax" / "xla").mkdir(parents=True)
    (tmp_path / name).chmod(0o777)
    use_compilation_cache()
    assert "jax_compilation_cache_dir" not in chosen
    said = capsys.readouterr().err
    assert said.startswith(f"note: {tmp_path / name}: others could write there")
    assert said.count("\n") == 1
    (tmp_path / name).chmod(0o700)
    use_compilation_cache()
    assert chosen.pop("jax_compilation_cache_dir")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # then it is another's
    use_compilation_cache()
    assert "jax_compilation_cache_dir" not in chosen
