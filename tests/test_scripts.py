"""Scripts that check the project, and what they say where a package is missing."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import run_docs

ROOT = Path(__file__).parents[1]


# In a scratch folder that another file also wrote to there would be two bytes.
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
def test_a_text_is_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: Sequence[str],
    status: int,
    said: str,
) -> None:
    """A README beside a page of docs that has the same text, in a folder whose name has a space;
    each file has a scratch folder of its own."""
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
