"""Scripts that check the project and that measure its speed."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import run_docs
from bench import compare_trees
from peers import LlamaCpp
from timing import Figures, take_turns

from entropix_jax.errors import UserError
from tests.support.models import tiny_config

# If two files shared a scratch folder, there would be two bytes.
APPENDS = "\n    printf x >> /tmp/entropix-docs && test $(wc -c </tmp/entropix-docs) = 1\n"
OTHERS = "- a list\n    continued, no block\n\nA formula:\n\n    H = -p\n"


@pytest.mark.parametrize(
    ("text", "words", "status", "said"),
    [
        ("```python\nprint(1)\n```\n", (), 0, "README.md:2: print(1) (status 0"),
        ("```python\n1 / 0\n```\n", (), 1, "ZeroDivisionError"),
        ("\n    printf one && false\n    printf two\n", (), 1, "(status 1"),
        (APPENDS, (), 0, "page.md:2: "),
        ("\n    scripts/demo\n", ("--quick",), 0, "README.md:2: scripts/demo (takes minutes)"),
        ("\n    for i in 1; do sleep 60; done\n", ("--limit", "0.2"), 1, "(status 124,"),
        ("```python\n1 / 0\n```\n", ("--list",), 0, "docs/page.md:2: 1 / 0 (python)"),
        ("```console\n1 / 0\n```\n", (), 0, "(not run here)"),
        (OTHERS, (), 0, ""),
    ],
)
def test_run_docs(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: Sequence[str],
    status: int,
    said: str,
) -> None:
    """Runs a README and a page of docs with the same text, in a folder whose name has a space. Each
    file has its own scratch folder."""
    root = tmp_path / "a place"
    for name in ("docs", ".venv/bin"):
        (root / name).mkdir(parents=True)
    (root / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for name in ("README.md", "docs/page.md"):
        (root / name).write_text(text)
    monkeypatch.setattr("tempfile.tempdir", str(root))
    monkeypatch.setattr(run_docs, "ROOT", root)
    monkeypatch.setattr(sys, "argv", ["run_docs.py", *words])
    assert run_docs.main() == status
    assert said in capsys.readouterr().out
    assert not Path("/tmp/entropix-docs").exists()


def fail() -> float:
    raise RuntimeError("no\n model")


def test_another_engine_that_fails_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert take_turns({"ours": lambda: 1.0}, 2, {"theirs": fail}) == {"ours": [1.0, 1.0]}
    assert capsys.readouterr().err == "note: theirs is skipped: no model\n"
    with pytest.raises(RuntimeError):
        take_turns({"ours": fail}, 2)


def test_errors_of_llama_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command, model = tmp_path / "llama-bench", tmp_path / "model.gguf"
    command.write_text("#!/bin/sh\necho 'cannot load' >&2\nexit 1\n")
    command.chmod(0o755)
    model.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    timed = LlamaCpp("llama.cpp", model, tiny_config()).prefill(8)
    with pytest.raises(UserError, match=r"no figures \(status 1\): cannot load"):
        timed()


TREE = """
import json, pathlib, sys
*words, repeats, one, json_option, file = sys.argv[1:]
assert (words, repeats, one, json_option) == (["step"], "--repeats", "1", "--json")
row = {"kind": "step", "batch": 4, "engine": "greedy", "seconds": SECONDS}
pathlib.Path(file).write_text(json.dumps({"rows": [row]}))
"""


def test_checkouts_take_turns(tmp_path: Path) -> None:
    trees = [tmp_path / name for name in ("a", "b")]
    for tree, seconds in zip(trees, ("2.0", "5.0"), strict=True):
        (tree / "scripts").mkdir(parents=True)
        (tree / "scripts" / "bench.py").write_text(TREE.replace("SECONDS", seconds))
    figures = Figures(3)
    compare_trees(trees, ["step"], figures)
    found = [(row["engine"], row["batch"], row["seconds"], row["times"]) for row in figures.rows]
    assert found == [(f"greedy, {trees[0]}", 4, 2.0, 1.0), (f"greedy, {trees[1]}", 4, 5.0, 2.5)]
