"""The output of a batch: nothing lost and nothing doubled, wherever a run ends and wherever it
writes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import fsspec
import pytest
import s3fs

from entropix_jax.batch import output as output_module
from entropix_jax.batch.merge import merge, part_address
from entropix_jax.batch.output import Store, check_output
from entropix_jax.batch.records import BadRecord, Record, read_records
from entropix_jax.errors import UserError
from tests.support.disks import full_disk

RUN = {"model": "tiny", "sampler": {"name": "entropix", "seed": 0}, "input": "in.jsonl"}


def record(number: int) -> Record:
    return Record(line=number, id=f"r{number}", digest=f"{number:015x}", prompt="a")


def bad(number: int) -> BadRecord:
    return BadRecord(line=number, id=None, digest=f"{number:015x}", error="bad")


def result(number: int) -> dict[str, Any]:
    return {"text": f"caf\u00e9 \u2028\n{number}", "tokens": [number] * 3}


def run(address: str, numbers: range, *, finish: bool = False, **options: Any) -> int:
    """One run that writes what is not done of some records; how many it wrote."""
    written = 0
    with Store(address, RUN, **options) as store:
        for number in numbers:
            if not store.is_done(record(number)):
                store.write(record(number), result(number))
                written += 1
            assert store.is_done(record(number))
        if finish:
            store.finish()
    return written


def put(address: str, data: bytes | str) -> None:
    raw = data if isinstance(data, bytes) else data.encode()
    with fsspec.open(address, "wb") as file:
        file.write(raw)


def get(address: str) -> bytes:
    fsspec.core.url_to_fs(address)[0].invalidate_cache()
    with fsspec.open(address, "rb") as file:
        data: bytes = file.read()
    return data


def exists(address: str) -> bool:
    fs, path = fsspec.core.url_to_fs(address)
    fs.invalidate_cache()
    return bool(fs.exists(path))


def beside(address: str, name: str) -> str:
    """Another file of an output's folder."""
    return address.removesuffix("out.jsonl") + name


def lines_of(address: str) -> list[dict[str, Any]]:
    """The objects of an output, all of whose lines must be whole."""
    data = get(address)
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def numbers_in(address: str) -> list[int]:
    return [line["line"] for line in lines_of(address)]


def parts(address: str) -> list[str]:
    """The names of an output's parts."""
    fs, path = fsspec.core.url_to_fs(f"{address}.parts")
    fs.invalidate_cache()
    names = fs.ls(path, detail=False) if fs.exists(path) else []
    return sorted(name.rpartition("/")[2] for name in names)


@pytest.fixture
def memory() -> str:
    """The address of an empty folder of memory."""
    fs = fsspec.filesystem("memory")
    if fs.exists("/store"):
        fs.rm("/store", recursive=True)
    return "memory://store"


def either(*kinds: str) -> Any:
    """A fixture: the address of an output in an empty folder of each of these kinds."""

    @pytest.fixture(params=kinds)
    def address(request: pytest.FixtureRequest) -> str:
        return f"{request.getfixturevalue(request.param)}/out.jsonl"

    return address


output = either("tmp_path", "memory", "s3")


remote = either("memory", "s3")  # where output cannot be appended to
local = either("tmp_path")
nearby = either("tmp_path", "memory")  # where S3 would add nothing but time
# What is written


def test_what_is_written(output: str) -> None:
    with Store(output, RUN) as store:
        store.write(record(7), {"id": "x", "text": "caf\u00e9\n", "half": "\ud800", "digest": 1})
        with pytest.raises(ValueError, match="not JSON compliant"):
            store.write(bad(2), {"logprob": float("nan")})
        assert not store.is_done(bad(2))
        store.write(bad(2), {"error": "bad"})
        store.finish()
    first, second = lines_of(output)
    assert first.items() >= {"id": "r7", "line": 7, "digest": "000000000000007"}.items()
    assert (first["text"], first["half"]) == ("caf\u00e9\n", "\ud800")
    assert second == {"id": None, "line": 2, "digest": "000000000000002", "error": "bad"}
    assert "caf\u00e9".encode() in get(output)
    assert json.loads(get(f"{output}.run.json"))["identity"] == RUN
    assert parts(output) == []


def test_a_restart_writes_the_rest(output: str) -> None:
    assert run(output, range(3)) == 3
    assert run(output, range(2, 6)) == 3
    assert run(output, range(6), finish=True) == 0
    assert numbers_in(output) == [*range(6)]
    before = get(output)
    assert run(output, range(6), finish=True) == 0  # after the end
    assert get(output) == before
    assert run(output, range(8), finish=True) == 2  # a longer input
    assert numbers_in(output) == [*range(8)]
    assert parts(output) == []
    with Store(output, RUN) as store:
        assert store.done == 8
    assert run(beside(output, "empty"), range(0), finish=True) == 0
    assert get(beside(output, "empty")) == b""


def test_what_a_record_is_known_by(nearby: str) -> None:
    """Its id, or its line and digest. Another record under the same id is refused."""
    written = [BadRecord(1, None, "5", "bad"), BadRecord(2, None, "5", "bad")]
    written += [BadRecord(1, None, "6", "bad"), BadRecord(3, "a", "5", "bad")]
    for left in (4, 0):
        with Store(nearby, RUN) as store:
            for one in written:
                if not store.is_done(one):
                    store.write(one, {"error": "bad"})
                    left -= 1
            assert not store.is_done(BadRecord(3, None, "5", "bad"))
            assert store.is_done(Record(line=9, id="a", digest="5"))  # moved
            with pytest.raises(
                UserError, match=r"line 1 \(id 'a'\) has a result of another record"
            ):
                store.is_done(Record(line=1, id="a", digest="6"))
            store.finish()
        assert left == 0
    with Store(nearby, RUN, mix=True) as store:
        assert store.is_done(Record(line=1, id="a", digest="6"))


# Ends of all kinds, on this machine


def test_torn_at_every_byte(tmp_path: Path) -> None:
    """Whatever is left of the last two lines, the restart makes the output whole."""
    path = tmp_path / "out.jsonl"
    run(str(path), range(4))
    whole = path.read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(ends[1], len(whole) + 1):
        path.write_bytes(whole[:size])
        with Store(str(path), RUN) as store:
            kept = sum(size >= end for end in ends)
            assert store.done == kept
            assert path.read_bytes() == whole[: ends[kept - 1]]
            assert [store.is_done(record(n)) for n in range(4)] == [n < kept for n in range(4)]
        assert run(str(path), range(4)) == 4 - kept
        assert path.read_bytes() == whole


def test_a_last_line_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(str(path), range(2))
    whole = path.read_bytes()
    for tail in (b"\0" * 100, b"\0" * 100 + b"\n", b'{"id": "\xe9"}\n', b'{"a": 1\n', b"[" * 10**5):
        path.write_bytes(whole + tail)
        assert run(str(path), range(2)) == 0
        assert path.read_bytes() == whole
        path.write_bytes(tail.removesuffix(b"\n") + b"\n" + whole)
        with pytest.raises(UserError, match=f"^{path}: line 1 is torn, or not JSON$"):
            run(str(path), range(2))
        assert path.read_bytes().endswith(whole)


def test_a_full_disk(tmp_path: Path) -> None:
    """Which takes a part of the line."""
    path = tmp_path / "out.jsonl"
    with Store(str(path), RUN) as store:
        store.write(record(1), result(1))
        whole = path.read_bytes()
        full = pytest.raises(UserError, match=f"^{path}: cannot be written: File too large$")
        with full_disk(len(whole) + 10), full:
            store.write(record(2), result(2))
        assert path.read_bytes() == whole
        assert not store.is_done(record(2))
        store.write(record(2), result(2))  # there is space again
    assert numbers_in(str(path)) == [1, 2]


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("fcntl.flock", OSError(38, "Function not implemented"), ""),
        ("os.fsync", OSError(122, "Disk quota exceeded"), "out.jsonl: cannot be written: Disk q"),
        ("os.replace", OSError(28, "No space left"), "run.json: cannot be written: No space left"),
    ],
)
def test_file_systems(
    local: str, monkeypatch: pytest.MonkeyPatch, name: str, error: OSError, told: str
) -> None:
    """Without locks, over a quota, and full as the sidecar is written."""
    monkeypatch.setattr(name, Mock(side_effect=error))
    if not told:
        assert run(local, range(2)) == 2
        return
    with pytest.raises(UserError, match=told):
        run(local, range(1))
    assert name == "os.fsync" or os.listdir(beside(local, "")) == []


# Whose output it is


def other_run(**changes: Any) -> dict[str, Any]:
    return {**RUN, **changes}


def test_another_run(local: str) -> None:
    run(local, range(2))
    before = get(local), get(f"{local}.run.json")
    for identity, difference in (
        (other_run(model="b", input="c"), 'model was "tiny" and is now "b"'),
        ({**RUN, "sampler": {"name": "entropix"}}, "sampler.seed was 0 and is now absent"),
        (other_run(model="x" * 500), f'model was "tiny" and is now "{"x" * 76}...;'),
        (other_run(sampler={"name": "entropix", "seed": False}), "sampler.seed was 0 and is now"),
    ):
        with pytest.raises(UserError) as error:
            Store(local, identity)
        assert str(error.value).startswith(f"{local}: holds another run's results: {difference}")
        assert (get(local), get(f"{local}.run.json")) == before
    assert run(local, range(3)) == 1  # nor is it locked


def test_mixing(nearby: str) -> None:
    """From then on the output is the new run's."""
    run(nearby, range(2))
    other = other_run(model="b")
    with Store(nearby, other, mix=True) as store:
        assert store.is_done(record(1))
        store.write(record(2), result(2))
    with pytest.raises(UserError, match='model was "b" and is now "tiny"'):
        run(nearby, range(3))
    with Store(nearby, other) as store:
        assert store.done == 3
        store.finish()
    assert numbers_in(nearby) == [*range(3)]
    assert json.loads(get(f"{nearby}.run.json"))["identity"] == other


def test_a_new_output_that_stays_empty_goes_with_its_error(nearby: str) -> None:

    def fail(*numbers: int) -> NoReturn:
        with Store(nearby, RUN) as store:
            for number in numbers:
                store.write(record(number), result(number))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not exists(nearby)
    assert not exists(f"{nearby}.run.json")
    for numbers in ((1,), ()):  # one that holds something, or did before, stays
        with pytest.raises(KeyError):
            fail(*numbers)
        assert exists(f"{nearby}.run.json")
    with Store(nearby, RUN) as store:
        assert store.done == 1


def test_an_output_of_nobody(nearby: str) -> None:
    data = '{"id": 1, "text": "mine"}\n[2]\n\n'
    put(nearby, data)
    with pytest.raises(UserError) as error:
        run(nearby, range(1))
    assert str(error.value) == (
        f"{nearby}: holds something, but no run's results (there is no {nearby}.run.json);"
        " choose another output"
    )
    assert get(nearby) == data.encode()
    assert not exists(f"{nearby}.run.json")
    assert run(nearby, range(2), mix=True, finish=True) == 2
    assert run(nearby, range(3), finish=True) == 1
    assert get(nearby).startswith(data.encode())
    assert get(nearby).count(b"\n") == 6
    for tail in (b"hello", b'{"a": 1}', b"12"):  # nothing of it is dropped
        put(beside(nearby, "torn"), b'{"a": 0}\n' + tail)
        with pytest.raises(UserError, match="torn: line 2 is torn, or not JSON"):
            run(beside(nearby, "torn"), range(1), mix=True)
        assert get(beside(nearby, "torn")) == b'{"a": 0}\n' + tail


# Object stores


def test_parts(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number of records, by time, and what is left on closing."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(output_module, "PART_RECORDS", 5)
    seen = []
    with Store(remote, RUN) as store:
        for number in range(20):
            now += 25.0 if number >= 12 else 0.0
            store.write(record(number), result(number))
            seen.append(len(parts(remote)))
        assert not exists(remote)
    #                       5 records              10     60 seconds from record 10 on, and so on
    assert seen == [0] * 4 + [1] * 5 + [2] * 5 + [3] * 4 + [4] * 2
    counts = [len(lines_of(f"{remote}.parts/{name}")) for name in parts(remote)]
    assert parts(remote) == [f"{number:06}.jsonl" for number in range(5)]
    assert counts == [5, 5, 5, 4, 1]
    assert run(remote, range(22), finish=True) == 2
    assert numbers_in(remote) == [*range(22)]
    assert parts(remote) == []


def test_killed_runs(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had not been uploaded is done again."""
    monkeypatch.setattr(output_module, "PART_RECORDS", 3)
    for written in (5, 4, 3, 9):
        store = Store(remote, RUN)
        for number in range(12):
            if not store.is_done(record(number)) and written:
                store.write(record(number), result(number))
                written -= 1
        del store  # without a word
    assert run(remote, range(12), finish=True) == 0
    assert numbers_in(remote) == [*range(12)]


@pytest.mark.parametrize("removed", [0, 1, 4])
def test_joining_cut_short(remote: str, monkeypatch: pytest.MonkeyPatch, removed: int) -> None:
    """After so many of four parts have been removed; a run that resumes may also go on."""
    monkeypatch.setattr(output_module, "PART_RECORDS", 2)
    put(f"{remote}.parts/notes.txt", b"mine")
    fs, _ = fsspec.core.url_to_fs(remote)
    remove = fs.rm

    def rm(paths: list[str]) -> NoReturn:
        for part in paths[:removed]:
            remove(part)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fs, "rm", rm)
        with pytest.raises(KeyboardInterrupt):
            run(remote, range(7), finish=True)
    assert numbers_in(remote) == [*range(7)]  # the object is whole
    assert len(parts(remote)) == 1 + 4 - removed
    assert run(remote, range(8), finish=True) == 1
    assert numbers_in(remote) == [*range(8)]
    assert parts(remote) == ["notes.txt"]


def test_joining_that_fails(remote: str) -> None:
    """The output is as before. A torn part, which some stores allow, is written again."""
    run(remote, range(3), finish=True)
    before = get(remote)
    run(remote, range(5))
    put(f"{remote}.parts/999999.jsonl", b"{\n{}\n")
    with pytest.raises(UserError, match=r"999999.jsonl: line 1 is torn, or not JSON"):
        run(remote, range(5), finish=True)
    assert get(remote) == before
    put(f"{remote}.parts/999999.jsonl", b"")
    put(f"{remote}.parts/000000.jsonl", get(f"{remote}.parts/000000.jsonl")[:-10])
    assert run(remote, range(5), finish=True) == 1
    assert sorted(numbers_in(remote)) == [*range(5)]


def test_two_runs_at_once_in_a_store(remote: str) -> None:
    """They cannot be told before both write."""
    with Store(remote, RUN) as first:
        second = Store(remote, RUN)
        first.write(record(1), result(1))
        second.write(record(1), result(1))
    with pytest.raises(UserError, match=r"another run is writing to it: .*000000.jsonl is there$"):
        second.__exit__(None, None, None)
    assert run(remote, range(1, 3), finish=True) == 1
    assert numbers_in(remote) == [1, 2]


def test_an_upload_that_fails(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "PART_RECORDS", 2)
    fs, _ = fsspec.core.url_to_fs(remote)
    with Store(remote, RUN) as store:
        store.write(record(0), result(0))
        with monkeypatch.context() as patch:
            patch.setattr(fs, "pipe_file", Mock(side_effect=ConnectionError("no route")))
            with pytest.raises(UserError) as error:
                store.write(record(1), result(1))
    assert str(error.value) == f"{remote}: cannot be written: no route"
    assert numbers_in(f"{remote}.parts/000000.jsonl") == [0, 1]  # closing tried again


def test_a_long_output(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined by an upload in pieces, which S3 has from 5 MiB on."""
    monkeypatch.setattr(s3fs.S3FileSystem, "default_block_size", 5 * 2**20)
    fs = s3fs.S3FileSystem(default_block_size=5 * 2**20)
    monkeypatch.setattr(output_module, "resolve", lambda address: (fs, address[5:]))
    address = f"{s3}/out.jsonl"
    with Store(address, RUN) as store:
        for number in range(13):
            store.write(record(number), {"text": "x" * 2**20})
        store.finish()
    assert numbers_in(address) == [*range(13)]
    assert fs.info(address)["ETag"].endswith('-3"')  # pieces


# Parts of several processes


def shared_run(address: str, count: int) -> None:
    """An input in in.jsonl, and the outputs of `count` processes that are to be merged."""
    lines = [json.dumps({"prompt": "a", "id": f"i{n}", "sampler": "own.toml"}) for n in range(10)]
    lines[3:3] = ["{", lines[0], "{"]
    put(beside(address, "in.jsonl"), "\n".join(lines))
    for index in range(count):
        with Store(part_address(address, index, count), RUN) as store:
            for record in read_records(beside(address, "in.jsonl"), share=(index, count)):
                store.write(record, {"process": index, "sampler_digest": "a"})
            store.finish()


@pytest.mark.parametrize("count", [1, 3, 20])
def test_merging(output: str, count: int) -> None:
    shared_run(output, count)
    for _ in range(2):  # the second time over the first
        merge(output, count, input=beside(output, "in.jsonl"))
        pieces = [get(part_address(output, index, count)) for index in range(count)]
        assert get(output) == b"".join(pieces)
    assert sorted(line["line"] for line in lines_of(output)) == list(range(1, 14))
    assert parts(output) == []
    # It is the run's own output.
    with Store(output, RUN) as store:
        assert all(store.is_done(record) for record in read_records(beside(output, "in.jsonl")))


PART = "out.part-00002-of-00003.jsonl"
# What is done to a file, None if it is removed, and what is said.
SPOILED: list[tuple[str, Callable[[bytes], bytes] | None, str]] = [
    (PART, lambda old: old + old.split(b"\n")[0] + b"\n", f"{PART}: line 5 is a second result"),
    (PART, lambda old: old + b'{"a": 1}\n', f"{PART}: line 5 is not a result"),
    (PART, lambda old: old[:-1], f"{PART}: line 4 is torn, or not JSON"),
    (PART, lambda old: old.split(b"\n")[0] + b"\n", "in.jsonl: 3 of 13 records have no result"),
    (PART, None, f"{PART}: missing or not finished: run this part to its end"),
    (f"{PART}.run.json", None, f"{PART}: no run's results: no "),
    (
        f"{PART}.run.json",
        lambda old: old.replace(b"tiny", b"huge"),
        'out.part-00000-of-00003.jsonl: model was "tiny" and is now "huge"',
    ),
    (
        f"{PART}.run.json",
        lambda old: old.replace(b': "a"', b': "b"'),
        f"{PART}: another run than earlier parts: sampler 'own.toml' differs",
    ),
    (
        "in.jsonl",
        lambda old: old.replace(b'"i9"', b'"i9", "seed": 1'),
        "1 of 13 records have no result in the parts, the first one in line 13 (id 'i9'): run all",
    ),
    (
        "in.jsonl",
        lambda old: old.rpartition(b"\n")[0],
        "in.jsonl: 1 of 13 results in the parts are of no record of it",
    ),
]


@pytest.mark.parametrize(("name", "spoil", "message"), SPOILED)
def test_parts_that_cannot_be_merged(
    nearby: str, name: str, spoil: Callable[[bytes], bytes] | None, message: str
) -> None:
    shared_run(nearby, 3)
    if spoil is not None:
        put(beside(nearby, name), spoil(get(beside(nearby, name))))
    else:
        fs, path = fsspec.core.url_to_fs(beside(nearby, name))
        fs.rm(path)
    with pytest.raises(UserError, match=re.escape(message)):
        merge(nearby, 3, input=beside(nearby, "in.jsonl"))
    assert not exists(nearby)
    assert not exists(f"{nearby}.run.json")


def test_a_part_that_is_not_joined(remote: str) -> None:
    shared_run(remote, 3)
    put(beside(remote, f"{PART}.parts/000000.jsonl"), b"")
    with pytest.raises(UserError, match="missing or not finished: run this part to its end"):
        merge(remote, 3, input=beside(remote, "in.jsonl"))


def test_merging_that_fails_in_the_middle(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared_run(output, 2)

    def refuse(source: Any, out: Any, *args: object) -> NoReturn:
        out.write(source.read(10))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", refuse)
        with pytest.raises(UserError, match="No space left on device"):
            merge(output, 2, input=beside(output, "in.jsonl"))
    assert not exists(output)
    merge(output, 2, input=beside(output, "in.jsonl"))
    assert len(lines_of(output)) == 13


# Before the model is loaded


def test_an_output_that_cannot_be_written(output: str) -> None:
    put(beside(output, "in.jsonl"), b"{}\n")
    with pytest.raises(UserError, match=r"in\.jsonl: cannot be written: it is the input$"):
        check_output(beside(output, "in.jsonl"), input=beside(output, "in.jsonl"))
    with fsspec.open(beside(output, "folder.jsonl/a"), "wb", auto_mkdir=True):
        pass
    for address, message in (
        (beside(output, "folder.jsonl"), "cannot be written: it is a folder"),
        ("-", "the output cannot be standard output"),
        ("", "'': the output must be a file, not a folder"),
        (beside(output, "new/"), "new/': the output must be a file, not a folder"),
        (beside(output, "out.zst"), "a compressed output cannot grow: choose a name in .jsonl"),
        ("nonsense://out.jsonl", "ValueError: Protocol not known: nonsense"),
    ):
        for look in (check_output, lambda address: Store(address, RUN)):
            with pytest.raises(UserError, match=message):
                look(address)


def test_local_outputs_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("link").symlink_to("file")
    os.mkfifo("pipe")
    for address, message in (
        ("no/out.jsonl", "no/out.jsonl: cannot be written: no folder .*/no"),
        ("file/out.jsonl", "file/out.jsonl: cannot be written: no folder .*/file"),
        ("pipe", "pipe: cannot be written: not a regular file"),
        ("/dev/null", "/dev/null: cannot be written: not a regular file"),
    ):
        for look in (check_output, lambda address: Store(address, RUN)):
            with pytest.raises(UserError, match=rf"^(.*/)?{message}$"):
                look(address)
    for same in ("file", "link", f"file://{tmp_path}/file", f"{tmp_path}/../{tmp_path.name}/file"):
        with pytest.raises(UserError, match="it is the input"):
            check_output("file", input=same)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as it is to others than root
    with pytest.raises(UserError, match="out: cannot be written: no permission"):
        check_output("out")
    assert sorted(os.listdir()) == ["file", "link", "pipe"]
