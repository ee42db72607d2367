"""The batch command: a file of prompts in, a file of results out, whatever happens on the way."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest

from entropix_jax.batch import output as output_module
from entropix_jax.batch.output import Store
from entropix_jax.batch.records import BadRecord, Record, read_records
from entropix_jax.batch.run import BatchRun, Defaults, file_name
from entropix_jax.cli import batch
from entropix_jax.cli.options import EXIT_OK, EXIT_USAGE
from entropix_jax.errors import UserError
from entropix_jax.model.checkpoint import fingerprint
from entropix_jax.model.loading import LanguageModel, load
from entropix_jax.sampler.presets import load_sampler
from tests.support.commands import Command, Result, Start, refusal, run_command
from tests.support.model_folders import poisoned, write_model
from tests.support.runs import Spec, run_specs
from tests.support.traces import Json
from tests.support.waiting import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
WORDS = ["Once", "upon", "a", "time", "Adam", "met", "Rita", "in", "Berlin", "and", "sang"]

pytestmark = pytest.mark.filterwarnings("ignore:.*never calibrated")


@pytest.fixture(scope="module")
def model(folder: str) -> LanguageModel:
    return load(folder)


@pytest.fixture
def command(folder: str) -> Command:
    """Runs the command in this process, by default with the test's model and four slots."""

    def run(*arguments: object, model: str | None = None, slots: int = 4) -> Result:
        return run_command(batch.main, *arguments, "--model", model or folder, "--slots", slots)

    return run


def records(number: int) -> list[Json]:
    """Prompts of several lengths, with budgets, seeds and samplers of their own here and there."""
    rng = random.Random(3)
    made = []
    for i in range(number):
        record: Json = {"id": f"r{i}", "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 9)))}
        if i % 3 == 0:
            record["max_new_tokens"] = rng.randint(1, 20)
        if i % 4 == 1:
            record["seed"] = i
        if i % 5 == 2:
            record["sampler"] = "greedy"
        if i % 7 == 3:
            record["messages"] = [{"role": "user", "content": record.pop("prompt")}]
        made.append(record)
    return made


def write_input(path: Path, lines: Sequence[Json | str]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts))
    return path


def read(path: Path) -> dict[str, Json]:
    """The results by id, each there once."""
    results = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {result["id"]: result for result in results}
    assert len(by_id) == len(results)
    return by_id


def without_timings(results: dict[str, Json]) -> dict[str, Json]:
    return {
        name: {k: v for k, v in result.items() if k != "timings"}
        for name, result in results.items()
    }


def test_each_record_is_its_row_alone(
    command: Command, model: LanguageModel, tmp_path: Path
) -> None:
    wanted = records(15)
    source = write_input(tmp_path / "in.jsonl", wanted)
    result = command("--input", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 12)
    assert (result.status, result.out) == (EXIT_OK, "")
    found = read(tmp_path / "out.jsonl")
    assert found.keys() == {record["id"] for record in wanted}
    for line, record in enumerate(wanted, 1):
        messages = record.get("messages") or [{"role": "user", "content": record["prompt"]}]
        prompt = model.tokenizer.apply_chat(messages)
        request = Spec(prompt, record["id"], record.get("max_new_tokens", 12))
        (row,) = run_specs(
            model,
            [request],
            record.get("sampler", "entropix"),
            seed=record.get("seed", 0),
            turn_end=True,
        ).run()
        one = found[record["id"]]
        assert one["line"] == line
        assert one["token_ids"] == [token.token_id for token in row.tokens]
        expected = row.to_json()
        assert {name: one[name] for name in expected} == expected
        mean = sum(token.entropy for token in row.tokens) / len(row.tokens)
        assert one["mean_entropy"] == pytest.approx(mean, rel=1e-5)
        assert 0 <= one["timings"]["first_token"] <= one["timings"]["seconds"]


def test_a_finished_run_is_not_run_again(command: Command, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", records(6))
    arguments = ("--output", tmp_path / "out.jsonl", "--max-new-tokens", 5, "--input", source)
    assert command(*arguments).status == EXIT_OK
    before = (tmp_path / "out.jsonl").read_bytes()
    again = command(*arguments)
    assert again.status == EXIT_OK
    assert "note: 6 records done already" in again.err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    # More records at the end of the input are taken up.
    write_input(source, records(9))
    assert command(*arguments).status == EXIT_OK
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    assert len(read(tmp_path / "out.jsonl")) == 9
    # Another record under a known id is refused.
    write_input(source, [{"id": "r0", "prompt": "Twice"}])
    assert "line 1 (id 'r0') has a result of another record" in refusal(command(*arguments))


def test_another_run_under_the_same_output(command: Command, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", records(2))
    output = tmp_path / "out.jsonl"
    run = ("--input", source, "--output", output)
    assert command(*run, "--max-new-tokens", 1).status == EXIT_OK
    before = output.read_bytes()
    for option, value, what in (
        ("--max-new-tokens", 2, "max_new_tokens"),
        ("--seed", 1, "seed"),
        ("--sampler", "greedy", "sampler."),
        ("--dtype", "bfloat16", "precision"),
        ("--stop", "x", "stop"),
    ):
        refused = command(*run, "--max-new-tokens", 1, option, value)
        assert refused.status == EXIT_USAGE
        last = refused.err.splitlines()[-1]
        assert last.startswith(f"error: {output}: holds another run's results: {what}")
        assert output.read_bytes() == before
    assert command(*run, "--seed", 1, "--mix").status == EXIT_OK


BAD = [
    ('{"id": "torn', "not valid JSON"),
    ('{"id": "none"}', "prompt"),
    ('{"id": "r0", "prompt": "again"}', "came before"),
    ('{"id": "type", "prompt": 7}', "prompt"),
    ('{"id": "name", "prompt": "x", "sampler": "greedi"}', "no sampler preset 'greedi'"),
    ('{"id": "count", "prompt": "x", "max_new_tokens": 0}', "max_new_tokens"),
    ('{"id": "long", "prompt": "%s"}' % ("Berlin " * 200), "positions"),
    ('{"id": "sampler", "prompt": "x", "sampler": "{pipe}"}', "cannot be read: not a regular file"),
]


def test_bad_records_are_results(command: Command, tmp_path: Path) -> None:
    good = [{"id": f"r{i}", "prompt": "Once"} for i in range(3)]
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    bad = [text.replace("{pipe}", str(pipe)) for text, _ in BAD]
    source = write_input(tmp_path / "in.jsonl", [good[0], *bad, *good[1:]])
    arguments = ("--input", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 2)
    result = command(*arguments)
    assert result.status == EXIT_OK
    assert f"{len(good) + len(BAD)} records done ({len(BAD)} of them with an error)" in result.err
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    errors = {line["line"]: line for line in lines if "error" in line}
    assert sorted(errors) == list(range(2, 2 + len(BAD)))
    for number, (_, expected) in enumerate(BAD, 2):
        assert expected in errors[number]["error"], errors[number]
        assert "\n" not in errors[number]["error"]
        assert errors[number]["finish_reason"] == "error"
    assert {line["id"] for line in lines if "error" not in line} == {"r0", "r1", "r2"}
    # They are done, too.
    before = (tmp_path / "out.jsonl").read_bytes()
    assert command(*arguments).status == EXIT_OK
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_strict_ends_at_the_first_bad_record(command: Command, tmp_path: Path) -> None:
    """What was complete by then stays."""
    source = write_input(tmp_path / "in.jsonl", [*records(3), BAD[0][0], {"prompt": "Once"}])
    result = command("--input", source, "--output", tmp_path / "out.jsonl", "--strict", slots=2)
    assert refusal(result).startswith(f"error: {source}: line 4: ")
    found = read(tmp_path / "out.jsonl")
    assert found
    assert not any("error" in one for one in found.values())


def test_a_row_that_fails_is_told(command: Command, model: LanguageModel, tmp_path: Path) -> None:
    end = model.tokenizer.encode("Once", add_bos=False)[-1]
    broken = str(write_model(tmp_path / "broken", poisoned(end)))
    source = write_input(tmp_path / "in.jsonl", [{"id": "a", "prompt": "Once"}])
    result = command("--input", source, "--output", tmp_path / "out.jsonl", model=broken)
    assert result.status == EXIT_OK
    error = read(tmp_path / "out.jsonl")["a"]["error"]
    assert re.fullmatch(r"NaN or infinite logits at position \d+", error)


def test_traces(command: Command, tmp_path: Path) -> None:
    source = write_input(
        tmp_path / "in.jsonl",
        [{"id": "a/b", "prompt": "Once"}, {"id": "..", "prompt": "upon"}, {"prompt": "a"}],
    )
    traces = tmp_path / "traces"
    result = command(
        *("--input", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 9),
        *("--trace", traces, "--trace-top", 2),
    )
    assert result.status == EXIT_OK
    found = read(tmp_path / "out.jsonl")
    assert sorted(path.name for path in traces.iterdir()) == sorted(
        f"{file_name(name)}.jsonl" for name in found
    )
    for name, one in found.items():
        header, *lines, footer = (
            json.loads(line)
            for line in (traces / f"{file_name(name)}.jsonl").read_text().splitlines()
        )
        tokens = [line for line in lines if line["type"] == "token"]
        assert header["type"] == "header"
        assert [token["token_id"] for token in tokens] == one["token_ids"]
        assert {token["row"] for token in tokens} == {0}
        assert all(len(token["top"]) == 2 for token in tokens)
        assert footer["rows"][0]["text"] == one["text"]


def test_names_of_files() -> None:
    ids = ["a", "A b", "a/b", "a%2Fb", "..", ".", ".a", "x" * 400, "x" * 401, "é", "\0", "a\nb"]
    names = [file_name(name) for name in ids]
    assert len(set(names)) == len(ids)
    assert names[:2] == ["a", "A b"]
    for name in names:
        assert not set(name) & set("/\\\0\n")
        assert not name.startswith(".")
        assert len(name.encode()) < 200


MISTAKES: list[tuple[list[str], str]] = [
    (["--slots", "0"], "--slots must be at least 1, not 0"),
    (["--context", "999"], "--context 999: the model has 120 positions"),
    (["--trace-top", "2"], "--trace-top and --trace-layers need --trace DIR"),
    (["--merge", "2"], "out.part-00000-of-00002.jsonl"),
    (["--process", "1"], "--coordinator, --processes and --process need --distributed"),
    (["--distributed", "--input", "-"], "each process reads all of --input"),
    (["--distributed"], "--distributed: the processes do not meet: "),
    (["--distributed", "--coordinator", "nonsense"], "nonsense: must be HOST:PORT"),
    (["--distributed", "--coordinator", "host:70000"], "the port from 1 to 65535"),
    (["--distributed", "--processes", "2", "--process", "2"], "under --processes 2, not 2"),
    (["--mesh", "data=3"], "mesh 'data=3': 3 x 1 = 3 devices, but there are 2"),
    (["--slots", "3"], "mesh data=2,model=1: 3 slots cannot be split evenly over data=2"),
    (["--input", "missing.jsonl"], "missing.jsonl"),
    (["--output", "no/such/folder/out.jsonl"], "no/such/folder"),
    (["--trace", "s3://b/traces"], "s3://b/traces: traces need a folder on this machine"),
    (["--trace", "."], "--trace .: in.jsonl lies there, whose name a record's trace could"),
    (["--trace", ".", "--input", "-", "--output", "link.jsonl"], "link.jsonl lies there"),
    (["--trace", ".", "--input", "-", "--output", "elsewhere/link"], "link lies there"),
    (["--slots", "100000000"], "do not fit into a device: at least"),
    (["--chat", "--no-chat"], "give only one of --chat and --no-chat"),
]


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES)
def test_mistakes(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_input(tmp_path / "in.jsonl", records(1))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.jsonl").symlink_to("elsewhere/data")
    (tmp_path / "elsewhere" / "link").symlink_to("../data.jsonl")
    before = set(tmp_path.rglob("*"))
    own = {"--input": "in.jsonl", "--output": "out.jsonl", "--model": folder}
    given = [part for name, value in own.items() if name not in arguments for part in (name, value)]
    assert expected in refusal(run_command(batch.main, *given, *arguments))
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "data", "more"),
    [
        ("in.csv", b"text,id\nOnce,a\n", []),
        ("in.jsonl.gz", gzip.compress(b"{}\n" * 99)[:-9], []),
        ("in.jsonl", b"{\n", ["--strict"]),
        ("in.jsonl", b'{"prompt": "Once"}\n', ["--trace", "in.jsonl/traces"]),
    ],
)
def test_a_run_that_is_refused_leaves_nothing(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    data: bytes,
    more: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(data)
    refusal(command("--input", name, "--output", "out.jsonl", *more))
    assert os.listdir() == [name]


def test_an_input_that_breaks_off(command: Command, tmp_path: Path) -> None:
    """It is told in one line, and what was complete by then stays."""
    rng = random.Random(0)  # for notes that no compression makes small
    lines = [{"id": f"r{i}", "prompt": "Once", "note": rng.randbytes(900).hex()} for i in range(40)]
    data = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
    source, output = "memory://broken.jsonl.gz", tmp_path / "out.jsonl"
    fsspec.filesystem("memory").pipe_file(source, data[: len(data) // 2])
    line = refusal(command("--input", source, "--output", output, "--max-new-tokens", 1))
    assert line.startswith(f"error: {source}: cannot be read: EOFError")
    assert 0 < len(read(output)) < 40
    assert not any("error" in result for result in read(output).values())


def test_a_sampler_s_file_that_has_changed(command: Command, tmp_path: Path) -> None:
    """Its new values are not mixed with the old ones."""
    own = tmp_path / "own.toml"
    own.write_text('extends = "greedy"\n')
    lines = [{"id": i, "prompt": "Once", "sampler": str(own)} for i in "ab"]
    source = write_input(tmp_path / "in.jsonl", lines[:1])
    output = tmp_path / "out.jsonl"
    arguments = ("--input", source, "--output", output, "--max-new-tokens", 1)
    assert command(*arguments).status == EXIT_OK
    before = output.read_bytes()
    own.write_text('extends = "greedy"\n[base]\ntemperature = 0.5\n')
    assert command(*arguments).status == EXIT_OK  # nothing is left to run
    write_input(source, lines)
    told = f"{output}: line 2 (id 'b'): sampler '{own}' is not what it was for earlier results"
    assert told in refusal(command(*arguments))
    assert output.read_bytes() == before
    assert command(*arguments, "--mix").status == EXIT_OK
    assert len({result["sampler_digest"] for result in read(output).values()}) == 2


def test_a_model_s_fingerprint(tmp_path: Path) -> None:
    """Whatever is read of its folder counts."""
    found = {fingerprint(tmp_path)}
    for name in ("config.json", "chat_template.jinja", "tokenizer.model", "a.safetensors"):
        (tmp_path / name).write_text("some")
        found.add(fingerprint(tmp_path))
    assert len(found) == 5
    (tmp_path / "README.md").write_text("some")
    assert fingerprint(tmp_path) in found


# Ends


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache for compiled programs whose processes may be killed while they write to it."""
    folder = str(tmp_path_factory.mktemp("programs"))
    return {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_COMPILATION_CACHE_MAX_SIZE": "-1"}


@pytest.fixture
def start(folder: str, tmp_path: Path, own_cache: dict[str, str]) -> Iterator[Start]:
    """Starts the command in a process of its own, in the test's folder."""
    running: list[subprocess.Popen[bytes]] = []

    def popen(*arguments: object, slots: int = 4) -> subprocess.Popen[bytes]:
        own = ["--output", "out.jsonl", "--model", folder, "--slots", slots]
        if "--input" not in arguments:
            own += ["--input", "in.jsonl"]
        command = [sys.executable, "-m", "entropix_jax.batch", *own, *arguments]
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **own_cache},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        running.append(process)
        return process

    yield popen
    for process in running:
        process.kill()
        process.communicate()


LONG = ("--ignore-eos", "--max-new-tokens", "60")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_a_signal_ends_the_run_with_what_is_complete(
    start: Start, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """Meanwhile no other run writes there."""
    write_input(tmp_path / "in.jsonl", records(2000))
    output = tmp_path / "out.jsonl"
    process = start(*LONG)
    wait_for(output, 3, process)
    with pytest.raises(UserError, match="another run is writing to it"):
        Store(str(output), {})
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert out == b""
    assert b"Traceback" not in err
    found = read(output)
    assert f"\n{len(found)} records done | ".encode() in err
    assert err.endswith(b"interrupted: run the same command again to continue\n")
    assert 3 <= len(found) < 2000
    assert all(result["finish_reason"] in ("length", "context") for result in found.values())


def test_a_run_that_is_killed_goes_on(start: Start, tmp_path: Path) -> None:
    """Each id once, and each result as if nothing had happened, to the last digit."""
    write_input(tmp_path / "in.jsonl", records(60))
    output = tmp_path / "out.jsonl"
    rng = random.Random(1)
    done = 0
    for _ in range(3):
        process = start(*LONG)
        wait_for(output, done + rng.randint(1, 12), process)
        time.sleep(rng.random() / 10)
        process.kill()
        process.communicate()
        done = output.read_bytes().count(b"\n")
    assert 0 < done < 60
    process = start(*LONG)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    resumed = without_timings(read(output))
    output.unlink()
    (tmp_path / "out.jsonl.run.json").unlink()
    process = start(*LONG)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert resumed == without_timings(read(output))


@pytest.mark.parametrize("what", ["waiting", "refused", "done"])
def test_a_run_stops_between_records(model: LanguageModel, what: str) -> None:
    """As it waits for one that does not come, and among many that run nothing."""
    own = Defaults(load_sampler("greedy"), max_new_tokens=9, chat=False, ignore_eos=True)
    run, looks, left = BatchRun(model, own, slots=2, capacity=64), 0, 0
    reading, writing = os.pipe()
    signal.signal(signal.SIGALRM, lambda number, frame: run.stop())

    def looked() -> None:
        nonlocal looks
        looks += 1
        if looks == 50:
            run.stop()

    def source() -> Iterator[Record | BadRecord]:
        if what == "waiting":
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            yield from read_records(f"/dev/fd/{reading}")
        for number in range(10_000):
            record = Record(number, f"r{number}", str(number), prompt="Once upon a time")
            yield record if what == "done" else BadRecord(number, None, "", "bad")

    def is_done(record: Record | BadRecord) -> bool:
        nonlocal left
        left += 1
        return what == "done"

    run.run(source(), lambda record, result: None, is_done, looked)
    os.close(reading)
    os.close(writing)
    assert left < 50
    assert looks < 60


# Buckets


def test_from_a_bucket_to_a_bucket(
    command: Command, s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ended on the way, and gone on with: the same results as from a file to a file."""
    source = write_input(tmp_path / "in.jsonl", [*records(20), BAD[0][0]])
    files = fsspec.filesystem("s3")
    files.put_file(source, f"{s3}/in.jsonl")
    monkeypatch.setattr(output_module, "PART_RECORDS", 4)
    write, written = Store.write, 0

    def ended_after_nine(*arguments: Any) -> None:
        nonlocal written
        write(*arguments)
        written += 1
        if written == 9:
            signal.raise_signal(signal.SIGTERM)

    run = ("--input", f"{s3}/in.jsonl", "--output", f"{s3}/out.jsonl", "--max-new-tokens", 12)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", ended_after_nine)
        assert command(*run).status == 143
    files.invalidate_cache()
    assert not files.exists(f"{s3}/out.jsonl")
    assert len(files.ls(f"{s3}/out.jsonl.parts")) == 3
    assert "note: 9 records done already" in command(*run).err
    files.invalidate_cache()
    assert not files.exists(f"{s3}/out.jsonl.parts")
    files.get_file(f"{s3}/out.jsonl", tmp_path / "theirs.jsonl")
    alone = tmp_path / "out.jsonl"
    assert command("--input", source, "--output", alone, *run[4:]).status == EXIT_OK
    results = without_timings(read(tmp_path / "theirs.jsonl"))
    assert len(results) == 21
    assert results == without_timings(read(alone))


# Several hosts


def meeting() -> tuple[str, ...]:
    """Options of two processes that meet on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return "--distributed", "--coordinator", address, "--processes", "2"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_wait_for_others_ends_at_once(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    """And leaves nobody behind."""
    write_input(tmp_path / "in.jsonl", records(1))
    process = start(*meeting(), "--process", 0)
    end = time.monotonic() + PATIENCE
    tasks = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (children := tasks.read_text().split()):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    status = process.wait(10)
    assert status == (128 + number if number != signal.SIGKILL else -number)
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_two_processes_do_what_one_does(command: Command, start: Start, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", [*records(9), BAD[0][0]])
    shared = ("--input", source, "--max-new-tokens", 8, *meeting())
    processes = [start(*shared, "--process", i) for i in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
    parts = sorted(tmp_path.glob("out.part-*.jsonl"))
    assert [path.read_bytes().count(b"\n") for path in parts] == [5, 5]
    output = tmp_path / "out.jsonl"
    assert not output.exists()
    joined = command("--input", source, "--output", output, "--merge", 2)
    assert joined == Result(EXIT_OK, "", f"{output}: 10 records of 2 parts joined\n")
    alone = tmp_path / "alone.jsonl"
    assert command("--input", source, "--output", alone, "--max-new-tokens", 8).status == EXIT_OK
    assert without_timings(read(output)) == without_timings(read(alone))
    # Told its number and how many there are, a process meets nobody and runs alone.
    place = ("--distributed", "--processes", 2, "--process", 1)
    again = command("--input", source, "--output", output, "--max-new-tokens", 8, *place)
    assert "note: 5 records done already" in again.err
    # A part that lacks a result is not joined.
    parts[1].write_bytes(b"".join(parts[1].read_bytes().splitlines(keepends=True)[:-1]))
    output.unlink()
    torn = command("--input", source, "--output", output, "--merge", 2)
    assert "1 of 10 records" in refusal(torn)
    assert not output.exists()


def test_the_script_for_a_tpu_vm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gcloud that says what it was asked for: one command, and no other."""
    fake = tmp_path / "gcloud"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        script = ROOT / "scripts" / "tpu_vm_batch.sh"
        return subprocess.run([script, *arguments], capture_output=True, text=True, check=False)

    own = ["--input", "gs://b/in.jsonl", "--output", "gs://b/o.jsonl", "--stop", "it's; rm -rf"]
    asked = run("pod", "us-central1-a", *own)
    assert asked.returncode == 0, asked.stderr
    *words, command = asked.stdout.splitlines()
    assert (
        words == "compute tpus tpu-vm ssh pod --zone us-central1-a --worker=all --command".split()
    )
    start = "cd entropix_jax && .venv/bin/python -m entropix_jax.batch --distributed".split()
    assert shlex.split(command) == [*start, *own]
    for given, wanted in {"~/x y": "x y", "/opt/x": "/opt/x"}.items():
        monkeypatch.setenv("ENTROPIX_DIR", given)
        assert shlex.split(run("pod", "z").stdout.splitlines()[-1])[1] == wanted
    usage = run("pod")
    assert usage.returncode == 2
    assert "scripts/tpu_vm_batch.sh NAME ZONE --input" in usage.stderr
