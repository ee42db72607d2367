"""The batch command: results of a file of prompts, errors, interrupts and several processes."""

import gzip
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest

from entropix_jax.batch.output import Store
from entropix_jax.batch.records import BadRecord, Record, read_records
from entropix_jax.batch.run import BatchRun, Defaults, file_name
from entropix_jax.batch.spread import SpreadRun
from entropix_jax.cli.options import EXIT_OK
from entropix_jax.errors import UserError
from entropix_jax.model.checkpoint import fingerprint
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.presets import load_sampler
from tests.support.commands import Result, refusal, run_command
from tests.support.disks import full_disk
from tests.support.model_folders import poisoned, write_model
from tests.support.runs import Spec, run_specs
from tests.support.traces import Json, read_trace
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
WORDS = ["Once", "upon", "a", "time", "Adam", "met", "Rita", "in", "Berlin", "and", "sang"]


class Place:
    """A folder in which batches run from in.jsonl to out.jsonl, with their own model."""

    def __init__(self, folder: Path, model: str, cache: dict[str, str]) -> None:
        self.path = folder
        self.output = folder / "out.jsonl"
        self._own = {"--input": folder / "in.jsonl", "--output": self.output, "--model": model}
        self._own |= {"--slots": 4, "--sampler": "greedy"}
        self._cache = {"PYTHONPATH": str(ROOT), **cache}

    def write(self, lines: Sequence[Json | str]) -> Path:
        """Writes the input."""
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path = self.path / "in.jsonl"
        path.write_text("".join(text + "\n" for text in texts))
        return path

    def options(self, *given: object) -> list[str]:
        """Returns the given options, and the defaults for all others."""
        own = {name: value for name, value in self._own.items() if name not in given}
        return [str(part) for part in (*itertools.chain(*own.items()), *given)]

    def run(self, *given: object) -> Result:
        return run_command("batch", *self.options(*given))

    def start(self, *given: object) -> subprocess.Popen[bytes]:
        """Starts a run in another process, which uploads its results several times a second."""
        code = """
import sys
from entropix_jax.__main__ import main
from entropix_jax.batch import output
output.UPLOAD_SECONDS = 0.2
sys.argv.insert(1, "batch")
sys.exit(main())
"""
        command = [sys.executable, "-c", code, *self.options(*given)]
        streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(command, env=os.environ | self._cache, **streams)

    def read(self, path: Path | None = None) -> dict[str, Json]:
        """Returns the results by id, without timings. Checks that each id occurs once."""
        lines = (path or self.output).read_text().splitlines()
        results = {result["id"]: result for result in map(json.loads, lines)}
        assert len(results) == len(lines)
        for result in results.values():
            timings = result.pop("timings", {"seconds": 0})
            assert 0 <= timings.get("first_token", 0) <= timings["seconds"]
        return results


def same(one: Any, other: Any) -> bool:
    """Compares results up to rounding, which depends on the forks of other rows."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-4, abs=1e-4)
    return bool(one == other)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache for compiled programs whose processes may be killed while they write to it."""
    folder = str(tmp_path_factory.mktemp("programs"))
    return {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_COMPILATION_CACHE_MAX_SIZE": "-1"}


@pytest.fixture
def place(tmp_path: Path, folder: str, own_cache: dict[str, str]) -> Place:
    return Place(tmp_path, folder, own_cache)


def records(number: int) -> list[Json]:
    """Returns prompts of several lengths, some with their own budget, seed or sampler."""
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


def test_each_record_equals_a_single_row(place: Place, model: LanguageModel) -> None:
    wanted = records(8)
    wanted[3]["id"], wanted[4]["id"] = "a/b", ".."
    place.write(wanted)
    traces = place.path / "traces"
    options = ("--sampler", "entropix", "--max-new-tokens", 12, "--trace-top", 2)
    result = place.run(*options, "--trace", traces)
    assert (result.status, result.out) == (EXIT_OK, "")
    found = place.read()
    assert found.keys() == {record["id"] for record in wanted}
    names = {f"{file_name(record['id'])}.jsonl" for record in wanted}
    assert {path.name for path in traces.iterdir()} == names
    for line, record in enumerate(wanted, 1):
        messages = record.get("messages") or [{"role": "user", "content": record["prompt"]}]
        request = Spec(
            model.tokenizer.apply_chat(messages), record["id"], record.get("max_new_tokens", 12)
        )
        sampler, seed = record.get("sampler", "entropix"), record.get("seed", 0)
        (row,) = run_specs(model, [request], sampler, seed=seed, turn_end=True).run()
        one = found[record["id"]]
        mean = sum(token.entropy for token in row.tokens) / len(row.tokens)
        assert one["mean_entropy"] == pytest.approx(mean, rel=1e-5)
        ids = [token.token_id for token in row.tokens]
        # Rounding depends on the shapes.
        told = {
            name: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            for name, value in row.to_json().items()
        }
        expected = {**told, "line": line, "token_ids": ids}
        assert {name: one[name] for name in expected} == expected
        header, *lines, footer = read_trace(traces / f"{file_name(record['id'])}.jsonl")
        tokens = [line for line in lines if line["type"] == "token"]
        assert header["type"] == "header"
        assert [token["token_id"] for token in tokens] == ids
        assert all(len(token["top"]) == 2 and token["row"] == 0 for token in tokens)
        assert footer["rows"][0]["text"] == one["text"]


def test_lookups_of_a_batch(place: Place) -> None:
    """A run with another table does not continue the output."""
    place.write([{"id": "a", "prompt": "Rita in Berlin"}, {"id": "b", "prompt": "Adam"}])
    table = place.path / "facts.csv"
    table.write_text("key,value\nBerlin,Rita sang.\n")
    settings = "--set", "sampler.thresholds.h2=1.0", "sampler.thresholds.h1=0.5"
    own = "--sampler", "lookup", "--lookup", table, "--max-new-tokens", 40
    result = place.run(*own, *settings)
    assert (result.status, result.out) == (EXIT_OK, "")
    found = place.read()
    assert "[Rita sang.]" in found["a"]["text"]
    assert found["a"]["lookups"] == found["b"]["lookups"] == 2
    assert "lookup" not in found["b"]["actions"]
    table.write_text("key,value\nBerlin,Adam sang.\n")
    assert "lookup" in refusal(place.run(*own, *settings))
    assert "facts.csv: no such file" in refusal(place.run("--lookup", "facts.csv"))


def test_names_of_files() -> None:
    ids = ["a", "A b", "a/b", "a%2Fb", "..", ".", ".a", "x" * 400, "x" * 401, "é", "\0", "a\nb"]
    names = [file_name(name) for name in ids]
    assert len(set(names)) == len(ids)
    assert names[:2] == ["a", "A b"]
    for name in names:
        assert not set(name) & set("/\\\0\n")
        assert not name.startswith(".")
        assert len(name.encode()) < 200


def test_runs_that_can_be_continued(place: Place) -> None:
    """A run continues with the same options and more input. Without a sidecar, any run does."""
    sampler = place.path / "own.toml"
    sampler.write_text('extends = "greedy"\n')
    own = {"prompt": "Once", "sampler": str(sampler)}
    lines = [{"id": "first", **own}, *records(6)]
    place.write(lines)
    options = ("--max-new-tokens", 5)
    assert place.run(*options).status == EXIT_OK
    first = place.output.read_bytes()
    sampler.write_text('extends = "greedy"\n[base]\ntemperature = 0.5\n')
    again = place.run(*options)
    assert (again.status, place.output.read_bytes()) == (EXIT_OK, first)
    assert "note: 7 records done already" in again.err
    place.write([lines[0], *records(9)])
    assert place.run(*options).status == EXIT_OK
    before = place.output.read_bytes()
    assert before.startswith(first)
    assert len(place.read()) == 10

    for option, value, what in (
        ("--max-new-tokens", 2, "max_new_tokens"),
        ("--seed", 1, "seed"),
        ("--sampler", "min-p", "sampler."),
        ("--dtype", "bfloat16", "precision"),
        ("--stop", "x", "stop"),
    ):
        told = f"error: {place.output}: holds another run's results: {what}"
        assert refusal(place.run(*options, option, value)).startswith(told)
    place.write([{"id": "r0", "prompt": "Twice"}])
    told = "line 1 (id 'r0') has a result of another record"
    assert told in refusal(place.run(*options))
    assert place.output.read_bytes() == before
    place.write([{"id": "last", **own}])
    Path(f"{place.output}.run.json").unlink()
    assert place.run(*options, "--seed", 1).status == EXIT_OK
    results = place.read()
    assert results["first"]["sampler_digest"] != results["last"]["sampler_digest"]


def test_fingerprint_of_a_model(tmp_path: Path) -> None:
    """The fingerprint depends on all files that are read."""
    found = {fingerprint(tmp_path)}
    for name in ("config.json", "chat_template.jinja", "tokenizer.model", "a.safetensors"):
        (tmp_path / name).write_text("some")
        found.add(fingerprint(tmp_path))
    assert len(found) == 5
    (tmp_path / "README.md").write_text("some")
    assert fingerprint(tmp_path) in found


BAD = [
    ('{"id": "torn', "not valid JSON"),
    ('{"id": "none"}', "prompt"),
    ('{"id": "r0", "prompt": "again"}', "came before"),
    ('{"id": "name", "prompt": "x", "sampler": "greedi"}', "no sampler preset 'greedi'"),
    ('{"id": "long", "prompt": "%s"}' % ("Berlin " * 200), "positions"),
    ('{"id": "sampler", "prompt": "x", "sampler": "{pipe}"}', ": not a regular file"),
]


def test_bad_records_are_results(place: Place, model: LanguageModel) -> None:
    good = [{"id": f"r{i}", "prompt": "Once"} for i in range(3)]
    pipe = place.path / "pipe.toml"
    os.mkfifo(pipe)
    bad = [text.replace("{pipe}", str(pipe)) for text, _ in BAD]
    source = place.write([good[0], *bad, *good[1:]])
    options = ("--max-new-tokens", 2, "--slots", 2)
    result = place.run(*options)
    assert result.status == EXIT_OK
    assert "9 records done (6 of them with an error)" in result.err
    before = place.output.read_bytes()
    lines = [json.loads(line) for line in before.splitlines()]
    errors = {line["line"]: line for line in lines if "error" in line}
    for number, (_, expected) in enumerate(BAD, 2):
        error = errors.pop(number)
        assert expected in error["error"]
        assert "\n" not in error["error"]
        assert error["finish_reason"] == "error"
    assert errors == {}
    assert {line["id"] for line in lines if "error" not in line} == {"r0", "r1", "r2"}
    # Errors count as done.
    assert place.run(*options).status == EXIT_OK
    assert place.output.read_bytes() == before
    # A strict run stops at an error, and keeps complete results.
    place.output.unlink()
    place.write([*good, bad[0]])
    assert refusal(place.run(*options, "--strict")).startswith(f"error: {source}: line 4: ")
    assert place.read()
    assert not any("error" in result for result in place.read().values())
    # A row may fail, too.
    end = model.tokenizer.encode("Once", add_bos=False)[-1]
    broken = write_model(place.path / "broken", poisoned(end))
    place.output.unlink()
    assert place.run(*options, "--model", broken).status == EXIT_OK
    error = place.read()["r0"]["error"]
    assert re.fullmatch(r"NaN or infinite logits at position \d+", error)


def test_a_truncated_input(place: Place) -> None:
    """The error is one line, and complete results are kept."""
    rng = random.Random(0)  # for notes that do not compress
    lines = [{"id": f"r{i}", "prompt": "Once", "note": rng.randbytes(900).hex()} for i in range(40)]
    data = gzip.compress(place.write(lines).read_bytes())
    source = "memory://broken.jsonl.gz"
    fsspec.filesystem("memory").pipe_file(source, data[: len(data) // 2])
    line = refusal(place.run("--input", source, "--max-new-tokens", 1))
    assert line.startswith(f"error: {source}: cannot be read: EOFError")
    assert 0 < len(place.read()) < 40
    assert not any("error" in result for result in place.read().values())


def test_a_full_disk_ends_a_batch(place: Place) -> None:
    """Each trace has a result, and the next run completes the rest."""
    place.write([{"id": name, "prompt": "Once"} for name in "ab"])
    other = place.path / "other.jsonl"
    assert place.run("--max-new-tokens", 3, "--output", other).status == EXIT_OK  # compiles
    options = ("--max-new-tokens", 3, "--trace", place.path / "traces")
    with full_disk(1500):
        assert refusal(place.run(*options)).endswith("cannot be written: File too large")
    assert place.run(*options).status == EXIT_OK
    assert same(place.read(), place.read(other))
    assert {path.name for path in (place.path / "traces").iterdir()} == {"a.jsonl", "b.jsonl"}
    for name in "ab":
        assert read_trace(place.path / "traces" / f"{name}.jsonl")[-1]["type"] == "footer"


MISTAKES: list[tuple[list[str], str]] = [
    (["--slots", "0"], "--slots must be at least 1, not 0"),
    (["--context", "999"], "--context 999: the model has 120 positions"),
    (["--trace-top", "2"], "--trace-top and --trace-layers need --trace DIR"),
    (["--cpus-per-actor", "1"], "--cpus-per-actor needs --ray"),
    (["--ray", "ray://host:1"], "--ray ray://host:1: must be HOST:PORT"),
    (["--ray", "127.0.0.1:9"], "--ray 127.0.0.1:9: no cluster answers: "),
    (["--input", "empty.jsonl"], "error: empty.jsonl: holds no records"),
    (["--mesh", "data=3"], "mesh 'data=3': 3 x 1 = 3 devices, but there are 2"),
    (["--slots", "3"], "mesh data=2,model=1: 3 slots cannot be split evenly over data=2"),
    (["--ray", "a..b:9"], "--ray a..b:9: no cluster answers: "),
    (["--input", "missing.jsonl"], "missing.jsonl"),
    (["--output", "no/such/folder/out.jsonl"], "no/such/folder"),
    (["--trace", "s3://b/traces"], "s3://b/traces: traces need a folder on this machine"),
    (["--trace", "."], "in.jsonl: give another folder"),
    (["--trace", ".", "--input", "-", "--output", "link.jsonl"], "link.jsonl: give another folder"),
    (["--trace", ".", "--input", "-", "--output", "elsewhere/link"], "link: give another folder"),
    (["--slots", "100000000"], "do not fit into a device: at least"),
    (["--chat", "--no-chat"], "give only one of --chat and --no-chat"),
]


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES)
def test_errors_of_batch(
    place: Place, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(place.path)
    place.write(records(1))
    Path("elsewhere").mkdir()
    Path("empty.jsonl").write_text("\n \n")
    Path("link.jsonl").symlink_to("elsewhere/data")
    Path("elsewhere/link").symlink_to("../data.jsonl")
    before = set(Path().rglob("*"))
    assert expected in refusal(place.run(*arguments))
    assert set(Path().rglob("*")) == before


# Ends


LONG = ("--ignore-eos", "--max-new-tokens", "60")


def test_signals_end_a_run_with_complete_results(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command continues. No other run can write to the output meanwhile."""
    place.write(records(40))
    write, written, signals = Store.write, 0, {3: signal.SIGINT, 15: signal.SIGTERM}

    def interrupt(*arguments: Any) -> None:
        nonlocal written
        write(*arguments)
        written += 1
        if written in signals:
            with pytest.raises(UserError, match="another run is writing to it"):
                Store(str(place.output), {})
            signal.raise_signal(signals[written])

    monkeypatch.setattr(Store, "write", interrupt)
    for status, fewest in ((130, 3), (143, 15)):
        result = place.run("--ignore-eos")
        assert (result.status, result.out) == (status, "")
        found = place.read()
        assert fewest <= len(found) < 40
        assert re.search(rf"^{len(found)} records done \| ", result.err, re.MULTILINE)
        assert result.err.endswith("interrupted: run the same command again to continue\n")
        assert all(one["finish_reason"] in ("length", "context") for one in found.values())


@pytest.mark.parametrize("where", ["local", "s3"])
def test_a_killed_run_continues(place: Place, where: str, request: pytest.FixtureRequest) -> None:
    """Reads and writes files or buckets. Each id occurs once, and results equal those of an
    uninterrupted run."""
    folder = place.path if where == "local" else request.getfixturevalue(where)
    output = f"{folder}/killed.jsonl"
    fs, path = fsspec.core.url_to_fs(output)

    def count() -> int:
        fs.invalidate_cache()
        return fs.cat_file(path).count(b"\n") if fs.exists(path) else 0

    source = place.write([*records(100), BAD[0][0]])
    if where != "local":
        fs.put_file(str(source), f"{folder}/in.jsonl")
    options = (*LONG, "--output", output, "--input", f"{folder}/in.jsonl")
    with place.start(*options) as process:
        end = time.monotonic() + PATIENCE
        while process.poll() is None and count() < 5:
            assert time.monotonic() < end
            time.sleep(0.02)
        process.kill()
    assert 0 < count() < 101
    for given in (options, LONG):
        assert place.run(*given).status == EXIT_OK
    fs.get_file(path, place.path / "theirs.jsonl")
    assert same(place.read(place.path / "theirs.jsonl"), place.read())


@pytest.mark.parametrize("what", ["waiting", "waiting on Ray", "refused", "done"])
def test_a_run_stops_between_records(model: LanguageModel, what: str) -> None:
    """A run stops while it waits for a record, and among many records that need no work."""
    own = Defaults(load_sampler("greedy"), max_new_tokens=9, chat=False, ignore_eos=True)
    run: BatchRun | SpreadRun = BatchRun(model, own, slots=2, capacity=64)
    run, looks = SpreadRun(Mock(run=lambda items, *_: [*items])) if "Ray" in what else run, 0
    reading, writing = os.pipe()
    signal.signal(signal.SIGALRM, lambda number, frame: run.stop())

    def source() -> Iterator[Record | BadRecord]:
        nonlocal looks
        if "waiting" in what:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            yield from read_records(f"/dev/fd/{reading}")
        for number in range(10_000):
            looks += 1
            if looks == 50:
                run.stop()
            record = Record(number, f"r{number}", str(number), prompt="Once upon a time")
            yield record if what == "done" else BadRecord(number, None, "", "bad")

    run.run(source(), lambda record, result: None, lambda record: what == "done")
    os.close(reading)
    os.close(writing)
    assert looks == (0 if "waiting" in what else 50)
