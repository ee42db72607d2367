"""Reading a batch's input: what is a record, what is none and why, from files of all kinds."""

from __future__ import annotations

import bz2
import csv
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
import tracemalloc
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.registry import _registry as drivers
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.batches import source
from entropix_jax.batches.index import Index
from entropix_jax.batches.source import BadRecord, Record, check_input, read_records
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


# Fields


def test_json_records() -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi", "name": "Ann"}]
    lines = [
        one(prompt="a"),
        one(prompt=" \n", id="x", sampler="entropix", max_new_tokens=1, seed=0),
        one(messages=chat, id=-7),
        one(prompt="b", messages=None, id=None, sampler=None, max_new_tokens=None, seed=None),
        one(prompt="c", label=3, category=None, idx=1, uid="u", prompt_id="p", text=["t"]),
        '{"prompt": "\U0001f981 \\ud83e\\udd81\u2028\\u0000", "seed": 123456789012345678901234}',
    ]
    assert good("\n".join(lines)) == [
        {"line": 1, "id": "1", "prompt": "a"},
        {
            "line": 2,
            "id": "x",
            "prompt": " \n",
            "sampler": "entropix",
            "max_new_tokens": 1,
            "seed": 0,
        },
        {"line": 3, "id": "-7", "messages": tuple(chat)},
        {"line": 4, "id": "4", "prompt": "b"},
        {"line": 5, "id": "5", "prompt": "c"},
        {
            "line": 6,
            "id": "6",
            "prompt": "\U0001f981 \U0001f981\u2028\0",
            "seed": 123456789012345678901234,
        },
    ]


def test_csv_records() -> None:
    data = (
        "label, prompt,id,sampler,max_new_tokens,seed\r\n"
        'x,"two\r\nlines, ""quoted""",a,entropix, 12 ,0\r\n'
        "\r\n"
        " ,,,,, \r\n"
        "y, b ,,,,\r\n"
        "promt,\u2028c,007,p.toml,1,9"
    )
    expected = [
        {
            "line": 2,
            "id": "a",
            "prompt": 'two\r\nlines, "quoted"',
            "sampler": "entropix",
            "max_new_tokens": 12,
            "seed": 0,
        },
        {"line": 6, "id": "6", "prompt": " b "},
        {
            "line": 7,
            "id": "007",
            "prompt": "\u2028c",
            "sampler": "p.toml",
            "max_new_tokens": 1,
            "seed": 9,
        },
    ]
    for suffix in ("csv", "CSV"):
        assert good(data, suffix) == expected


def test_a_long_cell() -> None:
    """Longer than Python's own limit."""
    assert good(f"prompt\n{'x' * 200_000}\n", "csv")[0]["prompt"] == "x" * 200_000


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_blank_lines_line_ends_and_the_byte_order_mark(suffix: str) -> None:
    lines = [one(prompt="a"), "", " \t", one(prompt="b")]
    if suffix == "csv":
        lines = ["prompt", "", "a", " \t", "b"]
    for end in ("\n", "\r\n"):
        for start in (b"", b"\xef\xbb\xbf"):
            for last in ("", end, end * 2):
                found = good(start + (end.join(lines) + last).encode(), suffix)
                assert [record["prompt"] for record in found] == ["a", "b"]
                assert [record["line"] for record in found] == ([1, 4], [3, 5])[suffix == "csv"]


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
        ("12", "not a JSON object: 12"),
        (json.dumps("x" * 99), f"not a JSON object: '{'x' * 56}..."),
        ("[{}]", "not a JSON object: [{}]"),
        ("{}", "neither 'prompt' nor 'messages'"),
        (one(prompt=None, text="a"), "neither 'prompt' nor 'messages'"),
        (one(prompt="a", messages=[{}]), "both 'prompt' and 'messages': give one"),
        (one(prompt=""), "'prompt' is empty"),
        (one(prompt=["a"]), "'prompt' must be text, not ['a']"),
        (one(prompt="\ud800"), "'prompt' has half a surrogate pair, which is no character"),
        (one(messages=[]), "'messages' must be a non-empty list of objects"),
        (one(messages="a"), "'messages' must be a non-empty list of objects"),
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
        (one(prompt="a", id="\udfff"), "'id' has half a surrogate pair, which is no character"),
        (one(prompt="a", sampler=""), "'sampler' is empty"),
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
        (one(prompt="a", seed=1.5), "'seed' must be an integer of at least 0, not 1.5"),
    ],
)
def test_what_is_no_record(line: str | bytes, error: str) -> None:
    assert problem(line).startswith(error)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (",9,,", "neither 'prompt' nor 'messages'"),
        ("a,,,8.0", "'max_new_tokens' must be an integer of at least 1, not '8.0'"),
        ("a,,,-8", "'max_new_tokens' must be an integer of at least 1, not '-8'"),
        ("a,,,\u0664", "'max_new_tokens' must be an integer of at least 1, not '\u0664'"),
        ("a,,,0", "'max_new_tokens' must be an integer of at least 1, not 0"),
        (b"caf\xe9,,,", "not UTF-8"),
        ("a,b,c", "3 cells under a header of 4"),
        ("a,b,c,,", "5 cells under a header of 4"),
        ('"a"b,,,', "not valid CSV: ',' expected after '\"'"),
        ('"a,,,', "not valid CSV: unexpected end of data"),
    ],
)
def test_what_is_no_csv_record(row: str | bytes, error: str) -> None:
    raw = row if isinstance(row, bytes) else row.encode()
    assert problem(b"prompt,id,sampler,max_new_tokens\n" + raw, "csv") == error


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *{
            "promt": "prompt",
            "prompts": "prompt",
            "Prompt": "prompt",
            "message": "messages",
            "samplr": "sampler",
            "max_tokens": "max_new_tokens",
            "max-new-tokens": "max_new_tokens",
            "max new tokens": "max_new_tokens",
            "maxNewTokens": "max_new_tokens",
            "new_tokens": "max_new_tokens",
            "Seed": "seed",
            "seeds": "seed",
            "ID": "id",
            " id": "id",
        }.items(),
        *((name, None) for name in "label idx uid aid prompt_id message_id sample_id text".split()),
        *((name, None) for name in ("", "model", "x" * 10**6, "prompt" * 6)),
    ],
)
def test_misspelled_fields(name: str, meant: str | None) -> None:
    """The nearest is named, and what a data file has for its own purposes is none."""
    line = one(**{"prompt": "a", name: "b"})
    if meant is None:
        assert good(line) == [{"line": 1, "id": "1", "prompt": "a"}]
    else:
        assert problem(line) == f"unknown field {name!r}: did you mean '{meant}'?"
    # It may be the only one of its kind, or nothing.
    if meant == "prompt":
        assert problem(one(**{name: "b"})) == f"unknown field {name!r}: did you mean 'prompt'?"
    assert good(one(**{"prompt": "a", name: None}))


# Ids


def test_ids_that_came_before() -> None:
    lines = [
        one(prompt="a", id="x"),
        one(prompt="b", id="x"),
        one(prompt="c"),
        one(prompt="d", id=3),  # the default of the line before
        one(prompt="e", id=6),
        one(prompt="f"),  # whose default that is
        one(prompt="", id="y"),  # bad, and has the id all the same
        one(prompt="g", id="y"),
        one(prompt="h", id="x"),
    ]
    records = read("\n".join(lines))
    assert [(r.line, r.id, getattr(r, "error", None)) for r in records] == [
        (1, "x", None),
        (2, None, "the id 'x' came before"),
        (3, "3", None),
        (4, None, "the id '3' came before"),
        (5, "6", None),
        (6, None, "the id '6' came before"),
        (7, "y", "'prompt' is empty"),
        (8, None, "the id 'y' came before"),
        (9, None, "the id 'x' came before"),
    ]


def test_the_id_of_what_cannot_be_read() -> None:
    records = read("\n".join(["{", one(prompt="a", id=1), one(prompt=1), one(prompt=1, id="")]))
    assert [(r.id, isinstance(r, BadRecord)) for r in records] == [
        (None, True),
        ("1", False),
        ("3", True),
        (None, True),
    ]


def test_digests() -> None:
    """They say how a record is written, wherever it stands."""
    lines = [one(prompt="a"), one(prompt="a", id=1.5), "{", one(prompt="a", label=1)]
    for end in ("\n", "\r\n", " \n\n\n"):
        digests = [record.digest for record in read(end.join(lines))]
        assert digests == [
            int(blake2b(line.encode(), digest_size=16).hexdigest()[:15], 16) for line in lines
        ]
    (first, second) = read("prompt,n\n\n1,2\n1,2", "csv")
    assert first.digest == second.digest < 2**60
    others = ["n,prompt\n1,2", "prompt,n\n2,1", "prompt,m\n1,2", "prompt,n\n12,", "prompt\n1"]
    assert len({first.digest, *(read(other, "csv")[0].digest for other in others)}) == 6
    # Nor does a broken record hide a change.
    broken = [read(f"prompt,n\n{row}", "csv")[0].digest for row in ('"a', '"b', "a,b,c", "a,b,d")]
    assert len(set(broken)) == 4


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_shares(suffix: str, count: int) -> None:
    """Every record is in one share, and each share sees the ids of all."""
    lines = [one(prompt="a", id=n % 9) if n % 5 else "{" for n in range(20)]
    if suffix == "csv":
        lines = ["prompt,id", *(f"a,{n % 9}" if n % 5 else "a" for n in range(20))]
    whole = read("\n\n".join(lines), suffix)
    assert len(whole) == 20
    assert {type(record) for record in whole} == {Record, BadRecord}
    shares = [read("\n\n".join(lines), suffix, share=(i, count)) for i in range(count)]
    for number, record in enumerate(whole):
        assert shares[number % count][number // count] == record
    assert sum(map(len, shares)) == 20


@pytest.mark.parametrize("share", [(0, 0), (1, 1), (-1, 2), (2, 2)])
def test_a_share_that_is_none(share: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"share -?\d of \d"):
        read_records("nothing.jsonl", share=share)


# Properties


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
records = st.fixed_dictionaries(
    {"prompt": texts},
    optional={
        "sampler": texts,
        "max_new_tokens": st.integers(1, 10**30),
        "seed": st.integers(0, 10**30),
        "other": texts,
    },
)


@given(st.lists(records, max_size=5), st.sampled_from(["jsonl", "csv"]), st.booleans())
def test_what_was_written_is_read(written: list[dict[str, Any]], suffix: str, ascii: bool) -> None:
    rows = [{"id": f"r{number}", **record} for number, record in enumerate(written)]
    if suffix == "csv":
        columns = ["id", "other", "prompt", "sampler", "seed", "max_new_tokens"]
        file = io.StringIO(newline="")
        writer = csv.DictWriter(file, columns, quoting=csv.QUOTE_NONNUMERIC)
        writer.writeheader()
        writer.writerows(rows)
        data = file.getvalue()
    else:
        data = "".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows)
    found = good(data, suffix)
    for row in found:
        del row["line"]
    assert found == [{k: v for k, v in row.items() if k != "other"} for row in rows]


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
@pytest.mark.parametrize("local", [True, False])
def test_compressed_files(tmp_path: Path, suffix: str, compression: str, local: bool) -> None:
    plain = one(prompt="a") if suffix == "jsonl" else "prompt\na\n"
    data = COMPRESSORS[compression](plain.encode())
    if local:
        path = tmp_path / f"a.{suffix}.{compression}"
        path.write_bytes(data)
        found = list(read_records(str(path)))
    else:
        found = read(data, f"{suffix}.{compression}")
    assert [getattr(record, "prompt", None) for record in found] == ["a"]


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = one(prompt="caf\u00e9") + "\n"
    (tmp_path / "a b.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "data").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "ascii"))
    for address in ("a b.jsonl", f"{tmp_path}/data", f"file://{tmp_path}/data", "~/data", "-"):
        (record,) = read_records(address)
        assert isinstance(record, Record)
        assert record.prompt == "caf\u00e9"


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


def test_a_file_is_closed_when_reading_stops(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{one(prompt='a')}\n" * 3)
    before = os.listdir("/dev/fd")
    records = read_records(str(tmp_path / "a.jsonl"))
    next(records)
    del records
    assert len(os.listdir("/dev/fd")) == len(before)


def test_an_empty_file() -> None:
    assert read("") == read("\n \n") == []
    assert read("prompt\n", "csv") == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "empty: CSV begins with a row of column names"),
        ("\n , \n", "empty: CSV begins with a row of column names"),
        ("text,id\n", "header of the CSV: no column 'prompt', only 'text, id'"),
        ("promt,id\n", "header of the CSV: unknown column 'promt': did you mean 'prompt'?"),
        ("prompt,Seed\n", "header of the CSV: unknown column 'Seed': did you mean 'seed'?"),
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


def test_columns_of_one_name_that_are_not_ours() -> None:
    assert good("note,prompt,note\na,b,c", "csv") == [{"line": 2, "id": "2", "prompt": "b"}]


def nothing(path: Path) -> None:
    """Makes no file."""


def test_ids_are_told_apart_by_all_of_their_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 120 bits, of which an index finds by the first 60."""

    def hash_of(data: bytes, bits: int = 60) -> int:
        return {b"a": 5, b"b": 6}.get(data, 7) if bits == 120 else 0

    monkeypatch.setattr(source, "hash_of", hash_of)
    found = read("".join(one(id=name, prompt="x") + "\n" for name in "aba"))
    assert [type(record) for record in found] == [Record, Record, BadRecord]


def cut_short(path: Path) -> None:
    data = "".join(one(prompt=str(number)) + "\n" for number in range(999))
    path.write_bytes(gzip.compress(data.encode())[:-20])


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.jsonl", nothing, "no such file or folder"),
        ("a/b.csv", nothing, "no such file or folder"),
        ("a.jsonl", Path.mkdir, "Is a directory"),
        ("a.csv", Path.mkdir, "Is a directory"),
        ("a\0.jsonl", nothing, "ValueError: embedded null byte"),
        ("a.jsonl.gz", lambda path: path.write_text(one(prompt="a")), "Not a gzipped file"),
        ("a.jsonl.gz", cut_short, "EOFError: Compressed file ended before"),
    ],
)
def test_what_cannot_be_read(
    tmp_path: Path, name: str, make: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / name
    make(path)
    with pytest.raises(UserError) as error:
        list(read_records(str(path)))
    assert str(error.value).startswith(f"{path}: cannot be read: {message}")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://source/nothing.jsonl", "no such file or folder"),
        ("memory://source", "Is a directory"),
        ("nonsense://a.jsonl", "ValueError: Protocol not known: nonsense"),
    ],
)
def test_addresses_that_cannot_be_read(address: str, message: str) -> None:
    read("")  # makes the folder
    with pytest.raises(UserError) as error:
        list(read_records(address))
    assert str(error.value) == f"{address}: cannot be read: {message}"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("in.csv", b"promt\na\n", "header of the CSV: unknown column 'promt'"),
        ("in.csv", b"", "empty: CSV begins with a row of column names"),
        ("in.jsonl.gz", b"{}\n", "cannot be read: Not a gzipped file"),
        ("in.jsonl.gz", gzip.compress(b"{}\n" * 9, mtime=0)[:12], "cannot be read: EOFError"),
        ("none.jsonl", None, "cannot be read: no such file"),
        ("in.jsonl", b"", None),
        ("in.jsonl", b"bad\n", None),
    ],
)
def test_an_input_is_looked_at(name: str, data: bytes | None, message: str | None) -> None:
    """As far as its beginning, before anything is made."""
    address = f"memory://source/{name}"
    if data is not None:
        fsspec.filesystem("memory").pipe_file(f"/source/{name}", data)
    if message is None:
        check_input(address)
        return
    with pytest.raises(UserError) as error:
        check_input(address)
    assert str(error.value).startswith(f"{address}: {message}")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, *args: Any):  # as the file system does, though not to root
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(io, "FileIO", refuse)
    with pytest.raises(UserError) as error:
        list(read_records(str(tmp_path / "a")))
    assert str(error.value) == f"{tmp_path}/a: cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("protocol", "module", "hint"),
    [
        ("s3", "s3fs", "s3fs is not installed: pip install 'entropix-jax[s3]'"),
        ("gs", "gcsfs", "Please install gcsfs to access Google Storage"),
    ],
)
def test_a_driver_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, protocol: str, module: str, hint: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # cannot be imported
    monkeypatch.delitem(drivers, protocol, raising=False)
    with pytest.raises(UserError) as error:
        list(read_records(f"{protocol}://bucket/in.jsonl"))
    assert str(error.value) == f"{protocol}://bucket/in.jsonl: cannot be read: {hint}"


def test_a_compression_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsspec.utils.infer_compression", lambda path: None)
    with pytest.raises(UserError) as error:
        read(b"", "csv.zst")
    assert (
        str(error.value)
        == "memory://source/in.csv.zst: cannot be decompressed: pip install zstandard"
    )


def test_standard_input_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        list(read_records("-"))


# Memory and imports


def peak(path: Path, lines: int) -> int:
    """Bytes that reading a file of so many lines takes at most."""
    with path.open("w") as file:
        for number in range(lines):
            file.write(f'{{"id": "record {number}", "prompt": "a"}}\n')
    tracemalloc.start()
    try:
        assert sum(isinstance(record, Record) for record in read_records(str(path))) == lines
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_by_the_line(tmp_path: Path) -> None:
    lines = 50_000
    added = peak(tmp_path / "long.jsonl", lines) - peak(tmp_path / "short.jsonl", 1000)
    assert 16 < added / lines < 100


def test_an_index_is_a_dict() -> None:
    """Past the size at which entries are sorted in, many times."""
    rng = np.random.default_rng(1)
    index, oracle = Index(), dict[int, int]()
    edges = [0, 2**60 - 1]
    keys = edges + (rng.integers(0, 50_000, 150_000) * 23058430092).tolist()
    for value, key in enumerate(keys):
        assert index.add(key, value) == (key not in oracle)
        oracle.setdefault(key, value)
    assert len(index) == len(oracle) > 40_000
    assert all(index.find(key) == value for key, value in oracle.items())
    for key in oracle:
        assert index.find(key + 1) == oracle.get(key + 1)


def test_importing_it_starts_no_jax() -> None:
    code = """if True:
        import sys
        import entropix_jax.batches.source, entropix_jax.batches.store
        assert not {"jax", "s3fs", "aiohttp"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl"])
def test_an_input_that_is_left_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An interrupted run closes its input, without a word."""
    unraised: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", unraised.append)
    path = tmp_path / name
    path.write_text("prompt\none\ntwo\n" if name == "in.csv" else '{"prompt": "one"}\n' * 2)
    records = read_records(str(path))
    next(records)
    del records
    gc.collect()
    assert unraised == []
