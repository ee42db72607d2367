"""The output of a batch: nothing lost and nothing doubled, wherever a run ends and wherever it
writes.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import pytest
import s3fs

from entropix_jax.batches import sinks as sinks_module
from entropix_jax.batches.merging import merge, part_address
from entropix_jax.batches.source import BadRecord, Record, read_records
from entropix_jax.batches.store import Store, check_output
from entropix_jax.errors import UserError
from tests.buckets import s3_folder, s3_server  # noqa: F401 (fixtures)

RUN = {"model": "tiny", "sampler": {"name": "entropix", "seed": 0}, "input": "in.jsonl"}


def record(number: int) -> Record:
    return Record(line=number, id=f"r{number}", digest=number * 10**15 % 2**60, prompt="a")


def bad(number: int) -> BadRecord:
    return BadRecord(line=number, id=None, digest=number, error="bad")


def result(number: int) -> dict[str, Any]:
    return {"text": f"caf\u00e9 \u2028\n{number}", "tokens": [number] * 3}


def run(address: str, numbers: range, *, finish: bool = False, **options: Any) -> int:
    """One run that writes what is not done of some records; how many it wrote."""
    written = 0
    with Store.open(address, RUN, **options) as store:
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


def lines_of(address: str) -> list[dict[str, Any]]:
    """The objects of an output, all of whose lines must be whole."""
    data = get(address)
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def ids(address: str) -> list[str]:
    return [line["id"] for line in lines_of(address)]


def parts(address: str) -> list[str]:
    """The names of an output's parts."""
    fs, path = fsspec.core.url_to_fs(f"{address}.parts")
    fs.invalidate_cache()
    names = fs.ls(path, detail=False) if fs.exists(path) else []
    return sorted(name.rpartition("/")[2] for name in names)


def names(numbers: range) -> list[str]:
    return [f"r{number}" for number in numbers]


@pytest.fixture
def memory() -> str:
    """The address of an empty folder of memory."""
    fs = fsspec.filesystem("memory")
    if fs.exists("/store"):
        fs.rm("/store", recursive=True)
    return "memory://store"


@pytest.fixture
def local(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture(params=["memory", "s3"])
def remote(request: pytest.FixtureRequest) -> str:
    """Where output cannot be appended to."""
    folder: str = request.getfixturevalue(request.param)
    return folder


@pytest.fixture(params=["local", "memory"])
def nearby(request: pytest.FixtureRequest) -> str:
    """The same without S3, where it would add nothing but time."""
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest) -> str:
    """Where output may be."""
    found: str = request.getfixturevalue(request.param)
    return found


# What is written


def test_what_is_written(folder: str) -> None:
    address = f"{folder}/out.jsonl"
    with Store.open(address, RUN) as store:
        store.write(record(7), {"id": "x", "text": "caf\u00e9\n", "half": "\ud800", "digest": 1})
        store.write(bad(2), {"error": "bad"})
        store.finish()
    assert lines_of(address) == [
        {
            "id": "r7",
            "line": 7,
            "digest": f"{7 * 10**15:015x}",
            "text": "caf\u00e9\n",
            "half": "\ud800",
        },
        {"id": None, "line": 2, "digest": "000000000000002", "error": "bad"},
    ]
    assert "caf\u00e9".encode() in get(address)
    assert json.loads(get(f"{address}.run.json"))["identity"] == RUN
    assert parts(address) == []


def test_a_restart_writes_the_rest(folder: str) -> None:
    address = f"{folder}/out.jsonl"
    assert run(address, range(3)) == 3
    assert run(address, range(2, 6)) == 3
    assert run(address, range(6), finish=True) == 0
    assert ids(address) == names(range(6))
    before = get(address)
    assert run(address, range(6), finish=True) == 0  # after the end
    assert get(address) == before
    assert run(address, range(8), finish=True) == 2  # a longer input
    assert ids(address) == names(range(8))
    assert parts(address) == []
    with Store.open(address, RUN) as store:
        assert store.done == 8


def test_no_records(nearby: str) -> None:
    address = f"{nearby}/out.jsonl"
    for _ in range(2):
        assert run(address, range(0), finish=True) == 0
        assert get(address) == b""


def test_records_without_an_id(nearby: str) -> None:
    """They are known by where they stand and what they say."""
    address = f"{nearby}/out.jsonl"
    for written in (3, 0):
        with Store.open(address, RUN) as store:
            for line, digest in ((1, 5), (2, 5), (1, 6)):
                other = BadRecord(line, None, digest, "bad")
                if not store.is_done(other):
                    store.write(other, {"error": "bad"})
                    written -= 1
            assert not store.is_done(BadRecord(3, None, 5, "bad"))
            store.finish()
        assert written == 0
    assert len(lines_of(address)) == 3


def test_a_bad_record_with_an_id(local: str) -> None:
    """What has ended in an error is done; mending the input makes it another record."""
    address = f"{local}/out.jsonl"
    with Store.open(address, RUN) as store:
        store.write(BadRecord(1, "a", 5, "bad"), {"error": "bad"})
    with Store.open(address, RUN) as store:
        assert store.is_done(BadRecord(1, "a", 5, "bad"))
        assert store.is_done(Record(line=9, id="a", digest=5))  # moved
        with pytest.raises(
            UserError, match=r"out.jsonl: line 1 \(id 'a'\) has a result of another record"
        ):
            store.is_done(Record(line=1, id="a", digest=6))
    with Store.open(address, RUN, mix=True) as store:
        assert store.is_done(Record(line=1, id="a", digest=6))


def test_a_result_that_is_no_json(local: str) -> None:
    address = f"{local}/out.jsonl"
    with Store.open(address, RUN) as store:
        with pytest.raises(ValueError, match="not JSON compliant"):
            store.write(record(1), {"logprob": float("nan")})
        assert not store.is_done(record(1))
        store.write(record(1), {})
    assert ids(address) == ["r1"]


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for number, address in enumerate(["a b", f"file://{tmp_path}/a b", "~/a b"]):
        assert run(address, range(number + 1)) == 1
    assert sorted(os.listdir()) == ["a b", "a b.run.json"]


# Ends of all kinds, on this machine


def test_torn_at_every_byte(tmp_path: Path) -> None:
    """Whatever is left of the last two lines, the restart makes the output whole."""
    path = tmp_path / "out.jsonl"
    run(str(path), range(4))
    whole = path.read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(ends[1], len(whole) + 1):
        path.write_bytes(whole[:size])
        with Store.open(str(path), RUN) as store:
            # An object that only lacks its line break is whole.
            kept = sum(size >= end - 1 for end in ends)
            assert store.done == kept
            assert path.read_bytes() == whole[: ends[kept - 1]]
            assert [store.is_done(record(n)) for n in range(4)] == [n < kept for n in range(4)]
        assert run(str(path), range(4)) == 4 - kept
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "tail", [b"\0" * 100, b"\0" * 100 + b"\n", b'{"id": "\xe9"}\n', b'{"a": 1\n', b"[" * 10**5]
)
def test_a_last_line_that_is_not_json(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "out.jsonl"
    run(str(path), range(2))
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    assert run(str(path), range(2)) == 0
    assert path.read_bytes() == whole
    path.write_bytes(tail + (b"" if tail.endswith(b"\n") else b"\n") + whole)
    with pytest.raises(UserError) as error:
        run(str(path), range(2))
    assert str(error.value) == f"{path}: line 1 is not JSON"
    assert path.read_bytes().endswith(whole)


def test_killed(tmp_path: Path) -> None:
    """In a process of its own, in the middle of writing."""
    path = tmp_path / "out.jsonl"
    code = f"""if True:
        from entropix_jax.batches.store import Record, Store
        with Store.open({str(path)!r}, {RUN!r}) as store:
            for number in range(10**9):
                record = Record(line=number, id=f"r{{number}}", digest=number * 10**15 % 2**60)
                store.write(record, {{"text": "x" * 100}})
                if number == 20:
                    print(flush=True)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(UserError) as error:  # while it lives
            run(str(path), range(1))
        assert str(error.value) == f"{path}: another run is writing to it"
        process.send_signal(signal.SIGKILL)
    count = path.read_bytes().count(b"\n")
    assert count > 20
    assert run(str(path), range(count + 1)) <= 1
    assert ids(str(path)) == names(range(count + 1))


def test_two_runs_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Store.open(str(path), RUN):
        for mix in (False, True):
            with pytest.raises(UserError) as error:
                Store.open(str(path), RUN, mix=mix)
            assert str(error.value) == f"{path}: another run is writing to it"
        with Store.open(f"{path}2", RUN):
            pass
    with Store.open(str(path), RUN):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> NoReturn:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert run(f"{tmp_path}/out.jsonl", range(2)) == 2


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit of the file's size, which takes a part of the line as a full disk does."""
    path = tmp_path / "out.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Store.open(str(path), RUN) as store:
        store.write(record(1), result(1))
        whole = path.read_bytes()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, hard))
            with pytest.raises(UserError) as error:
                store.write(record(2), result(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert str(error.value) == f"{path}: cannot be written: File too large"
        assert path.read_bytes() == whole
        assert not store.is_done(record(2))
        store.write(record(2), result(2))  # there is space again
    assert ids(str(path)) == ["r1", "r2"]


def test_an_interrupt_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been written of the line is taken back."""
    path = tmp_path / "out.jsonl"

    class Interrupted(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(data[:10])
            raise KeyboardInterrupt

    run(str(path), range(2))
    whole = path.read_bytes()
    monkeypatch.setattr(io, "FileIO", Interrupted)
    with Store.open(str(path), RUN) as store, pytest.raises(KeyboardInterrupt):
        store.write(record(2), result(2))
    assert path.read_bytes() == whole


def test_what_a_network_tells_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> NoReturn:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(UserError, match=r"out: cannot be written: Disk quota exceeded$"):
        run(f"{tmp_path}/out", range(1))
    with (
        pytest.raises(KeyboardInterrupt),  # which is not lost over it
        Store.open(f"{tmp_path}/out", RUN),
    ):
        raise KeyboardInterrupt


# Whose output it is


def other_run(**changes: Any) -> dict[str, Any]:
    return {**RUN, **changes}


@pytest.mark.parametrize(
    ("identity", "difference"),
    [
        (other_run(model="b", input="c"), 'model was "tiny" and is now "b"'),
        (
            other_run(sampler={"name": "entropix", "seed": 1}, input="c"),
            "sampler.seed was 0 and is now 1",
        ),
        (other_run(sampler=None), 'sampler was {"name": "entropix", "seed": 0} and is now null'),
        (other_run(more=True), "more was absent and is now true"),
        ({"model": "tiny", "input": "in.jsonl"}, 'sampler was {"name": "entropix", "seed": 0} '),
        (other_run(model="x" * 500), f'model was "tiny" and is now "{"x" * 76}...;'),
        (other_run(sampler={"name": "entropix", "seed": False}), "sampler.seed was 0 and is now"),
    ],
)
def test_another_run(local: str, identity: dict[str, Any], difference: str) -> None:
    address = f"{local}/out.jsonl"
    run(address, range(2))
    before = get(address), get(f"{address}.run.json")
    with pytest.raises(UserError) as error:
        Store.open(address, identity)
    assert str(error.value).startswith(f"{address}: holds another run's results: {difference}")
    assert (get(address), get(f"{address}.run.json")) == before
    assert run(address, range(3)) == 1  # nor is it locked


def test_the_same_run(local: str) -> None:
    """The order of keys and the kind of sequence say nothing."""
    address = f"{local}/out.jsonl"
    with Store.open(address, {"a": (1, 2), "b": {"c": 1, "d": 2}}) as store:
        store.write(record(1), {})
    with Store.open(address, {"b": {"d": 2, "c": 1}, "a": [1, 2]}) as store:
        assert store.done == 1


def test_mixing(nearby: str) -> None:
    address = f"{nearby}/out.jsonl"
    run(address, range(2))
    other = other_run(model="b")
    with Store.open(address, other, mix=True) as store:
        assert store.is_done(record(1))
        store.write(record(2), result(2))
    # From then on it is the new run's, which says whose it was.
    with pytest.raises(UserError, match='model was "b" and is now "tiny"'):
        run(address, range(3))
    with Store.open(address, other) as store:
        assert store.done == 3
        store.finish()
    assert ids(address) == names(range(3))
    sidecar = json.loads(get(f"{address}.run.json"))
    assert (sidecar["identity"], sidecar["earlier"]) == (other, [RUN])


def test_a_description_that_is_none_is_refused(tmp_path: Path) -> None:
    address = str(tmp_path / "out.jsonl")
    run(address, range(1))
    sidecar = Path(f"{address}.run.json")
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "earlier": 3}))
    with pytest.raises(UserError, match=r"out\.jsonl\.run\.json: earlier is not a list"):
        Store.open(address, other_run(model="b"), mix=True)


def sampled(number: int) -> Record:
    return replace(record(number), sampler="own.toml")


def test_a_sampler_that_has_changed(nearby: str) -> None:
    """Is refused; each that a record names is held on to beside the output."""
    address = f"{nearby}/out.jsonl"
    with Store.open(address, RUN) as store:
        store.write(sampled(1), {"sampler_digest": "a"})
        store.write(record(2), {})
    assert json.loads(get(f"{address}.run.json"))["samplers"] == {"own.toml": "a"}
    with Store.open(address, RUN) as store:
        store.write(sampled(3), {"sampler_digest": "a"})
        with pytest.raises(UserError, match=r"sampler 'own\.toml' is not what it was"):
            store.write(sampled(4), {"sampler_digest": "b"})
    with Store.open(address, RUN, mix=True) as store:
        assert store.done == 3
        store.write(sampled(4), {"sampler_digest": "b"})
    assert json.loads(get(f"{address}.run.json"))["samplers"] == {"own.toml": "b"}


def test_a_new_output_that_stays_empty_goes_with_its_error(nearby: str) -> None:
    address = f"{nearby}/out.jsonl"

    def fail(*numbers: int) -> NoReturn:
        with Store.open(address, RUN) as store:
            for number in numbers:
                store.write(record(number), result(number))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not exists(address)
    assert not exists(f"{address}.run.json")
    for numbers in ((1,), ()):  # one that holds something, or did before, stays
        with pytest.raises(KeyError):
            fail(*numbers)
        assert exists(f"{address}.run.json")
    with Store.open(address, RUN) as store:
        assert store.done == 1


def test_an_output_of_nobody(nearby: str) -> None:
    address = f"{nearby}/out.jsonl"
    data = '{"id": 1, "text": "mine"}\n[2]\n\n'
    put(address, data)
    with pytest.raises(UserError) as error:
        run(address, range(1))
    assert str(error.value) == (
        f"{address}: holds something, but no run's results (there is no {address}.run.json):"
        " choose another output"
    )
    assert get(address) == data.encode()
    assert not exists(f"{address}.run.json")
    assert run(address, range(2), mix=True, finish=True) == 2
    assert run(address, range(3), finish=True) == 1
    assert get(address).startswith(data.encode())
    assert get(address).count(b"\n") == 6


@pytest.mark.parametrize("tail", [b"hello", b'{"a": 1}', b'{"a": 1', b"12"])
def test_nothing_of_what_is_not_ours_is_dropped(nearby: str, tail: bytes) -> None:
    address = f"{nearby}/out.jsonl"
    put(address, b'{"a": 0}\n' + tail)
    with pytest.raises(UserError) as error:
        run(address, range(1), mix=True)
    assert str(error.value).endswith("out.jsonl: line 2 is torn, or not JSON")
    assert get(address) == b'{"a": 0}\n' + tail


def test_an_empty_output_of_another_run(nearby: str) -> None:
    """There is nothing to mix with."""
    address = f"{nearby}/out.jsonl"
    Store.open(address, other_run(model="b")).__exit__(None, None, None)
    assert run(address, range(1), finish=True) == 1
    assert json.loads(get(f"{address}.run.json"))["identity"] == RUN
    put(f"{nearby}/empty", b"")
    assert run(f"{nearby}/empty", range(1), finish=True) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "not valid JSON: "),
        (b"\xe9", "not valid JSON: "),
        (b"{}", "not the description of a run"),
        (b"[]", "not the description of a run"),
        (b'{"identity": {}, "samplers": 3}', "not the description of a run"),
    ],
)
def test_a_broken_sidecar(nearby: str, data: bytes, message: str) -> None:
    address = f"{nearby}/out.jsonl"
    run(address, range(1))
    put(f"{address}.run.json", data)
    with pytest.raises(UserError) as error:
        run(address, range(1))
    assert str(error.value).startswith(f"{address}.run.json: {message}")


def test_a_sidecar_that_cannot_be_written(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match=r"run.json: cannot be written: No space left on device$"):
        run(f"{local}/out.jsonl", range(1))
    assert os.listdir(local) == []


# Object stores


def test_parts(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number of records, by time, and what is left on closing."""
    address = f"{remote}/a/out.jsonl"
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(sinks_module, "PART_RECORDS", 5)
    seen = []
    with Store.open(address, RUN) as store:
        for number in range(20):
            now += 25.0 if number >= 12 else 0.0
            store.write(record(number), result(number))
            seen.append(len(parts(address)))
        assert not exists(address)
    #                       5 records              10     60 seconds from record 10 on, and so on
    assert seen == [0] * 4 + [1] * 5 + [2] * 5 + [3] * 4 + [4] * 2
    counts = [len(lines_of(f"{address}.parts/{name}")) for name in parts(address)]
    assert parts(address) == [f"{number:06}.jsonl" for number in range(5)]
    assert counts == [5, 5, 5, 4, 1]
    assert run(address, range(22), finish=True) == 2
    assert ids(address) == names(range(22))
    assert parts(address) == []


def test_a_run_that_ends_by_an_error_keeps_what_it_has(memory: str) -> None:
    address = f"{memory}/out.jsonl"
    store = Store.open(address, RUN)
    store.write(record(0), result(0))
    store.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert parts(address) == ["000000.jsonl"]
    assert run(address, range(2), finish=True) == 1
    assert ids(address) == names(range(2))


def test_killed_runs(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had not been uploaded is done again."""
    monkeypatch.setattr(sinks_module, "PART_RECORDS", 3)
    address = f"{remote}/out.jsonl"
    for written in (5, 4, 3, 9):
        store = Store.open(address, RUN)
        for number in range(12):
            if not store.is_done(record(number)) and written:
                store.write(record(number), result(number))
                written -= 1
        del store  # without a word
    assert run(address, range(12), finish=True) == 0
    assert ids(address) == names(range(12))


def test_joining_cut_short(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the object is there, before the parts are gone, and in the middle of their going."""
    monkeypatch.setattr(sinks_module, "PART_RECORDS", 2)
    address = f"{remote}/out.jsonl"
    fs, path = fsspec.core.url_to_fs(address)
    remove = fs.rm

    def cut(removed: int) -> None:
        def rm(paths: list[str]) -> NoReturn:
            for part in paths[:removed]:
                remove(part)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(fs, "rm", rm)
            with pytest.raises(KeyboardInterrupt):
                run(address, range(done), finish=True)

    done = 0
    for removed in (0, 1, 2):
        done += 7
        cut(removed)
        assert ids(address) == names(range(done))  # the object is whole
        assert len(parts(address)) == 4 - removed  # of 7 records
        with Store.open(address, RUN) as store:
            assert store.done == done
        if removed != 1:  # else the next one meets both
            assert run(address, range(done), finish=True) == 0
            assert parts(address) == []
        else:
            assert run(address, range(done + 1), finish=True) == 1
            done += 1
        assert ids(address) == names(range(done))

    # While it is being written there is the old one.
    def interrupt(*args: object, **options: object) -> NoReturn:
        raise KeyboardInterrupt

    before = get(address)
    run(address, range(done + 5))
    put(f"{address}.parts/{999999}.jsonl", b"{\n{}\n")  # cannot be read
    with pytest.raises(UserError, match=r"999999.jsonl: line 1 is not JSON"):
        run(address, range(done + 5), finish=True)
    remove(f"{path}.parts/999999.jsonl")
    with Store.open(address, RUN) as store, monkeypatch.context() as patch:
        patch.setattr(sinks_module, "lines_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.finish()
    assert get(address) == before
    assert run(address, range(done + 5), finish=True) == 0
    assert ids(address) == names(range(done + 5))


def test_a_part_that_is_torn(memory: str) -> None:
    """As a file system may leave it that does not put objects at once."""
    address = f"{memory}/out.jsonl"
    run(address, range(3))
    put(f"{address}.parts/000000.jsonl", get(f"{address}.parts/000000.jsonl")[:-10])
    assert run(address, range(3), finish=True) == 1
    assert ids(address) == names(range(3))


def test_what_else_lies_among_the_parts(memory: str) -> None:
    address = f"{memory}/out.jsonl"
    run(address, range(2))
    put(f"{address}.parts/notes.txt", b"mine")
    put(f"{address}.parts/1000000.jsonl", get(f"{address}.parts/000000.jsonl"))
    assert run(address, range(3), finish=True) == 1
    assert ids(address) == names(range(3))
    assert parts(address) == ["notes.txt"]


def test_two_runs_at_once_in_a_store(remote: str) -> None:
    """They cannot be told before both write."""
    address = f"{remote}/out.jsonl"
    with Store.open(address, RUN) as first:
        second = Store.open(address, RUN)
        first.write(record(1), result(1))
        second.write(record(1), result(1))
    with pytest.raises(UserError, match=r"another run is writing to it: .*000000.jsonl is there$"):
        second.__exit__(None, None, None)
    assert run(address, range(1, 3), finish=True) == 1
    assert ids(address) == ["r1", "r2"]


def test_an_upload_that_fails(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks_module, "PART_RECORDS", 2)
    address = f"{remote}/out.jsonl"
    fs, _ = fsspec.core.url_to_fs(address)

    def refuse(*args: object, **options: object) -> NoReturn:
        raise ConnectionError("no route")

    with Store.open(address, RUN) as store:
        store.write(record(0), result(0))
        with monkeypatch.context() as patch:
            patch.setattr(fs, "pipe_file", refuse)
            with pytest.raises(UserError) as error:
                store.write(record(1), result(1))
    assert str(error.value) == f"{address}: cannot be written: no route"
    assert ids(f"{address}.parts/000000.jsonl") == ["r0", "r1"]  # closing tried again


def test_a_long_output(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined by an upload in pieces, which S3 has from 5 MiB on."""
    monkeypatch.setattr(s3fs.S3FileSystem, "default_block_size", 5 * 2**20)
    fs = s3fs.S3FileSystem(default_block_size=5 * 2**20)
    monkeypatch.setattr(sinks_module, "located", lambda address: (fs, address[5:]))
    address = f"{s3}/out.jsonl"
    with Store.open(address, RUN) as store:
        for number in range(13):
            store.write(record(number), {"text": "x" * 2**20})
        store.finish()
    assert ids(address) == names(range(13))
    assert fs.info(address)["ETag"].endswith('-3"')  # pieces


def test_input_from_a_store(s3: str) -> None:
    fs, _ = fsspec.core.url_to_fs(s3)
    with fs.open(f"{s3}/in.csv.gz", "wb", compression="gzip") as file:
        file.write(b"prompt,id\n" + b"".join(b"p,%d\n" % n for n in range(5000)))
    assert [record.id for record in read_records(f"{s3}/in.csv.gz")] == [
        str(number) for number in range(5000)
    ]
    for address, message in (
        (f"{s3}/nothing.jsonl", "no such file or folder"),
        ("s3://no-bucket-of-this-name/in.jsonl", "no such file or folder"),
        (s3, "Is a directory"),
        ("s3://bucket", "Is a directory"),
    ):
        with pytest.raises(UserError) as error:
            next(read_records(address))
        assert str(error.value) == f"{address}: cannot be read: {message}"
    put(f"{s3}/folder/a", b"a")
    with pytest.raises(UserError, match=r"folder: cannot be read: Is a directory$"):
        next(read_records(f"{s3}/folder"))


def test_what_others_have_written_meanwhile(s3: str) -> None:
    """fsspec keeps listings, sizes included, and cannot know when they are out of date."""
    ours, theirs = s3fs.S3FileSystem(), s3fs.S3FileSystem(skip_instance_cache=True)
    line = json.dumps({"prompt": "a"}).encode() + b"\n"
    theirs.pipe_file(f"{s3}/in.jsonl", line)
    ours.ls(s3)
    theirs.pipe_file(f"{s3}/in.jsonl", line * 3)
    assert len(list(read_records(f"{s3}/in.jsonl"))) == 3

    store = Store.open(f"{s3}/out.jsonl", RUN)
    store.write(record(1), result(1))
    theirs.pipe_file(f"{s3}/out.jsonl.parts/notes.txt", b"")
    ours.ls(f"{s3}/out.jsonl.parts")
    theirs.pipe_file(f"{s3}/out.jsonl.parts/000000.jsonl", b"")
    with pytest.raises(UserError, match="another run is writing to it"):
        store.__exit__(None, None, None)


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = s3fs.S3FileSystem(
        endpoint_url="http://127.0.0.1:1",
        key="none",
        secret="none",
        config_kwargs={"retries": {"max_attempts": 1}},
    )
    fs.retries = 1
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda address: (fs, address[5:]))
    with pytest.raises(UserError, match=r"bucket/in.jsonl: cannot be read: .*127.0.0.1:1"):
        next(read_records("s3://bucket/in.jsonl"))


# Parts of several processes


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("out.jsonl", "out.part-00001-of-00004.jsonl"),
        ("s3://b/c.d/out.v1.jsonl", "s3://b/c.d/out.v1.part-00001-of-00004.jsonl"),
        ("a.b/out", "a.b/out.part-00001-of-00004"),
        ("/a/.hidden", "/a/.hidden.part-00001-of-00004"),
    ],
)
def test_part_addresses(address: str, expected: str) -> None:
    assert part_address(address, 1, 4) == expected
    assert len({part_address(address, index, 4) for index in range(4)}) == 4
    for index in (-1, 4):
        with pytest.raises(ValueError, match=rf"part {index} of 4"):
            part_address(address, index, 4)


def shared_run(folder: str, count: int, records: int = 10, bad_ones: bool = True) -> str:
    """An input, and the outputs of `count` processes; gives the address of what is to be merged."""
    lines = [json.dumps({"prompt": "a", "id": f"i{n}"}) for n in range(records)]
    if bad_ones:
        lines[3:3] = ["{", lines[0], "{"]
    put(f"{folder}/in.jsonl", "\n".join(lines))
    for index in range(count):
        with Store.open(part_address(f"{folder}/out.jsonl", index, count), RUN) as store:
            for record in read_records(f"{folder}/in.jsonl", share=(index, count)):
                store.write(record, {"process": index})
            store.finish()
    return f"{folder}/out.jsonl"


@pytest.mark.parametrize(
    ("place", "count"), [("local", 1), ("local", 3), ("local", 20), ("memory", 3), ("s3", 3)]
)
def test_merging(request: pytest.FixtureRequest, place: str, count: int) -> None:
    folder: str = request.getfixturevalue(place)
    address = shared_run(folder, count)
    for _ in range(2):  # the second time over the first
        merge(address, count, input=f"{folder}/in.jsonl")
        pieces = [get(part_address(address, index, count)) for index in range(count)]
        assert get(address) == b"".join(pieces)
    assert sorted(line["line"] for line in lines_of(address)) == list(range(1, 14))
    assert parts(address) == []
    # It is the run's own output.
    with Store.open(address, RUN) as store:
        assert all(store.is_done(record) for record in read_records(f"{folder}/in.jsonl"))
    with pytest.raises(UserError, match="holds another run's results"):
        Store.open(address, other_run(model="b"))


def second_result(address: str) -> str:
    part = part_address(address, 2, 3)
    put(part, get(part) + get(part_address(address, 0, 3)).split(b"\n")[0] + b"\n")
    return "{part}: line 5 is a second result of its record"


def torn(address: str) -> str:
    part = part_address(address, 2, 3)
    put(part, get(part)[:-3])
    return "{part}: line 4 is torn, or not JSON"


def torn_line_break(address: str) -> str:
    part = part_address(address, 2, 3)
    put(part, get(part)[:-1])
    return "{part}: line 4 is torn, or not JSON"


def no_result(address: str) -> str:
    part = part_address(address, 2, 3)
    put(part, get(part) + b'{"a": 1}\n')
    return "{part}: line 5 is not a result"


def no_part(address: str) -> str:
    fs, path = fsspec.core.url_to_fs(part_address(address, 2, 3))
    fs.rm(path)
    return "{part}: missing or not finished: run this part to its end"


def no_sidecar(address: str) -> str:
    fs, path = fsspec.core.url_to_fs(part_address(address, 2, 3))
    fs.rm(f"{path}.run.json")
    return "{part}: no run's results: no {part}.run.json"


def another_part(address: str) -> str:
    sidecar = f"{part_address(address, 2, 3)}.run.json"
    put(sidecar, get(sidecar).replace(b"tiny", b"huge"))
    first = part_address(address, 0, 3)
    return "{part}: another run than " + first + ': model is "huge", not "tiny"'


def another_sampler(address: str) -> str:
    for index, digest in enumerate("aab"):
        sidecar = f"{part_address(address, index, 3)}.run.json"
        put(sidecar, json.dumps({**json.loads(get(sidecar)), "samplers": {"own.toml": digest}}))
    return "{part}: another run than earlier parts: sampler 'own.toml' differs"


def missing_lines(address: str) -> str:
    part = part_address(address, 2, 3)
    put(part, get(part).split(b"\n")[0] + b"\n")
    return (
        "{input}: 3 of 13 records have no result in the 3 parts, the first one in line 6:"
        " run all parts to their end"
    )


def missing_bad_one(address: str) -> str:
    part = part_address(address, 0, 3)  # of lines 1, 4, ...
    lines = get(part).split(b"\n")
    put(part, b"\n".join([lines[0], *lines[2:]]))
    return (
        "{input}: 1 of 13 records have no result in the 3 parts, the first one in line 4:"
        " run all parts to their end"
    )


def another_input(address: str) -> str:
    source = address.replace("out", "in")
    put(source, get(source).replace(b'"i9"', b'"i9", "seed": 1'))
    return (
        "{input}: 1 of 13 records have no result in the 3 parts, the first one in line 13"
        " (id 'i9'): run all parts to their end"
    )


def shorter_input(address: str) -> str:
    source = address.replace("out", "in")
    put(source, get(source).rpartition(b"\n")[0])
    return (
        "{input}: 1 of 13 results in the 3 parts are of no record of it: is it the input that they"
        " were made from?"
    )


@pytest.mark.parametrize(
    "spoil",
    [
        second_result,
        torn,
        torn_line_break,
        no_result,
        no_part,
        no_sidecar,
        another_part,
        another_sampler,
        missing_lines,
        missing_bad_one,
        another_input,
        shorter_input,
    ],
)
def test_parts_that_cannot_be_merged(nearby: str, spoil: Callable[[str], str]) -> None:
    address = shared_run(nearby, 3)
    message = spoil(address)
    with pytest.raises(UserError) as error:
        merge(address, 3, input=f"{nearby}/in.jsonl")
    assert str(error.value) == message.format(
        part=part_address(address, 2, 3), input=f"{nearby}/in.jsonl"
    )
    assert not exists(address)
    assert not exists(f"{address}.run.json")


def test_a_part_that_is_not_joined(memory: str) -> None:
    address = shared_run(memory, 3)
    part = part_address(address, 1, 3)
    put(f"{part}.parts/000000.jsonl", b"")
    with pytest.raises(UserError) as error:
        merge(address, 3, input=f"{memory}/in.jsonl")
    assert str(error.value) == f"{part}: missing or not finished: run this part to its end"


def test_merging_onto_something_else(nearby: str) -> None:
    address = shared_run(nearby, 2)
    put(address, b'{"mine": 1}\n')
    with pytest.raises(UserError, match="holds something, but no run's results"):
        merge(address, 2, input=f"{nearby}/in.jsonl")
    assert get(address) == b'{"mine": 1}\n'
    other = f"{nearby}/other.jsonl"
    with Store.open(other, other_run(model="b")) as store:
        store.write(record(1), {})
        store.finish()
    for suffix in ("", ".run.json"):
        put(f"{address}{suffix}", get(f"{other}{suffix}"))
    with pytest.raises(UserError, match='model was "b" and is now "tiny"'):
        merge(address, 2, input=f"{nearby}/in.jsonl")
    assert get(address) == get(other)


def test_merging_that_fails_in_the_middle(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = shared_run(folder, 2)

    def refuse(source: Any, out: Any, *args: object) -> NoReturn:
        out.write(source.read(10))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", refuse)
        with pytest.raises(UserError, match="No space left on device"):
            merge(address, 2, input=f"{folder}/in.jsonl")
    assert not exists(address)
    merge(address, 2, input=f"{folder}/in.jsonl")
    assert len(lines_of(address)) == 13


def test_merging_mixed_parts(local: str) -> None:
    """What they were before is kept."""
    address = shared_run(local, 2)
    other = other_run(model="b")
    for index in range(2):
        Store.open(part_address(address, index, 2), other, mix=True).__exit__(None, None, None)
    merge(address, 2, input=f"{local}/in.jsonl")
    sidecar = json.loads(get(f"{address}.run.json"))
    assert (sidecar["identity"], sidecar["earlier"]) == (other, [RUN])


def test_merging_what_was_read_from_standard_input(local: str) -> None:
    with pytest.raises(UserError, match="standard input cannot be read again"):
        merge(f"{local}/out.jsonl", 2, input="-")


# Before anything heavy


def test_an_output_that_can_be_written(folder: str) -> None:
    put(f"{folder}/in.jsonl", b"")
    for address in (f"{folder}/out.jsonl", f"{folder}/in.jsonl"):
        check_output(address)
        check_output(address, input="-")
        check_output(address, input=f"{folder}/other.jsonl")
    check_output(f"{folder}/out.jsonl", input="memory://in.jsonl")
    fs, path = fsspec.core.url_to_fs(folder)
    fs.invalidate_cache()
    assert [name.rpartition("/")[2] for name in fs.find(path)] == ["in.jsonl"]


def test_an_output_that_cannot_be_written(folder: str, tmp_path: Path) -> None:
    put(f"{folder}/in.jsonl", b"{}\n")
    put(f"{folder}/folder.jsonl/a", b"") if "://" in folder else Path(
        folder, "folder.jsonl"
    ).mkdir()
    for address, options, message in (
        (f"{folder}/in.jsonl", {"input": f"{folder}/in.jsonl"}, "it is the input"),
        (f"{folder}/folder.jsonl", {}, "it is a folder"),
    ):
        with pytest.raises(UserError) as error:
            check_output(address, **options)
        assert str(error.value) == f"{address}: cannot be written: {message}"
    for address, message in (
        ("-", "the output cannot be standard output"),
        ("", "'': the output must be a file, not a folder"),
        (f"{folder}/new/", "new/': the output must be a file, not a folder"),
        (f"{folder}/out.jsonl.gz", "a compressed output cannot grow: choose a name in .jsonl"),
        (f"{folder}/out.zst", "a compressed output cannot grow: choose a name in .jsonl"),
        ("nonsense://out.jsonl", "ValueError: Protocol not known: nonsense"),
    ):
        with pytest.raises(UserError, match=message):
            check_output(address)
        with pytest.raises(UserError, match=message):
            Store.open(address, RUN)


def test_local_outputs_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("")
    Path("link").symlink_to("file")
    os.mkfifo("pipe")
    for address, message in (
        ("no/out.jsonl", "no/out.jsonl: cannot be written: no folder .*/no"),
        ("file/out.jsonl", "file/out.jsonl: cannot be written: no folder .*/file"),
        ("folder", "folder: cannot be written: it is a folder"),
        ("pipe", "pipe: cannot be written: not a regular file"),
        ("/dev/null", "/dev/null: cannot be written: not a regular file"),
        ("a\0b", r"'a\\x00b': not a file name"),
    ):
        for look in (check_output, lambda address: Store.open(address, RUN)):
            with pytest.raises(UserError, match=rf"^(.*/)?{message}$"):
                look(address)
    for same in ("file", "link", f"file://{tmp_path}/file", f"{tmp_path}/folder/../file"):
        with pytest.raises(UserError, match="it is the input"):
            check_output("file", input=same)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as it is to others than root
    with pytest.raises(UserError, match="out: cannot be written: no permission"):
        check_output("out")
    assert sorted(os.listdir()) == ["file", "folder", "link", "pipe"]


def test_no_bucket(s3: str) -> None:
    for look in (check_output, lambda address: Store.open(address, RUN)):
        with pytest.raises(UserError, match=r"cannot be (read|written): "):
            look("s3://no-bucket-of-this-name/out.jsonl")
    assert not fsspec.filesystem("s3").exists("no-bucket-of-this-name")
