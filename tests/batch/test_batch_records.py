"""Reading a batch's input: what is a record, what is none and why, from files of all kinds."""

from __future__ import annotations

import bz2
import dataclasses
import gc
import gzip
import io
import itertools
import json
import lzma
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import _registry as drivers
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.batch.records import BadRecord, Record, check_input, read_records
from entropix_jax.errors import UserError

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def read(data: str | bytes, suffix: str = "jsonl", **options: Any) -> list[Record | BadRecord]:
    """The records of a file that holds `data`."""
    raw = data if isinstance(data, bytes) else data.encode()
    fsspec.filesystem("memory").pipe_file(f"/source/in.{suffix}", raw)
    return list(read_records(f"memory://source/in.{suffix}", **options))


def good(data: str | bytes, suffix: str = "jsonl") -> list[dict[str, Any]]:
    """The same as plain objects, of what was given alone."""
    found = []
    for record in read(data, suffix):
        assert isinstance(record, Record), record
        fields = {k: v for k, v in dataclasses.asdict(record).items() if v is not None}
        del fields["digest"]
        found.append(fields)
    return found


def problem(data: str | bytes, suffix: str = "jsonl") -> str:
    """What is wrong with the only record."""
    (record,) = read(data, suffix)
    assert isinstance(record, BadRecord), record
    assert record.error.splitlines() == [record.error]
    return record.error


def one(**fields: Any) -> str:
    return json.dumps(fields)


def fields(**given: Any) -> dict[str, Any]:
    return given


# Fields


def test_json_fields() -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi", "name": "Ann"}]
    lines = [
        one(prompt=" \n", id="x", sampler="entropix", max_new_tokens=1, seed=0),
        one(messages=chat, id=-7),
        one(prompt="b", messages=None, id=None, sampler=None, max_new_tokens=None, seed=None),
        one(prompt="c", label=3, category=None, promt="other", text=["t"]),
        '{"prompt": "\U0001f981 \\ud83e\\udd81\u2028\\u0000", "seed": 100000000000000000000000}',
    ]
    assert good("\n".join(lines)) == [
        fields(line=1, id="x", prompt=" \n", sampler="entropix", max_new_tokens=1, seed=0),
        fields(line=2, id="-7", messages=tuple(chat)),
        fields(line=3, id="3", prompt="b"),
        fields(line=4, id="4", prompt="c"),
        fields(line=5, id="5", prompt="\U0001f981 \U0001f981\u2028\0", seed=10**23),
    ]


def test_csv_fields() -> None:
    """Quoted line breaks, blank rows, spaces around names and numbers, columns of other names."""
    long = "x" * 200_000  # beyond the csv module's own limit
    data = (
        "label, prompt,id,sampler,max_new_tokens,seed,label\r\n"
        'x,"two\r\nlines, ""quoted""",a,entropix, 12 ,0,\r\n'
        "\r\n"
        " ,,,,,, \r\n"
        "y, b ,,,,,\r\n"
        f"promt,\u2028{long},007,p.toml,1,9,"
    )
    for suffix in ("csv", "CSV"):
        assert good(data, suffix) == [
            fields(
                line=2,
                id="a",
                prompt='two\r\nlines, "quoted"',
                sampler="entropix",
                max_new_tokens=12,
                seed=0,
            ),
            fields(line=6, id="6", prompt=" b "),
            fields(
                line=7, id="007", prompt=f"\u2028{long}", sampler="p.toml", max_new_tokens=1, seed=9
            ),
        ]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_blank_lines_line_ends_and_the_byte_order_mark(suffix: str, end: str) -> None:
    lines = [one(prompt="a"), "", " \t", one(prompt="b")]
    if suffix == "csv":
        lines = ["prompt", "", "a", " \t", "b"]
    for start in (b"", b"\xef\xbb\xbf"):
        for last in ("", end, end * 2):
            found = good(start + (end.join(lines) + last).encode(), suffix)
            assert [record["prompt"] for record in found] == ["a", "b"]
            assert [record["line"] for record in found] == ([1, 4], [3, 5])[suffix == "csv"]
    assert read("" if suffix == "jsonl" else "prompt\n", suffix) == []


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("prompt", "not valid JSON: Expecting value at character 0"),
        ('{"prompt": "a"', "not valid JSON: Expecting ',' delimiter at character 14"),
        ('{"prompt": "a"} {}', "not valid JSON: Extra data at character 16"),
        ("[" * 100_000, "not valid JSON: maximum recursion depth exceeded"),
        ("9" * 5000, "not valid JSON: Exceeds the limit"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8 at byte 15 of the line"),
        (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8 at byte 12 of the line"),
        (json.dumps("x" * 99), f"not a JSON object: '{'x' * 56}..."),
        ("[{}]", "not a JSON object: [{}]"),
        ("{}", "neither 'prompt' nor 'messages'"),
        (one(prompt=None, text="a"), "neither 'prompt' nor 'messages'"),
        (one(prompt="a", messages=[{}]), "both 'prompt' and 'messages': give one"),
        (one(prompt=""), "'prompt' is empty"),
        (one(prompt=["a"]), "'prompt' must be text, not ['a']"),
        (one(prompt="\ud800"), "'prompt' has half a surrogate pair, which is no character"),
        (one(messages=[]), "'messages' must be a non-empty list of objects"),
        (one(messages=["a"]), "message 1 must be an object with 'role' and 'content'"),
        (
            one(messages=[{"role": "user", "content": "a"}, {"role": "user"}]),
            "message 2 must be an object with 'role' and 'content'",
        ),
        (one(messages=[{"role": 1, "content": ""}]), "'role' of message 1 must be text, not 1"),
        (one(messages=[{"role": "", "content": ""}]), "'role' of message 1 is empty"),
        (
            one(messages=[{"role": "user", "content": None}]),
            "'content' of message 1 must be text, not None",
        ),
        (one(prompt="a", id=""), "'id' is empty"),
        (one(prompt="a", id=1.0), "'id' must be text or an integer, not 1.0"),
        (one(prompt="a", id=True), "'id' must be text or an integer, not True"),
        (one(prompt="a", sampler={}), "'sampler' must be text, not {}"),
        (
            one(prompt="a", max_new_tokens=0),
            "'max_new_tokens' must be an integer of at least 1, not 0",
        ),
        (
            one(prompt="a", max_new_tokens="8"),
            "'max_new_tokens' must be an integer of at least 1, not '8'",
        ),
        (one(prompt="a", seed=-1), "'seed' must be an integer of at least 0, not -1"),
        (one(prompt="a", seed=True), "'seed' must be an integer of at least 0, not True"),
    ],
)
def test_what_is_no_record(line: str | bytes, error: str) -> None:
    assert problem(line).startswith(error)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (",9,,", "neither 'prompt' nor 'messages'"),
        ("a,,,8.0", "'max_new_tokens' must be an integer of at least 1, not '8.0'"),
        ("a,,,\u0664", "'max_new_tokens' must be an integer of at least 1, not '\u0664'"),
        ("a,,,0", "'max_new_tokens' must be an integer of at least 1, not 0"),
        (b"caf\xe9,,,", "not UTF-8"),
        ("a,b,c", "3 cells under a header of 4"),
        ('"a"b,,,', "not valid CSV: ',' expected after '\"'"),
        ('"a,,,', "not valid CSV: unexpected end of data"),
    ],
)
def test_what_is_no_csv_record(row: str | bytes, error: str) -> None:
    raw = row if isinstance(row, bytes) else row.encode()
    assert problem(b"prompt,id,sampler,max_new_tokens\n" + raw, "csv") == error


# Ids


def test_repeated_ids() -> None:
    """Also of the default, the line's number, and of a bad record."""
    lines = [
        one(prompt="a", id="x"),
        one(prompt="b", id="x"),
        one(prompt="c"),
        one(prompt="d", id=3),
        one(prompt="", id="y"),
        one(prompt="g", id="y"),
        "{",
        one(prompt="h", id=""),
    ]
    assert [(r.id, getattr(r, "error", "")) for r in read("\n".join(lines))] == [
        ("x", ""),
        (None, "the id 'x' came before"),
        ("3", ""),
        (None, "the id '3' came before"),
        ("y", "'prompt' is empty"),
        (None, "the id 'y' came before"),
        (None, "not valid JSON: Expecting property name enclosed in double quotes at character 1"),
        (None, "'id' is empty"),
    ]


def test_digests_tell_how_a_record_is_written() -> None:
    lines = [one(prompt="a"), one(prompt="a", id=1.5), "{", one(prompt="a", label=1)]
    expected = [blake2b(line.encode(), digest_size=16).hexdigest()[:15] for line in lines]
    for end in ("\n", "\r\n", " \n\n\n"):
        assert [record.digest for record in read(end.join(lines))] == expected
    first, second = read("prompt,n\n\n1,2\n1,2", "csv")
    assert first.digest == second.digest
    others = ["n,prompt\n1,2", "prompt,n\n2,1", "prompt,m\n1,2", "prompt,n\n12,", "prompt\n1"]
    assert len({first.digest, *(read(other, "csv")[0].digest for other in others)}) == 6


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize("count", [1, 3, 50])
def test_shares(suffix: str, count: int) -> None:
    """Every record is in one share, and each share sees the ids of all."""
    lines = [one(prompt="a", id=n % 9) if n % 5 else "{" for n in range(20)]
    if suffix == "csv":
        lines = ["prompt,id", *(f"a,{n % 9}" if n % 5 else "a" for n in range(20))]
    data = "\n\n".join(lines)
    whole = read(data, suffix)
    assert len(whole) == 20
    assert {type(record) for record in whole} == {Record, BadRecord}
    shares = [read(data, suffix, share=(i, count)) for i in range(count)]
    assert [shares[n % count][n // count] for n in range(20)] == whole
    assert sum(map(len, shares)) == 20


@given(
    st.lists(
        st.binary(max_size=30)
        | st.text('{}[]":,prometidsag01 \\', max_size=40).map(str.encode)
        | st.sampled_from([b'{"prompt": "a"}', b'{"prompt": "a", "id": "b"}', b"a,b", b'"']),
        max_size=8,
    )
)
def test_whatever_the_bytes(lines: list[bytes]) -> None:
    """One record for each line that is not blank, all ids different, and no exception."""
    lines = [line.replace(b"\n", b"") for line in lines]
    found = read(b"\n".join(lines))
    first = [line.removeprefix(b"\xef\xbb\xbf") for line in lines[:1]] + lines[1:]
    assert [r.line for r in found] == [n for n, line in enumerate(first, 1) if line.strip()]
    ids = [record.id for record in found if record.id is not None]
    assert len(set(ids)) == len(ids)

    rows = read(b"prompt,id\n" + b"\n".join(lines), "csv")
    assert all(a.line < b.line for a, b in itertools.pairwise(rows))
    assert all(record.error for record in rows if isinstance(record, BadRecord))


def test_a_quote_that_is_not_closed() -> None:
    """It spoils what lies before the next quote; the rest is read."""
    rows = ['"a"', '"b', *(f'"{n}"' for n in range(5))]
    found = read("prompt\n" + "\n".join(rows), "csv")
    assert [(r.line, getattr(r, "prompt", None)) for r in found] == [
        (2, "a"),
        (3, None),
        *((n, str(n - 4)) for n in range(5, 9)),
    ]


# Files


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_compressed_files(suffix: str, compression: str) -> None:
    plain = one(prompt="a") if suffix == "jsonl" else "prompt\na\n"
    data = COMPRESSORS[compression](plain.encode())
    assert good(data, f"{suffix}.{compression}")[0]["prompt"] == "a"


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = one(prompt="caf\u00e9") + "\n"
    (tmp_path / "a b.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "data").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "ascii"))
    for address in ("a b.jsonl", f"{tmp_path}/data", f"file://{tmp_path}/data", "~/data", "-"):
        if address != "-":
            check_input(address)
        (record,) = read_records(address)
        assert isinstance(record, Record)
        assert record.prompt == "caf\u00e9"
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        list(read_records("-"))


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl"])
def test_reading_that_stops_early_closes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    unraised: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", unraised.append)
    (tmp_path / name).write_text("prompt\na\nb\n" if name == "in.csv" else '{"prompt": "a"}\n' * 2)
    before = os.listdir("/dev/fd")
    records = read_records(str(tmp_path / name))
    next(records)
    del records
    gc.collect()
    assert unraised == []
    assert len(os.listdir("/dev/fd")) == len(before)


def test_records_come_as_they_are_written() -> None:
    """From a pipe, whose writer waits until the record before has been taken."""
    reading, writing = os.pipe()
    records = read_records(f"/dev/fd/{reading}")
    try:
        for number in range(3):
            os.write(writing, f"{one(prompt=str(number))}\n".encode())
            assert next(records).line == number + 1
        threading.Timer(0.05, os.close, [writing]).start()
        assert list(records) == []
    finally:
        os.close(reading)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "empty: CSV begins with a row of column names"),
        ("\n , \n", "empty: CSV begins with a row of column names"),
        ("text,id\n", "header of the CSV: no column 'prompt', only 'text, id'"),
        ("prompt,id,prompt\n", "header of the CSV: two columns 'prompt'"),
        (
            "prompt,messages\n",
            "header of the CSV: 'messages' is no column of CSV: give conversations as JSON Lines",
        ),
        (b"prompt,caf\xe9\n", "header of the CSV: not UTF-8"),
        ('"prompt"x\n', "header of the CSV: not valid CSV: ',' expected after '\"'"),
    ],
)
def test_headers_that_are_wrong(data: str | bytes, message: str) -> None:
    with pytest.raises(UserError) as error:
        read(data, "csv")
    assert str(error.value) == f"memory://source/in.csv: {message}"


def nothing(path: Path) -> None:
    """Makes no file."""


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a/b.csv", nothing, "no such file or folder"),
        ("a.jsonl", Path.mkdir, "Is a directory"),
        ("a\0.jsonl", nothing, "ValueError: embedded null byte"),
        ("a.jsonl.gz", lambda path: path.write_text(one(prompt="a")), "Not a gzipped file"),
        ("a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(b"{}\n" * 9)[:12]), "EOFError"),
    ],
)
def test_what_cannot_be_read(
    tmp_path: Path, name: str, make: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / name
    make(path)
    for read in (check_input, lambda address: list(read_records(address))):
        with pytest.raises(UserError) as error:
            read(str(path))
        assert str(error.value).startswith(f"{path}: cannot be read: {message}")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://source/nothing.jsonl", "no such file or folder"),
        ("memory://source", "Is a directory"),
        ("nonsense://a.jsonl", "ValueError: Protocol not known: nonsense"),
        ("gs://bucket/in.jsonl", "Please install gcsfs to access Google Storage"),
    ],
)
def test_urls_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, address: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # cannot be imported
    monkeypatch.delitem(drivers, "gs", raising=False)
    read("")  # makes the folder
    with pytest.raises(UserError) as error:
        list(read_records(address))
    assert str(error.value) == f"{address}: cannot be read: {message}"


def test_a_compression_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsspec.utils.infer_compression", lambda path: None)
    with pytest.raises(UserError) as error:
        read(b"", "csv.zst")
    assert (
        str(error.value)
        == "memory://source/in.csv.zst: cannot be decompressed: pip install zstandard"
    )


def test_importing_it_starts_no_jax() -> None:
    code = """if True:
        import sys
        import entropix_jax.batch.output, entropix_jax.batch.records
        assert not {"jax", "s3fs", "aiohttp"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
