"""Reading traces back, and the page that is made of one; the page in a browser is in
test_report_page.py."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from entropix_jax import cli
from entropix_jax.errors import UserError
from entropix_jax.names import BOXES, FINDINGS_FORMAT, MEANINGS, REGIMES, TRACE_FORMAT
from entropix_jax.report import command, embedding, page, reading, shapes
from entropix_jax.report.page import check_report, run_page, write_report
from entropix_jax.report.reading import TraceReader
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.trace import TokenRecord
from tests.traces import load_trace

Json = dict[str, Any]
NASTY = "<script>alert('1')</script>\"'&\u2028\u2029\x1b[31m</style>\n]]>{{ 7 * 7 }}\u202e🙂"
STATIC = Path(page.__file__).parent / "static"


def header(**changes: Any) -> Json:
    fields: Json = {
        "type": "header",
        "format_version": TRACE_FORMAT,
        "model": "weights/tiny",
        "sampler": "entropix",
        "sampler_parameters": dict(load_sampler("entropix").values),
        "seed": 0,
        "versions": {"entropix_jax": "0.1.0", "jax": "0.10.2"},
        "backend": "cpu",
        "prompt": "Once",
        "prompt_tokens": [1, 2, 3],
    }
    return fields | changes


def token(position: int, *, retracted: bool = False, **changes: Any) -> Json:
    """A token whose every number differs from that of any other position."""
    draw = random.Random(position * 2 + retracted)
    numbers = {name: round(draw.uniform(0.0, 6.0), 6) for name in reading._METRICS}
    fields: Json = {
        "row": 0,
        "position": position,
        "token_id": draw.randrange(1000),
        "text": f" word{position}",
        "regime": "mid",
        "action": "sample",
        "top_k": 27,
        "forwards": position,
        "loop": False,
        **numbers,
        "top": [(7, " word", 0.5), (8, NASTY, 0.25)],
        "layers": [[0.5, 1.5], [0.25, 2.0]],
    }
    return TokenRecord(**fields | changes).to_json(retracted=retracted)


def branching(position: int, **changes: Any) -> Json:
    branches = [
        {"tokens": [5, 6], "text": " to be", "score": -0.5, "chosen": True},
        {"tokens": [7], "text": NASTY, "score": None, "chosen": False},
    ]
    fields: Json = {"action": "branch", "branches": branches, "ambiguous": True}
    return token(position, regime="lehv", **(fields | changes))


def footer(records: list[Json], **changes: Any) -> Json:
    rows = sorted({record["row"] for record in records})
    counts = {row: [r for r in records if r["row"] == row and r["type"] == "token"] for row in rows}
    fields = [
        {
            "row": row,
            "text": "".join(record["text"] for record in counts[row]),
            "finish_reason": "length",
            "tokens": len(counts[row]),
            "retracted": 0,
            "forwards": 99,
        }
        for row in rows
    ]
    timings = {"first_token": 1.0, "total": 3.0}
    return {"type": "footer", "rows": fields, "timings": timings} | changes


def run_of(count: int = 12, row: int = 0) -> list[Json]:
    """Tokens of one row, with all that a row may have."""
    records = [token(3 + i, row=row, regime=REGIMES[i % 5]) for i in range(count)]
    records[2] = branching(5, row=row)
    records[3] |= {"action": "branch", "regime": "lelv"}
    records[4] |= {"action": "inject"}
    records[6] |= {"loop": True, "regime": "lehv"}
    records[7] |= {"text": NASTY}
    records.insert(8, token(11, retracted=True, row=row, regime="hehv"))
    return records


def lines_of(records: list[Json]) -> list[str]:
    return [json.dumps(record, ensure_ascii=False) + "\n" for record in records]


def write(path: Path, *records: Json) -> Path:
    path.write_text("".join(lines_of(list(records))), encoding="utf-8")
    return path


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    records = run_of()
    return write(tmp_path / "trace.jsonl", header(prompt=NASTY), *records, footer(records))


# Reading.


def test_what_was_written_is_still_read() -> None:
    # Another number refuses every file that has been written with these.
    assert TRACE_FORMAT == 1
    assert FINDINGS_FORMAT == 1


def test_a_whole_trace(whole: Path) -> None:
    found = load_trace(whole)
    written = [json.loads(line) for line in whole.read_text("utf-8").split("\n")[:-1]]
    assert [found.header, *found.tokens, found.footer] == written
    assert not found.torn


def test_a_reader_keeps_no_lines(whole: Path) -> None:
    reader = TraceReader(whole)
    raw = b"".join(line.raw for line in reader)
    assert raw == whole.read_bytes()
    assert reader.tokens == {0: 12}
    assert reader.retracted == {0: 1}
    kept = {name for name, value in vars(reader).items() if isinstance(value, list | bytes)}
    assert not kept


@pytest.mark.parametrize(
    "cut", ["in the last token", "at its beginning", "in a character", "after a whole line"]
)
def test_a_run_that_was_killed(tmp_path: Path, cut: str) -> None:
    """What is there of it is read, and the page says that the rest is missing."""
    records = [header(), *run_of()]
    last = token(15, text="né")
    line = lines_of([last])[0].encode()
    part = {
        "in the last token": line[:200],
        "at its beginning": line[:3],
        "in a character": line[: line.index("é".encode()) + 1],
        "after a whole line": b"",
    }[cut]
    path = tmp_path / "trace.jsonl"
    path.write_bytes("".join(lines_of(records)).encode() + part)
    found = load_trace(path)
    assert found.tokens == [json.loads(text) for text in lines_of(records[1:])]
    assert found.footer is None
    assert found.torn is bool(part)
    text = run_page(path)
    assert "This run was interrupted" in text
    assert ("its last line was cut off" in text) is bool(part)
    assert unpacked(text, "trace") == "".join(lines_of(records)).encode()


def test_a_run_without_a_token_gives_a_page(tmp_path: Path) -> None:
    assert "This run was interrupted" in run_page(write(tmp_path / "t.jsonl", header()))


def without(record: Json, name: str) -> Json:
    return {key: value for key, value in record.items() if key != name}


def bad_footer(**changes: Any) -> Json:
    whole = footer([token(3)])
    return whole | {"rows": [whole["rows"][0] | changes]}


DAMAGED: dict[str, tuple[list[Json | str | bytes], str]] = {
    "an empty file": ([], "empty: not a trace, a batch's output or"),
    "another text": (["Once upon a time\n"], "line 1: not JSON: not a trace, a batch's"),
    "bytes": ([b"\x89PNG\r\n\x1a\n\xff\x00"], "line 1: not JSON: not a trace, a batch's"),
    "a list": (["[1, 2]\n"], "line 1: not a trace, a batch's output or a study's"),
    "another object": ([{"id": "a"}], "line 1: not a trace, a batch's output or a study's"),
    "a token first": ([token(3)], "line 1: not a trace: it does not begin with a header"),
    "half a header": (['{"type": "header", "for'], "line 1: cut off within the header"),
    "a later format": ([header(format_version=2)], "line 1: a trace of format 2, this version"),
    "no format": ([without(header(), "format_version")], "line 1: 'format_version' is missing"),
    "no model": ([without(header(), "model")], "line 1: 'model' is missing"),
    "a model of a wrong type": ([header(model=1)], "line 1: 'model' is not text"),
    "two headers": ([header(), header()], 'line 2: no line of a trace has the type "header"'),
    "an unknown line": ([header(), {"type": "x"}], 'line 2: no line of a trace has the type "x"'),
    "no type": ([header(), {}], "line 2: no line of a trace has the type null"),
    "damage in the middle": ([header(), '{"type": "to\n', token(3)], "line 2: not JSON"),
    "another text at the end": ([header(), token(3), "Killed"], "line 3: not JSON"),
    "a blank line": ([header(), "\n", token(3)], "line 2: not JSON"),
    "bytes in the middle": ([header(), b'{"type": "\xff"}\n', token(3)], "line 2: not UTF-8"),
    "NaN": ([header(), token(3, entropy=float("nan"))], "line 2: NaN is no number"),
    "a number too large": (
        [header(), json.dumps(token(3, entropy=0.5)).replace("0.5,", "1e999,", 1) + "\n"],
        "line 2: 'entropy' is not a number",
    ),
    "a token without a row": ([header(), without(token(3), "row")], "line 2: 'row' is missing"),
    "a token of inspect": (
        [header(), without(token(3), "row") | {"context": 3}],
        "line 2: a token of inspect, which generates nothing: a page is made of a run",
    ),
    "true for a number": ([header(), token(3, entropy=True)], "'entropy' is not a number"),
    "a position of a wrong type": ([header(), token(3) | {"position": 1.5}], "is not an integer"),
    "an unknown regime": ([header(), token(3, regime="none")], 'line 2: no regime "none"'),
    "a missing token": (
        [header(), token(3), token(5)],
        "line 3: position 5 of row 0, where 4 was due: lines are missing",
    ),
    "a token twice": ([header(), token(3), token(3)], "line 3: position 3 of row 0, where 4 was"),
    "top of a wrong form": (
        [header(), token(3, top=[[1, 2]])],
        "'top[0]' is not a list of 3",
    ),
    "a likely token of a wrong type": (
        [header(), token(3, top=[[1, " a", 0.5], [1, 2, 0.5]])],
        "line 2: 'top[1][1]' is not text",
    ),
    "layers of a wrong form": (
        [header(), token(3, layers=[0.5])],
        "'layers[0]' is not a list",
    ),
    "branches of a wrong form": (
        [header(), branching(3, branches=[1])],
        "'branches[0]' is not an",
    ),
    "a branch without text": (
        [header(), branching(3, branches=[{"tokens": []}])],
        "line 2: 'branches[0].text' is missing",
    ),
    "branches, no list": (
        [header(), branching(3, branches={})],
        "line 2: 'branches' is not a list",
    ),
    "something after the footer": (
        [header(), token(3), footer([token(3)]), token(4)],
        "line 4: something follows the footer",
    ),
    "a footer of another run": (
        [header(), token(3), bad_footer(tokens=7)],
        "line 3: the footer counts 7 tokens of row 0, the file holds 1",
    ),
    "a footer without rows": ([header(), without(footer([]), "rows")], "line 2: 'rows' is missing"),
    "a row of a wrong form": ([header(), footer([], rows=[3])], "'rows[0]' is not an object"),
    "an end of a wrong type": (
        [header(), token(3), bad_footer(finish_reason=["eos"])],
        "line 3: 'rows[0].finish_reason' is not text",
    ),
    "an error of a wrong type": (
        [header(), token(3), bad_footer(error=3)],
        "line 3: 'rows[0].error' is not text",
    ),
    "a time of a wrong type": (
        [header(), footer([], timings={"total": "long"})],
        "line 2: 'timings.total' is not a number",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_wrong_is_said_with_file_and_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, status 2, and no page: the one that was there stays."""
    content, message = DAMAGED[name]
    path, output = tmp_path / "trace.jsonl", tmp_path / "page.html"
    parts = [
        part.encode() if isinstance(part, str) else part
        for part in (json.dumps(p) + "\n" if isinstance(p, dict) else p for p in content)
    ]
    path.write_bytes(b"".join(parts))
    output.write_text("before")
    assert command.main([str(path), "--output", str(output)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"error: {path}: ")
    assert message in line
    assert output.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "trace.jsonl"]


def conditions(**changes: Any) -> Json:
    values = {**load_sampler("entropix").values, **changes}
    return header(sampler_parameters={k: v for k, v in values.items() if v is not None})


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (header(sampler_parameters={}), "line 1: the sampler's parameters lack 'regimes.lelv'"),
        (conditions(**{"regimes.mid": None, "regimes.hehv": None}), "lack 'regimes.hehv'"),
        (
            conditions(**{"regimes.lehv": ["entropy ~ 3"]}),
            "'entropy ~ 3': expected QUANTITY",
        ),
        (
            conditions(**{"regimes.lehv": ["surprise < 3"]}),
            "no quantity 'surprise' (known: ",
        ),
        (conditions(**{"regimes.lehv": ["entropy < h9"]}), "'h9' is neither a number"),
        (conditions(**{"regimes.lehv": [3]}), "regimes.lehv: 3: expected QUANTITY"),
        (conditions(**{"thresholds.h2": None}), "'thresholds.h2' is missing"),
    ],
)
def test_a_header_whose_boxes_cannot_be_drawn(start: Json, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        run_page(write(tmp_path / "t.jsonl", start, token(3)))


def test_a_line_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "LONGEST_LINE", 5000)
    path = write(tmp_path / "t.jsonl", header(), token(3, text="a" * 5000))
    with pytest.raises(UserError, match="line 2: too long for a line"):
        load_trace(path)


# The command.


def test_the_command(whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    assert cli.main(["report", str(whole), "--output", str(output)]) == 0
    assert output.read_text("utf-8") == run_page(whole)


@pytest.mark.parametrize(
    ("trace_name", "output", "message"),
    [
        ("missing.jsonl", "page.html", "missing.jsonl: no such file"),
        (".", "page.html", "no study.json"),
        ("trace.jsonl", "no/page.html", "page.html: cannot be written: no folder"),
        ("trace.jsonl", ".", "cannot be written: it is a folder"),
        ("trace.jsonl", "trace.jsonl", "would take the place of its own source"),
    ],
)
def test_bad_paths(
    trace_name: str,
    output: str,
    message: str,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = whole.read_bytes()
    assert command.main([str(tmp_path / trace_name), "--output", str(tmp_path / output)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert whole.read_bytes() == before


def test_a_pipe_is_no_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an input is, its beginning says, which a pipe gives once: it is not waited for."""
    pipe, output = tmp_path / "pipe", tmp_path / "page.html"
    os.mkfifo(pipe)
    for inputs in ([str(pipe)], [str(pipe), str(pipe)]):
        assert command.main([*inputs, "--output", str(output)]) == 2
        assert capsys.readouterr().err == f"error: {pipe}: not a regular file: save it in one\n"
    assert not output.exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_takes_nothing_new(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """Even where the page itself could be overwritten: it is refused before anything is run."""
    folder = tmp_path / "folder"
    folder.mkdir()
    output = folder / "page.html"
    if there:
        output.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    with pytest.raises(UserError, match=r"page\.html: cannot be written: no permission"):
        check_report(output, whole)


def test_a_page_takes_no_devices_place(whole: Path) -> None:
    with pytest.raises(UserError, match="/dev/null: cannot be written: not a regular file"):
        check_report(Path("/dev/null"), whole)


def test_without_the_plotting_library(monkeypatch: pytest.MonkeyPatch, whole: Path) -> None:
    find_spec = importlib.util.find_spec
    found = {"plotly": None}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: found[name] if name in found else find_spec(name, package),
    )
    with pytest.raises(UserError, match="plotly is not installed: pip install"):
        run_page(whole)


def test_reports_need_no_jax() -> None:
    """Nor the Python half of the plotting library: a page is there at once."""
    code = (
        "import sys, entropix_jax.report.page as page; page.plotly_source(); "
        "from entropix_jax.report import comparing, kinds, records, study; "
        "print({'jax', 'plotly', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_is_said_twice_is_the_same() -> None:
    """Scripts in a browser have words of their own."""
    script = (STATIC / "regimes.js").read_text("utf-8")
    assert f"const BOXES = {json.dumps(list(BOXES))};" in script
    shown = re.findall(r'(\w+): \{ title: "\w+", meaning: "(\w+)"', script)
    assert dict(shown) == MEANINGS


# The page.


class Parsed(HTMLParser):
    """The elements of a page, and the text of each script by its id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._script = dict(attrs).get("id") or "own"
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] += data


def unpacked(text: str, name: str) -> bytes:
    return zlib.decompress(base64.b64decode(Parsed(text).scripts[name]))


def test_a_page_holds_its_trace(whole: Path) -> None:
    text = run_page(whole)
    assert unpacked(text, "trace") == whole.read_bytes()
    facts = json.loads(Parsed(text).scripts["facts"])
    assert facts["prompt"] == NASTY
    assert facts["seed"] == 0
    assert facts["speed"] == (12 - 1) / (3.0 - 1.0)
    assert facts["rows"][0]["forwards"] == 99
    assert facts["boxes"]["lelv"][0] == {"quantity": "entropy", "sign": "<", "name": "h1"}


def test_nothing_breaks_out_of_a_page(tmp_path: Path) -> None:
    """Whatever text a trace has: the same elements as with plain words, in the same order."""

    def tags(text: str) -> list[str]:
        start = header(prompt=text, model=text, sampler=text, versions={text: text}, backend=text)
        records = [token(3, text=text, action=text, top=[[1, text, 0.5]])]
        rows = footer(records)["rows"]
        rows[0] |= {"finish_reason": text, "error": text}
        end = footer(records, rows=rows)
        path = write(tmp_path / "t.jsonl", start, *records, end)
        found = run_page(path)
        assert text == "plain" or text not in found
        assert "\u2028" not in Parsed(found).scripts["facts"]
        return [tag for tag, _ in Parsed(found).tags]

    assert tags(NASTY) == tags("plain")


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    path, output = tmp_path / "t.jsonl", tmp_path / "page.html"
    line = json.dumps(header(model="caf\udce9", prompt="\ud800")) + "\n"
    path.write_text(line + lines_of([token(3)])[0], encoding="utf-8")
    write_report(path, output)
    assert "<dd>caf?</dd>" in output.read_text("utf-8")


def test_a_page_asks_nothing_of_a_network(whole: Path) -> None:
    parsed = Parsed(run_page(whole))
    for tag, attributes in parsed.tags:
        for name in ("src", "href", "action", "srcset"):
            assert attributes.get(name, "data:,") == "data:,", (tag, attributes)
    (policy,) = (
        attributes["content"]
        for tag, attributes in parsed.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    for source in (parsed.scripts["own"].encode(), unpacked(run_page(whole), "plotly")):
        assert embedding.digest(source) in policy


def test_the_same_trace_gives_the_same_page(whole: Path, tmp_path: Path) -> None:
    first = tmp_path / "first.html"
    write_report(whole, first)
    program = [sys.executable, "-m", "entropix_jax.report", str(whole)]
    second = tmp_path / "second.html"
    subprocess.run([*program, "--output", str(second)], check=True)
    assert first.read_bytes() == second.read_bytes()


def test_a_page_of_a_large_model_is_small_enough(tmp_path: Path) -> None:
    """1,000 tokens with the heads of Llama-3.2-1B, 16 layers of 32: at most 8 MB."""
    draw = random.Random(0)

    def heads() -> list[list[float]]:
        return [[round(draw.uniform(0, 8), 7) for _ in range(32)] for _ in range(16)]

    records = [token(3 + i, layers=heads()) for i in range(1000)]
    path = write(tmp_path / "t.jsonl", header(), *records, footer(records))
    assert path.stat().st_size > 5e6
    assert len(run_page(path).encode()) < 8e6


@pytest.mark.parametrize("kind", ["run", "compare", "batch", "study"])
def test_scripts_are_put_together_in_order(kind: str) -> None:
    text = embedding.script(kind)
    names = re.findall(r"^// (\w+)\.js$", text, re.MULTILINE)
    assert len(names) == len(set(names))
    assert names[-1] == kind
    for i, name in enumerate(names):
        source = (STATIC / f"{name}.js").read_text("utf-8")
        needs = re.findall(r'from "\./(\w+)\.js"', source)
        assert set(needs) <= set(names[:i]), name
    assert not re.search(r"^(import|export)\b", text, re.MULTILINE)
    assert "</script" not in text
    tops = re.findall(r"^(?:async )?(?:function|const|class) (\w+)", text, re.MULTILINE)
    assert len(tops) == len(set(tops))


def test_every_script_is_in_a_page() -> None:
    pages = [path.stem for path in (STATIC.parent / "templates").glob("*.html")]
    found = [
        re.findall(r"^// (\w+)\.js$", embedding.script(kind), re.MULTILINE)
        for kind in pages
        if kind != "base"
    ]
    assert set().union(*found) == {path.stem for path in STATIC.glob("*.js")}
