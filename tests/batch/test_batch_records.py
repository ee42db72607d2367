"""Reading a batch's input: records, errors, and files of all kinds."""

import dataclasses
import gzip
import io
import json
import os
import sys
import threading
from hashlib import blake2b
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import _registry as drivers

from entropix_jax.batch.records import BadRecord, Record, check_input, read_records
from entropix_jax.errors import UserError


def read(data: str | bytes, suffix: str = "jsonl", **options: Any) -> list[Record | BadRecord]:
    """Returns the records of a file that contains `data`."""
    raw = data if isinstance(data, bytes) else data.encode()
    fsspec.filesystem("memory").pipe_file(f"/source/in.{suffix}", raw)
    return list(read_records(f"memory://source/in.{suffix}", **options))


def good(data: str | bytes, suffix: str = "jsonl") -> list[dict[str, Any]]:
    """Returns valid records as plain objects, with only the given fields."""
    found = []
    for record in read(data, suffix):
        assert isinstance(record, Record), record
        fields = {k: v for k, v in dataclasses.asdict(record).items() if v is not None}
        del fields["digest"]
        found.append(fields)
    return found


def problem(data: str | bytes, suffix: str = "jsonl") -> str:
    """Returns the error of the only record."""
    (record,) = read(data, suffix)
    assert isinstance(record, BadRecord), record
    assert record.error.splitlines() == [record.error]
    return record.error


def one(**fields: Any) -> str:
    return json.dumps(fields)


# Fields


def test_json_fields() -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "Hi", "name": "Ann"}]
    full = {"id": "x", "prompt": " \n", "sampler": "entropix", "max_new_tokens": 1, "seed": -1}
    lines = [
        one(**full),
        one(messages=chat, id=-7.0),
        one(prompt="b", messages=None, id=None, sampler=None, max_new_tokens=None, seed=None),
        one(prompt="c", label=3, category=None, promt="other", text=["t"]),
        '{"prompt": "\U0001f981 \\ud83e\\udd81\u2028\\u0000", "seed": 100000000000000000000000}',
        one(prompt="d", max_new_tokens=4.0, seed=-5.0),
    ]
    assert good("\n".join(lines)) == [
        {"line": 1, **full},
        {"line": 2, "id": "-7", "messages": chat},
        {"line": 3, "id": "3", "prompt": "b"},
        {"line": 4, "id": "4", "prompt": "c"},
        {"line": 5, "id": "5", "prompt": "\U0001f981 \U0001f981\u2028\0", "seed": 10**23},
        {"line": 6, "id": "6", "prompt": "d", "max_new_tokens": 4, "seed": -5},
    ]


def test_csv_fields() -> None:
    """Tests quoted line breaks, blank rows, spaces around names and numbers, unknown columns."""
    long = "x" * 200_000  # beyond the csv module's own limit
    data = (
        "label, prompt,id,sampler,max_new_tokens,seed,label\r\n"
        'x,"two\r\nlines, ""quoted""",a,entropix, 12.0 ,0,\r\n'
        "\r\n"
        " ,,,,,, \r\n"
        "y, b ,,,,,\r\n"
        f"promt,\u2028{long},007,p.toml,1,9,"
    )
    quoted = {"line": 2, "id": "a", "prompt": 'two\r\nlines, "quoted"', "sampler": "entropix"}
    last = {"line": 7, "id": "007", "prompt": f"\u2028{long}", "sampler": "p.toml"}
    for suffix in ("csv", "CSV"):
        assert good(data, suffix) == [
            {**quoted, "max_new_tokens": 12, "seed": 0},
            {"line": 6, "id": "6", "prompt": " b "},
            {**last, "max_new_tokens": 1, "seed": 9},
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
    for encoding in ("utf-16", "utf-16-le", "utf-32-be"):
        found = good(end.join(lines).encode(encoding), suffix)
        assert [record["prompt"] for record in found] == ["a", "b"]
    with pytest.raises(UserError, match=f"^memory://source/in.{suffix}: holds no records$"):
        read("\n \n" if suffix == "jsonl" else "prompt\n\n", suffix)


BAD: list[tuple[str | bytes, str]] = [
    ("prompt", "not valid JSON: Expecting value at character 0"),
    ('{"prompt": "a"} {}', "not valid JSON: Extra data at character 16"),
    ('{"a":' * 100_000, "not valid JSON: maximum recursion depth exceeded"),
    ("9" * 5000, "not valid JSON: Exceeds the limit"),
    ('{"prompt": "a", "b": {"seed": 1, "seed": 2}}', "not valid JSON: 'seed' is repeated"),
    (b'{"prompt": "caf\xe9"}', "not UTF-8 at byte 15 of the line"),
    (json.dumps("x" * 99), f"not a JSON object: '{'x' * 56}..."),
    ("{}", "neither 'prompt' nor 'messages'"),
    (one(prompt=None, text="a"), "neither 'prompt' nor 'messages'"),
    (one(prompt="a", messages=[{}]), "both 'prompt' and 'messages': give one"),
    (one(prompt=""), "'prompt' is empty"),
    (one(prompt=["a"]), "'prompt' must be text, not ['a']"),
    (one(prompt="\ud800"), "'prompt' has half a surrogate pair, which is no character"),
    (one(messages="a"), "'messages' must be a list, not 'a'"),
    (one(prompt="a", id=""), "'id' is empty"),
    (one(prompt="a", id=1.5), "'id' must be text or an integer, not 1.5"),
    (one(prompt="a", id=True), "'id' must be text or an integer, not True"),
    (one(prompt="a", sampler={}), "'sampler' must be text, not {}"),
    (one(prompt="a", max_new_tokens=0), "'max_new_tokens' must be an integer of at least 1, not 0"),
    (one(prompt="a", max_new_tokens="8"), "'max_new_tokens' must be an integer of at least 1, not"),
    (one(prompt="a", seed=True), "'seed' must be an integer, not True"),
    (one(prompt="a", seed=1.5), "'seed' must be an integer, not 1.5"),
]


BAD_ROWS: list[tuple[bytes, str]] = [
    (b",9,,", "neither 'prompt' nor 'messages'"),
    (b"a,,,8.5", "'max_new_tokens' must be an integer of at least 1, not '8.5'"),
    ("a,,,\u0664".encode(), "'max_new_tokens' must be an integer of at least 1, not '\u0664'"),
    (b"caf\xe9,,,", "not UTF-8"),
    (b"a,b,c", "3 cells under a header of 4"),
    (b'"a"b,,,', "not valid CSV: ',' expected after '\"'"),
    (b'"a,,,', "not valid CSV: unexpected end of data"),
]


def test_errors_of_records() -> None:
    for line, error in BAD:
        assert problem(line).startswith(error)
    for row, error in BAD_ROWS:
        assert problem(b"prompt,id,sampler,max_new_tokens\n" + row, "csv") == error


# Ids


def test_repeated_ids() -> None:
    """Default ids, which are line numbers, and ids of bad records count, too."""
    given: list[tuple[str, str | None, str]] = [
        (one(prompt="a", id="x"), "x", ""),
        (one(prompt="b", id="x"), None, "the id 'x' came before"),
        (one(prompt="c"), "3", ""),
        (one(prompt="d", id=3), None, "the id '3' came before"),
        (one(prompt="", id="y"), "y", "'prompt' is empty"),
        (one(prompt="g", id="y"), None, "the id 'y' came before"),
        ("{", None, "not valid JSON: "),
        (one(prompt="h", id=""), None, "'id' is empty"),
    ]
    found = read("\n".join(line for line, *_ in given))
    for record, (_, record_id, error) in zip(found, given, strict=True):
        assert record.id == record_id
        assert getattr(record, "error", "").startswith(error)


def test_digests_depend_on_the_text_of_a_record() -> None:
    lines = [one(prompt="a"), one(prompt="a", id=1.5), "{", one(prompt="a", label=1)]
    expected = [blake2b(line.encode(), digest_size=16).hexdigest()[:15] for line in lines]
    for end in ("\n", "\r\n", " \n\n\n"):
        assert [record.digest for record in read(end.join(lines))] == expected
    first, second = read("prompt,n\n\n1,2\n1,2", "csv")
    assert first.digest == second.digest
    others = ["n,prompt\n1,2", "prompt,n\n2,1", "prompt,m\n1,2", "prompt,n\n12,", "prompt\n1"]
    assert len({first.digest, *(read(other, "csv")[0].digest for other in others)}) == 6


def test_a_quote_that_is_not_closed() -> None:
    """The rows up to the next quote are an error. The other rows are read."""
    rows = ['"a"', '"b', *(f'"{n}"' for n in range(5))]
    found = read("prompt\n" + "\n".join(rows), "csv")
    assert [(r.line, getattr(r, "prompt", None)) for r in found] == [
        (2, "a"),
        (3, None),
        *((n, str(n - 4)) for n in range(5, 9)),
    ]


# Files


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


def test_records_are_read_as_they_are_written() -> None:
    """The writer of a pipe waits until the previous record has been read."""
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


def test_errors_of_headers() -> None:
    for data, message in (
        ("\n , \n", "empty: CSV needs a row of column names"),
        ("text,id\n", "header of the CSV: no column 'prompt', only 'text, id'"),
        ("prompt,id,prompt\n", "header of the CSV: two columns 'prompt'"),
        ("prompt,messages\n", "header of the CSV: 'messages' is no column of CSV: give"),
        (b"prompt,caf\xe9\n", "header of the CSV: not UTF-8"),
        ('"prompt"x\n', "header of the CSV: not valid CSV: ',' expected after '\"'"),
    ):
        with pytest.raises(UserError, match=f"^memory://source/in.csv: {message}"):
            read(data, "csv")


def test_other_formats_are_recognised() -> None:
    several = "one JSON document: `jq -c"
    for start, message in (
        *((b"[{}]", several), (b'[\n{"prompt": "a"}', several), (b'{\n"prompt": "a"}', several)),
        (gzip.compress(b"{}"), "neither JSON Lines nor CSV: a compressed file needs a suffix"),
        (b"PK\3\4", "neither JSON Lines nor CSV"),
    ):
        with pytest.raises(UserError, match=f"^memory://source/in.jsonl: {message}"):
            read(start + b"\n" * 9)


def test_errors_of_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # cannot be imported
    monkeypatch.delitem(drivers, "gs", raising=False)
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "plain.jsonl.gz").write_text(one(prompt="a"))
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 9)[:12])
    read(one(prompt="a"))  # makes the folder memory://source
    for address, message in (
        (f"{tmp_path}/a/b.csv", "no such file or folder"),
        (f"{tmp_path}/folder.jsonl", "Is a directory"),
        (f"{tmp_path}/a\0.jsonl", "ValueError: embedded null byte"),
        (f"{tmp_path}/plain.jsonl.gz", "Not a gzipped file"),
        (f"{tmp_path}/torn.jsonl.gz", "EOFError"),
        ("memory://source/nothing.jsonl", "no such file or folder"),
        ("memory://source", "Is a directory"),
        ("nonsense://a.jsonl", "ValueError: Protocol not known: nonsense"),
        ("gs://bucket/in.jsonl", "Please install gcsfs to access Google Storage"),
    ):
        for look in (check_input, lambda address: list(read_records(address))):
            with pytest.raises(UserError, match=f"^{address}: cannot be read: {message}"):
                look(address)
    monkeypatch.setattr("fsspec.utils.infer_compression", lambda path: None)
    with pytest.raises(
        UserError, match=r"csv\.zst: cannot be decompressed: pip install zstandard$"
    ):
        read(b"", "csv.zst")
