"""The output of a batch. No result is lost or repeated, wherever a run ends and in any kind of
storage.
"""

import json
import os
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import fsspec
import pytest

from entropix_jax.batch import output as output_module
from entropix_jax.batch.output import Store, check_output
from entropix_jax.batch.records import BadRecord, Record
from entropix_jax.errors import UserError
from tests.support.disks import full_disk

RUN = {"model": "tiny", "sampler": {"name": "entropix", "seed": 0}, "input": "in.jsonl"}


def record(number: int) -> Record:
    return Record(line=number, id=f"r{number}", digest=f"{number:015x}", prompt="a")


def bad(number: int) -> BadRecord:
    return BadRecord(line=number, id=None, digest=f"{number:015x}", error="bad")


def result(number: int) -> dict[str, Any]:
    return {"text": f"caf\u00e9 \u2028\n{number}", "tokens": [number] * 3}


def run(address: str, numbers: range) -> int:
    """Runs once and writes the missing results. Returns their number."""
    written = 0
    with Store(address, RUN) as store:
        for number in numbers:
            if not store.is_done(record(number)):
                store.write(record(number), result(number))
                written += 1
            assert store.is_done(record(number))
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


def next_to(address: str, name: str) -> str:
    """Returns the address of another file in the folder of an output."""
    return address.removesuffix("out.jsonl") + name


def lines_of(address: str) -> list[dict[str, Any]]:
    """Returns the objects of an output, and checks that all lines are complete."""
    data = get(address)
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def numbers_in(address: str) -> list[int]:
    return [line["line"] for line in lines_of(address)]


@pytest.fixture
def memory() -> str:
    """The address of an empty folder in memory."""
    fs = fsspec.filesystem("memory")
    if fs.exists("/store"):
        fs.rm("/store", recursive=True)
    return "memory://store"


def address_in(*kinds: str) -> Any:
    """Returns a fixture: the address of an output in an empty folder of each of these kinds."""

    @pytest.fixture(params=kinds)
    def address(request: pytest.FixtureRequest) -> str:
        return f"{request.getfixturevalue(request.param)}/out.jsonl"

    return address


output = address_in("tmp_path", "memory", "s3")
remote = address_in("memory", "s3")  # storage without appends
nearby = address_in("tmp_path", "memory")  # S3 would only add time


# Format


def test_format_of_results(output: str) -> None:
    with Store(output, RUN) as store:
        store.write(record(7), {"id": "x", "text": "caf\u00e9\n", "half": "\ud800", "digest": 1})
        with pytest.raises(ValueError, match="not JSON compliant"):
            store.write(bad(2), {"logprob": float("nan")})
        assert not store.is_done(bad(2))
        store.write(bad(2), {"error": "bad"})
    first, second = lines_of(output)
    assert first.items() >= {"id": "r7", "line": 7, "digest": "000000000000007"}.items()
    assert (first["text"], first["half"]) == ("caf\u00e9\n", "\ud800")
    assert second == {"id": None, "line": 2, "digest": "000000000000002", "error": "bad"}
    assert "caf\u00e9".encode() in get(output)
    assert json.loads(get(f"{output}.run.json"))["identity"] == RUN


def test_a_restart_writes_missing_results(output: str) -> None:
    assert run(output, range(3)) == 3
    assert run(output, range(2, 6)) == 3
    before = get(output)
    assert run(output, range(6)) == 0
    assert get(output) == before
    assert run(output, range(8)) == 2  # a longer input
    assert numbers_in(output) == [*range(8)]
    with Store(output, RUN) as store:
        assert store.done == 8
    assert run(next_to(output, "empty"), range(0)) == 0
    assert get(next_to(output, "empty")) == b""


def test_identity_of_records(nearby: str) -> None:
    """The id identifies a record, or line and digest. Another record with the id is an error."""
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
        assert left == 0


# Interruptions


def test_torn_at_every_byte(tmp_path: Path) -> None:
    """The restart completes the output for any truncation within the last two lines."""
    path = tmp_path / "out.jsonl"
    run(str(path), range(4))
    whole = path.read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(ends[1], len(whole) + 1):
        path.write_bytes(whole[:size])
        assert run(str(path), range(4)) == sum(size < end for end in ends)
        assert path.read_bytes() == whole
    for tail in (b"\0" * 100, b"\0" * 100 + b"\n", b'{"id": "\xe9"}\n', b'{"a": 1\n', b"[" * 10**5):
        path.write_bytes(whole + tail)
        assert run(str(path), range(4)) == 0
        assert path.read_bytes() == whole
        path.write_bytes(tail.removesuffix(b"\n") + b"\n" + whole)
        with pytest.raises(UserError, match=f"^{path}: line 1 is not a result; "):
            run(str(path), range(4))
        assert path.read_bytes().endswith(whole)


def test_a_full_disk_leaves_no_partial_line(tmp_path: Path) -> None:
    """The disk is full within a line, which is removed again."""
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
def test_errors_of_file_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: OSError, told: str
) -> None:
    """Tests file systems without locks, over a quota, and full when the sidecar is written."""
    monkeypatch.setattr(name, Mock(side_effect=error))
    path = str(tmp_path / "out.jsonl")
    if not told:
        assert run(path, range(2)) == 2
        return
    with pytest.raises(UserError, match=told):
        run(path, range(1))
    assert name == "os.fsync" or os.listdir(tmp_path) == []


# Outputs of other runs


def test_outputs_of_another_run_are_rejected(tmp_path: Path) -> None:
    address = str(tmp_path / "out.jsonl")
    run(address, range(2))
    before = get(address), get(f"{address}.run.json")
    for changes, difference in (
        ({"model": "b", "input": "c"}, 'model was "tiny" and is now "b"'),
        ({"sampler": {"name": "entropix"}}, "sampler.seed was 0 and is now absent"),
        ({"model": "x" * 500}, f'model was "tiny" and is now "{"x" * 79};'),
        ({"sampler": {"name": "entropix", "seed": False}}, "sampler.seed was 0 and is now"),
    ):
        with pytest.raises(UserError) as error:
            Store(address, RUN | changes)
        assert str(error.value).startswith(f"{address}: holds another run's results: {difference}")
        assert (get(address), get(f"{address}.run.json")) == before
    assert run(address, range(3)) == 1  # nor is it locked


def test_an_empty_output_is_removed_after_an_error(nearby: str) -> None:

    def fail(*numbers: int) -> NoReturn:
        with Store(nearby, RUN) as store:
            for number in numbers:
                store.write(record(number), result(number))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not exists(nearby)
    assert not exists(f"{nearby}.run.json")
    for numbers in ((1,), ()):  # an output with results, now or before, is kept
        with pytest.raises(KeyError):
            fail(*numbers)
        assert exists(f"{nearby}.run.json")
    with Store(nearby, RUN) as store:
        assert store.done == 1


def test_an_output_without_its_sidecar(nearby: str) -> None:
    """Any run continues results. Other content is rejected and unchanged."""
    run(nearby, range(2))
    fs, path = fsspec.core.url_to_fs(nearby)
    with pytest.raises(UserError, match=f"remove {nearby}.run.json to add this run's results"):
        Store(nearby, RUN | {"model": "b"})
    fs.rm_file(f"{path}.run.json")
    with Store(nearby, RUN | {"model": "b"}) as store:
        assert store.done == 2
    for data in ('{"id": 1, "text": "mine"}\n[2]\n\n', "hello", '{"a": 0}\n{"a"'):
        address = next_to(nearby, "other")
        put(address, data)
        with pytest.raises(UserError, match=r"other: (line 1 is not a|holds no) result"):
            run(address, range(1))
        assert get(address) == data.encode()
        assert not exists(f"{address}.run.json")


# Object stores


def test_uploads(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads happen each minute, and on closing. A killed run loses results after the last
    upload."""
    clock = Mock(return_value=1000.0)
    monkeypatch.setattr(output_module, "time", Mock(monotonic=clock))
    seen = []
    store = Store(remote, RUN)
    for number in range(11):
        clock.return_value += 25.0
        store.write(record(number), result(number))
        seen.append(len(numbers_in(remote)) if exists(remote) else 0)
    assert seen == [0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9]
    del store  # killed
    assert run(remote, range(12)) == 3
    assert numbers_in(remote) == [*range(12)]


@pytest.mark.parametrize("error", [None, UserError("bad input"), KeyboardInterrupt()])
def test_a_failed_last_upload_is_reported(
    memory: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException | None,
) -> None:
    address = f"{memory}/out.jsonl"

    def write() -> None:
        with Store(address, RUN) as store:
            store.write(record(1), result(1))
            gone = Mock(side_effect=OSError("gone"))
            monkeypatch.setattr(output_module, "open_replacement", gone)
            if error is not None:
                raise error

    with pytest.raises((UserError, KeyboardInterrupt)) as raised:
        write()
    told = capsys.readouterr().err or str(raised.value)
    assert told.rstrip() == f"{address}: cannot be written: gone"
    assert error is None or raised.value is error


def test_two_concurrent_runs_in_a_store(remote: str) -> None:
    """Concurrent runs are detected only when both have written."""
    with Store(remote, RUN) as first:
        second = Store(remote, RUN)
        first.write(record(1), result(1))
        second.write(record(2), result(2))
    with pytest.raises(UserError, match=f"^{remote}: another run is writing to it$"):
        second.__exit__(None, None, None)
    assert run(remote, range(1, 3)) == 1
    assert numbers_in(remote) == [1, 2]


def test_two_writes_of_equal_size_within_a_second(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 has times in seconds, so only the checksum differs."""
    address = f"{s3}/out.jsonl"
    run(address, range(1))
    fs, path = fsspec.core.url_to_fs(address)
    monkeypatch.setattr(fs, "modified", Mock(return_value=fs.modified(path)))
    store = Store(address, RUN)
    put(address, get(address).replace(b"caf", b"tea"))
    store.write(record(1), result(1))
    with pytest.raises(UserError, match="another run is writing to it"):
        store.__exit__(None, None, None)


def test_an_upload_that_fails(remote: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "UPLOAD_SECONDS", 0.0)
    fs, _ = fsspec.core.url_to_fs(remote)
    with Store(remote, RUN) as store:
        store.write(record(0), result(0))
        with monkeypatch.context() as patch:
            patch.setattr(fs, "open", Mock(side_effect=ConnectionError("no route")))
            with pytest.raises(UserError) as error:
                store.write(record(1), result(1))
        assert str(error.value) == f"{remote}: cannot be written: no route"
        assert numbers_in(remote) == [0]
    assert numbers_in(remote) == [0, 1]  # closing retries the upload


# Checks before the model is loaded


def test_outputs_that_cannot_be_written(output: str) -> None:
    put(next_to(output, "in.jsonl"), b"{}\n")
    with fsspec.open(next_to(output, "folder.jsonl/a"), "wb", auto_mkdir=True):
        pass
    for address, message in (
        (next_to(output, "folder.jsonl"), "cannot be written: it is a folder"),
        ("-", "the output cannot be standard output"),
        ("", "'': the output must be a file, not a folder"),
        (next_to(output, "new/"), "new/': the output must be a file, not a folder"),
        (next_to(output, "out.zst"), "a compressed file cannot grow: choose a .jsonl file"),
        (next_to(output, "in.jsonl"), r"in\.jsonl: cannot be written: it is the input$"),
        ("nonsense://out.jsonl", "ValueError: Protocol not known: nonsense"),
    ):
        with pytest.raises(UserError, match=message):
            check_output(address, input=next_to(output, "in.jsonl"))
    assert not exists(output)


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
        ("pipe", "pipe: not a regular file"),
        ("/dev/null", "/dev/null: not a regular file"),
    ):
        with pytest.raises(UserError, match=rf"^(.*/)?{message}$"):
            Store(address, RUN)
    for same in ("file", "link", f"file://{tmp_path}/file", f"{tmp_path}/../{tmp_path.name}/file"):
        with pytest.raises(UserError, match="it is the input"):
            check_output("file", input=same)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for users other than root
    with pytest.raises(UserError, match="out: cannot be written: no permission"):
        check_output("out")
    assert sorted(os.listdir()) == ["file", "link", "pipe"]
