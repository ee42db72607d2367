"""Models from the hub, with a server on loopback in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub_server import COMMIT, REPO, TOKEN, Hub, serving
from tests.support.model_folders import write_model
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
WEIGHTS = "model.safetensors"
GATED = f"{REPO}: access is restricted; accept its terms on its page, then run 'hf auth login'\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("served") / "model")
    (folder / "pytorch_model.bin").write_bytes(b"not asked for")
    return folder


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    with serving(Hub(folder)) as hub:
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
