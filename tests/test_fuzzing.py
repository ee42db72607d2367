"""Damaged and hostile files: each gives a right result or a UserError of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from entropix_jax.errors import UserError
from tests.support.properties import examples
from tests.support.surfaces import SURFACES, Reader, check_line

# JSON that Python's writer does not write: it stands in place of a mark.
RAW = (
    *("NaN", "Infinity", "1e999", "-0.0", "1e-400", "9" * 5000, "01", "'a'", ""),
    *("[" * 500 + "]" * 500, "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, '{"a": 1, "a": 2}'),
    *('"\\ud800"', '"\\u0000"'),
)
VALUES = st.one_of(
    st.sampled_from([f"@RAW{i}@" for i in range(len(RAW))]),
    st.sampled_from([2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, -(2**63), -1, 0, 1]),
    st.sampled_from(["", "\0", "\x1b[31m", "\u2028", "../../../etc/passwd", "a" * 70_000]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=8,
    ),
)
TOML = st.sampled_from(
    [
        *("true", "0", "-1", "inf", "nan", '""', "[]", "{}", "1e400", "1979-05-27", "1000000"),
        *("0x" + "f" * 5000, '"../x.toml"', '"entropy > h2"', '["entropy < 1e9"]'),
        *("9" * 5000, '"\\ud800"', "[" * 50_000, "{a = " * 300 + "1" + "}" * 300, "[[], {}]"),
        *("{ from = nan, to = inf }", '{ from = 2, to = 1, scale = "log" }', '["edt", "edt"]'),
        *('"30%"', '"100.5%"', '"-0%"', '"%"', '[".", ""]'),
        *('["entropy < 30%"]', '["agreement > 1e400%"]'),
    ]
)
JUNK = st.binary(max_size=8) | st.sampled_from(
    [
        *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b'"', b"{{", b"{%", b"," * 3000),
        *(b"A" * 70_000, b"[" * 3000, b"9" * 5000, b"{{ 'a' * 10**9 }}"),
        b"{% for i in range(10**9) %}",
    ]
)


@st.composite
def damaged_bytes(draw: Any, data: bytes) -> bytes:
    """Some bytes cut, replaced, repeated or put in."""
    start = draw(st.integers(0, len(data)))
    end = min(len(data), start + draw(st.sampled_from([0, 1, 4, 64, len(data)])))
    part = draw(JUNK | st.just(data[start:end] * 2))
    return data[:start] + part + data[end:]


def some_key(parent: Any) -> Any:
    return st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent)))


@st.composite
def damaged_json(draw: Any, data: bytes) -> bytes:
    """Some values replaced, renamed, removed or added."""
    value = json.loads(data)
    for _ in range(draw(st.integers(1, 3))):
        if not isinstance(value, dict | list) or not value:
            break
        parent, key = value, draw(some_key(value))
        while isinstance(parent[key], dict | list) and parent[key] and draw(st.booleans()):
            parent = parent[key]
            key = draw(some_key(parent))
        change = draw(st.sampled_from(["replace", "replace", "remove", "rename", "wrap", "scale"]))
        old = parent.pop(key) if change in ("remove", "rename") else parent[key]
        if change == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from(["extra", "", "type", str(key).upper()]))] = old
        elif change == "wrap":
            parent[key] = draw(st.sampled_from([[old], {"x": old}, [old, old], str(old)[:1000]]))
        elif change == "scale" and isinstance(old, int | float):
            parent[key] = draw(st.sampled_from([-old, old + 1, old * 2, old / 2, str(old)]))
        elif change in ("replace", "scale"):
            parent[key] = draw(VALUES)
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    for i, raw in enumerate(RAW):
        text = text.replace(f'"@RAW{i}@"', raw)
    return text.encode("utf-8", "surrogatepass")


@st.composite
def damaged_lines(draw: Any, data: bytes) -> bytes:
    """A line changed, moved, repeated or lost, or one that is none put in."""
    rows = data.splitlines(keepends=True)
    at = draw(st.integers(0, len(rows) - 1))
    line = rows.pop(at)
    for _ in range(draw(st.integers(0, 2))):
        rows.insert(draw(st.integers(0, len(rows))), line)
    other = st.sampled_from([b"\n", b"[]\n", b"null\n", b'"a"\n'])
    if line.endswith(b"}\n"):
        other |= damaged_json(line).map(lambda new: new + b"\n")
    rows.insert(at, draw(other))
    return b"".join(rows)


@st.composite
def damaged_toml(draw: Any, data: bytes) -> bytes:
    """A value replaced, or a line lost, repeated or put in."""
    rows = data.decode().split("\n")
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(rows) - 1))
        key = rows[at].partition("=")[0].strip() or "extra"
        rows[at : at + draw(st.integers(0, 1))] = draw(
            st.sampled_from([[], [rows[at]] * 2, ["[extra]"], ["[[a]]"]])
            | TOML.map(lambda value: [f"{key} = {value}"])  # noqa: B023
        )
    return "\n".join(rows).encode()


DAMAGED: dict[str, Any] = {"json": damaged_json, "lines": damaged_lines, "toml": damaged_toml}
# What readers of text trip over, whatever the format.
HOSTILE = (
    *(b"", b"\0", b"\xef\xbb\xbf", b"\xff\xfe{\0}\0", b"[]", b"{}", b"null", b"1", b'"a"', b"[[]]"),
    *(b"[" * 100_000, b'{"a":' * 3000, b"9" * 5000, b"A" * 1_000_000, b"\n" * 5000, b'"\\ud800"'),
    *(b"\xff" * 8, (2**63).to_bytes(8, "little"), (100).to_bytes(8, "little") + b"{" * 100),
)


def refused(read: Reader, data: bytes) -> bool:
    try:
        read(data)
    except UserError as error:
        check_line(error)
        return True
    return False


@pytest.mark.parametrize("name", SURFACES)
def test_each_file_gives_a_result_or_a_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entropix_jax.report.page.plotly_source", bytes)
    surface = SURFACES[name]
    valid, read = surface.prepare(tmp_path)
    for data in valid:
        read(data)
    outcomes = [refused(read, data) for data in HOSTILE]
    strategies = st.sampled_from(valid).flatmap(damaged_bytes)
    if surface.format in DAMAGED:
        strategies = st.sampled_from(valid).flatmap(DAMAGED[surface.format]) | strategies

    @examples(100)
    @hypothesis.given(strategies)
    def all_of(data: bytes) -> None:
        outcomes.append(refused(read, data))

    all_of()
    assert False in outcomes  # not so damaged that nothing is read
