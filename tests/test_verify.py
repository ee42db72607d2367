"""The scripts that check the project: what they find is kept, told, and in the exit status."""

import argparse
import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import run_readme
import verify
from verification.findings import Findings, Line, read_findings, write_findings

FINE = Line("rows alone and in a batch", 12, "rows", 0, note="the same")
BAD = Line("inputs of one kind", 3, "inputs", 1, details=[{"number": 2, "said": "a traceback"}])

Run = Callable[[argparse.Namespace, Path], list[Line]]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Run]:
    """What each part does instead, by name; a part that is not there finds nothing wrong."""
    doing: dict[str, Run] = {}

    def module(part: str) -> SimpleNamespace:
        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--rows", type=int, default=7)

        return SimpleNamespace(
            add_arguments=add_arguments, run=doing.get(part, lambda args, folder: [FINE])
        )

    monkeypatch.setattr(verify, "_module", module)
    return doing


def lines_of(folder: Path, part: str) -> list[Line]:
    findings = read_findings(folder, part)
    assert findings is not None
    return findings.lines


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["verify.py", *map(str, words)])
    return verify.main()


def test_a_part_is_run_with_its_options(
    parts: dict[str, Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = []

    def noted(args: argparse.Namespace, folder: Path) -> list[Line]:
        given.append((args.rows, folder))
        return [FINE]

    parts["repeats"] = noted
    assert run(monkeypatch, "repeats", "--rows", 5, "--output", tmp_path) == 0
    assert given == [(5, tmp_path / "repeats")]
    assert lines_of(tmp_path, "repeats") == [FINE]


def test_all_parts_are_run_and_told(
    parts: dict[str, Run],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def noted(args: argparse.Namespace, folder: Path) -> list[Line]:
        asked.append((folder.name, args.rows))
        return [Line(folder.name, 1, "things", 0)]

    parts.update(dict.fromkeys(verify.PARTS, noted))
    assert run(monkeypatch, "all", "--output", tmp_path) == 0
    assert asked == [(part, 7) for part in verify.PARTS]
    told = capsys.readouterr().out
    assert all(part in told for part in verify.PARTS)
    assert run(monkeypatch, "table", "--output", tmp_path) == 0
    assert capsys.readouterr().out == told
    assert len(asked) == len(verify.PARTS)  # a table runs nothing


@pytest.mark.parametrize("bad", [BAD, Line("nothing was tried", 0, "inputs", 0)])
def test_a_failure_is_in_the_status(
    parts: dict[str, Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: Line
) -> None:
    parts["fuzzing"] = lambda args, folder: [FINE, bad]
    assert run(monkeypatch, "fuzzing", "--output", tmp_path) == 1
    assert run(monkeypatch, "table", "--output", tmp_path) == 1
    assert run(monkeypatch, "memory", "--output", tmp_path) == 0  # another part's


def test_a_failure_is_told(
    parts: dict[str, Run],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts["fuzzing"] = lambda args, folder: [BAD]
    run(monkeypatch, "fuzzing", "--output", tmp_path)
    assert "inputs of one kind: {'number': 2, 'said': 'a traceback'}" in capsys.readouterr().err


def test_a_part_that_breaks_is_a_failure_and_the_others_go_on(
    parts: dict[str, Run],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(args: argparse.Namespace, folder: Path) -> list[Line]:
        raise OSError("the disk is full")

    parts["properties"] = broken
    assert run(monkeypatch, "all", "--output", tmp_path) == 1
    (line,) = lines_of(tmp_path, "properties")
    assert (line.failures, line.note) == (1, "OSError: the disk is full")
    assert lines_of(tmp_path, list(verify.PARTS)[-1]) == [FINE]
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["faults", "memory", "mutants"])
def test_what_was_done_counts_as_long_as_it_holds(
    parts: dict[str, Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    """Kills and memory of other code say nothing; mutants look for themselves."""
    seen: list[int] = []

    def counted(args: argparse.Namespace, folder: Path) -> list[Line]:
        (folder / f"done-{len(seen)}").touch()
        seen.append(len(list(folder.glob("done-*"))))
        return [FINE]

    parts[part] = counted
    run(monkeypatch, part, "--output", tmp_path)
    run(monkeypatch, part, "--output", tmp_path)
    assert seen == [1, 2]
    monkeypatch.setattr(verify, "code_digest", lambda: "another")
    run(monkeypatch, part, "--output", tmp_path)
    assert seen == [1, 2, 3 if part == "mutants" else 1]
    run(monkeypatch, part, "--output", tmp_path, "--fresh")
    assert seen[-1] == 1


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="cosmic_ray")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "mutants")
    assert ended.value.code == (
        "error: mutants needs cosmic_ray: pip install -e '.[verification,parity]'"
    )


@pytest.mark.parametrize(
    ("command", "package", "said"),
    [
        (["parity.py"], "torch", "error: torch is missing: pip install -e '.[parity]'\n"),
        (["train_tiny.py"], "optax", "error: optax is missing: pip install -e '.[train]'\n"),
        (  # before it measures anything
            ["benchmark_batch.py", "--transformers"],
            "torch",
            "error: --transformers needs torch: pip install -e '.[parity]'\n",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_script_says_what_it_lacks(
    command: list[str], package: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(name={package!r})")
    root = Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, root / "scripts" / command[0], *command[1:]],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])},
        timeout=120,
    )
    assert ran.returncode != 0
    assert ran.stderr == said


def test_a_part_that_finds_nothing_is_no_success(
    parts: dict[str, Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts["repeats"] = lambda args, folder: []
    assert run(monkeypatch, "repeats", "--output", tmp_path) == 1


def test_mutants_are_tested_and_not_the_package_beside_them() -> None:
    """Its workers import this first, and then fork: what had imported the package would test that
    one, whatever is planted into a mutant."""
    code = "import sys, tests.conftest; sys.exit('entropix_jax' in sys.modules)"
    root = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_what_is_judged_equivalent_is_in_the_source() -> None:
    """A judgement is about a line of a function; where either has gone, so has the judgement."""
    judged = Path(verify.__file__).with_name("verification") / "equivalent_mutants.toml"
    for module, entries in tomllib.loads(judged.read_text(encoding="utf-8")).items():
        source = (verify.ROOT / "entropix_jax" / module).read_text(encoding="utf-8")
        texts = {"": source, **dict(definitions(source, ast.parse(source)))}
        for entry in entries:
            text = texts[entry.get("in", "")]
            assert "".join(entry["before"].split()) in "".join(text.split()), (module, entry)


def definitions(source: str, node: ast.AST, name: str = "") -> Iterator[tuple[str, str]]:
    """Functions and classes: each with the names of those that it is in, and its text."""
    for inner in ast.iter_child_nodes(node):
        own = name
        if isinstance(inner, ast.FunctionDef | ast.ClassDef):
            own = f"{name}.{inner.name}" if name else inner.name
            yield own, ast.get_source_segment(source, inner) or ""
        yield from definitions(source, inner, own)


def test_without_findings_there_is_no_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "table", "--output", tmp_path) == 1
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)


def test_findings_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_findings(tmp_path, "faults", Findings([FINE], "abc", 1.5))

    def full(*args: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("verification.findings.os.replace", full)
    with pytest.raises(OSError, match="no space"):
        write_findings(tmp_path, "faults", Findings([BAD]))
    assert read_findings(tmp_path, "faults") == Findings([FINE], "abc", 1.5)


def test_the_table_says_of_which_commit_each_line_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_findings(tmp_path, "fuzzing", Findings([replace(FINE, note="a |\nb")], "abc1234"))
    write_findings(tmp_path, "memory", Findings([FINE], "def5678-dirty"))
    assert run(monkeypatch, "table", "--markdown", "--output", tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| what | tried | failures | wanted | note | commit |",
        "| --- | --- | --- | --- | --- | --- |",
        "| rows alone and in a batch | 12 rows | 0 | 0 failures | a \\| b | abc1234 |",
        "| rows alone and in a batch | 12 rows | 0 | 0 failures | the same | def5678-dirty |",
    ]


def test_a_part_is_of_the_commit_at_which_it_was_begun(
    parts: dict[str, Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commits = iter(["begun", "later"])
    monkeypatch.setattr(verify, "checked_out_commit", lambda: next(commits))
    run(monkeypatch, "repeats", "--output", tmp_path)
    findings = read_findings(tmp_path, "repeats")
    assert findings is not None
    assert findings.commit == "begun"


# The README's blocks.

TEXT = """# A title

    scripts/demo
    scripts/test

A formula:

    H = -sum p log2 p

```python
print("said by the block")
```

- a list
    continued, which is no block

```toml
tasks = ["sums"]
```

```
.venv/bin/python -m entropix_jax.main --model gs://bucket
```
"""


def test_blocks_of_a_readme() -> None:
    found = [(block.line, block.kind, block.is_long) for block in run_readme.blocks(TEXT)]
    assert found == [
        (3, "shell", True),
        (8, "", False),
        (11, "python", False),
        (18, "toml", True),
        (22, "", False),
    ]


def readme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, *words: str) -> int:
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    if not python.exists():
        python.symlink_to(sys.executable)
    (tmp_path / "README.md").write_text(text)
    monkeypatch.setattr(run_readme, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_readme.py", *words])
    return run_readme.main()


@pytest.mark.parametrize(
    ("text", "words", "status", "said"),
    [
        ("```python\nprint(1)\n```\n", (), 0, "README.md:2: print(1) (status 0"),
        ("```python\n1 / 0\n```\n", (), 1, "ZeroDivisionError"),
        ("\n    printf one && false\n    printf two\n", (), 1, "(status 1"),
        ("\n    printf x > /tmp/entropix-of-readme && exit 3\n", (), 1, "(status 3"),
        ("\n    scripts/demo\n", ("--quick",), 0, "README.md:2: scripts/demo (takes minutes)"),
        ("\n    for i in 1; do sleep 60; done\n", ("--limit", "0.2"), 1, "(status 124,"),
        ("```python\n1 / 0\n```\n", ("--list",), 0, "README.md:2: 1 / 0 (python)"),
        ("```python\n1 / 0\n```\n", ("--from", "3"), 0, ""),
        ("```python\n1 / 0\n```\n", ("--to", "1"), 0, ""),
    ],
)
def test_a_readme_is_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: Sequence[str],
    status: int,
    said: str,
) -> None:
    Path("/tmp/entropix-of-readme").unlink(missing_ok=True)
    assert readme(monkeypatch, tmp_path, text, *words) == status
    assert said in capsys.readouterr().out
    assert not Path("/tmp/entropix-of-readme").exists()


def test_an_interrupt_ends_the_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[subprocess.Popen[str]] = []
    wait = subprocess.Popen.communicate

    def interrupted(process: subprocess.Popen[str], timeout: float | None = None) -> Any:
        if not begun:
            begun.append(process)
            raise KeyboardInterrupt
        return wait(process, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        readme(monkeypatch, tmp_path, "\n    for i in 1; do exec sleep 60; done\n")
    with pytest.raises(ProcessLookupError):
        os.killpg(begun[0].pid, 0)


def test_a_readme_is_run_where_folders_have_spaces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a place").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a place"))
    text = "\n    printf x > /tmp/one && test -f /tmp/one\n"
    assert readme(monkeypatch, tmp_path, text) == 0, capsys.readouterr().out
