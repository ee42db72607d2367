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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest

from entropix_jax import batch, distributed
from entropix_jax.batches import run as run_module
from entropix_jax.batches import sinks
from entropix_jax.batches.run import BatchRun, Defaults, count_records, file_name
from entropix_jax.batches.source import BadRecord, Record
from entropix_jax.batches.store import Store
from entropix_jax.checkpoint import fingerprint
from entropix_jax.commandline import EXIT_OK, EXIT_USAGE
from entropix_jax.errors import UserError
from entropix_jax.generation import Generation
from entropix_jax.loading import LanguageModel, load
from entropix_jax.results import Request
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from tests.buckets import s3_folder, s3_server  # noqa: F401 (fixtures)
from tests.folders import poisoned, write_model
from tests.patience import PATIENCE, wait_for
from tests.test_main import Json, Result

ROOT = Path(__file__).parents[1]
WORDS = ["Once", "upon", "a", "time", "Adam", "met", "Rita", "in", "Berlin", "and", "sang"]

pytestmark = pytest.mark.filterwarnings("ignore:.*never calibrated")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def model(folder: str) -> LanguageModel:
    return load(folder)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], folder: str) -> Callable[..., Result]:
    """Runs the command in this process, by default with the test's model and four slots."""

    def run(*arguments: object, model: str | None = None, slots: int = 4) -> Result:
        capsys.readouterr()
        own = ["--model", model or folder, "--slots", slots]
        status = batch.main([str(a) for a in (*arguments, *own)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Result(status, captured.out, captured.err)

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
    command: Callable[..., Result], folder: str, tmp_path: Path
) -> None:
    wanted = records(15)
    source = write_input(tmp_path / "in.jsonl", wanted)
    result = command("--input", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 12)
    assert (result.status, result.out) == (EXIT_OK, "")
    found = read(tmp_path / "out.jsonl")
    assert found.keys() == {record["id"] for record in wanted}
    model = load(folder)
    for line, record in enumerate(wanted, 1):
        if "messages" in record:
            prompt = model.tokenizer.apply_chat(record["messages"])
        else:
            prompt = model.tokenizer.apply_chat([{"role": "user", "content": record["prompt"]}])
        request = Request(prompt, record["id"], record.get("max_new_tokens", 12))
        (row,) = Generation(
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


def test_real_prompts(command: Callable[..., Result], shared_data: Path, tmp_path: Path) -> None:
    """Through 32 slots and one by one: the same tokens, from a byte to thousands."""
    results = []
    for slots in (32, 1):
        output = tmp_path / f"{slots}.jsonl"
        mesh = ("--mesh", "data=1,model=2") if slots == 1 else ()
        status = command(
            *("--input", shared_data / "prompts.csv", "--output", output, "--context", 4096),
            *("--max-new-tokens", 60, "--ignore-eos", *mesh),
            model=str(ROOT / "weights" / "tiny"),
            slots=slots,
        ).status
        assert status == EXIT_OK
        results.append(read(output))
    together, alone = results
    assert len(together) == len(alone) > 100
    for name, result in together.items():
        assert result.get("token_ids") == alone[name].get("token_ids"), name


@pytest.mark.parametrize("mesh", ["data=2", "model=2"])
def test_one_prompt_many_times_on_two_devices(
    command: Callable[..., Result], tmp_path: Path, mesh: str
) -> None:
    """It is cached once, and shared from where it lies."""
    tiny = ROOT / "weights" / "tiny"
    same = [{"id": f"r{i}", "prompt": "Guests:", "seed": i} for i in range(6)]
    source, output = write_input(tmp_path / "in.jsonl", same), tmp_path / "out.jsonl"
    run = ("--input", source, "--output", output, "--mesh", mesh, "--max-new-tokens", 12)
    result = command(*run, model=str(tiny))
    assert result.status == EXIT_OK, result.err
    model = load(str(tiny))
    prompt = model.tokenizer.encode("Guests:", add_bos=True)
    found = {name: one["token_ids"] for name, one in read(output).items()}
    for i in range(6):
        (row,) = Generation(model, [Request(prompt, f"r{i}", 12)], seed=i).run()
        assert found[f"r{i}"] == [token.token_id for token in row.tokens]
    assert len({tuple(ids) for ids in found.values()}) > 1


def test_a_finished_run_is_not_run_again(command: Callable[..., Result], tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", records(6))
    arguments = ("--input", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 5)
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


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (["--seed", "1"], "seed"),
        (["--max-new-tokens", "6"], "max_new_tokens"),
        (["--sampler", "greedy"], "sampler"),
        (["--set", "sampler.base.temperature=0.9"], "base.temperature"),
        (["--dtype", "bfloat16"], "precision"),
        (["--stop", "x"], "stop"),
    ],
)
def test_another_run_under_the_same_output(
    command: Callable[..., Result], tmp_path: Path, changes: list[str], what: str
) -> None:
    source = write_input(tmp_path / "in.jsonl", records(2))
    output = tmp_path / "out.jsonl"
    own = ["--max-new-tokens", "1"] if changes[0] != "--max-new-tokens" else []
    assert command("--input", source, "--output", output, *own).status == EXIT_OK
    before = output.read_bytes()
    refused = command("--input", source, "--output", output, *own, *changes)
    assert refused.status == EXIT_USAGE
    last = refused.err.splitlines()[-1]
    assert what in last
    assert str(output) in last
    assert output.read_bytes() == before
    mixed = command("--input", source, "--output", output, *own, *changes, "--mix")
    assert mixed.status == EXIT_OK


def test_another_record_under_the_same_id(command: Callable[..., Result], tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", [{"id": "a", "prompt": "Once"}])
    arguments = ("--input", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 1)
    assert command(*arguments).status == EXIT_OK
    write_input(source, [{"id": "a", "prompt": "Twice"}])
    refused = command(*arguments)
    assert refused.status == EXIT_USAGE
    assert "line 1 (id 'a') has a result of another record" in refused.err


BAD = [
    ('{"id": "torn', "not valid JSON"),
    ('{"id": "none"}', "prompt"),
    ('{"id": "r0", "prompt": "again"}', "came before"),
    ('{"id": "type", "prompt": 7}', "prompt"),
    ('{"id": "name", "prompt": "x", "sampler": "greedi"}', "no sampler preset 'greedi'"),
    ('{"id": "count", "prompt": "x", "max_new_tokens": 0}', "max_new_tokens"),
    ('{"id": "long", "prompt": "%s"}' % ("Berlin " * 200), "positions"),
    ('{"id": "typo", "prompt": "x", "seeed": 4}', "seed"),
]


def test_bad_records_are_results(command: Callable[..., Result], tmp_path: Path) -> None:
    good = [{"id": f"r{i}", "prompt": "Once"} for i in range(3)]
    source = write_input(tmp_path / "in.jsonl", [good[0], *(text for text, _ in BAD), *good[1:]])
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


def test_strict_ends_at_the_first_bad_record(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    """What was complete by then stays."""
    source = write_input(tmp_path / "in.jsonl", [*records(3), BAD[0][0], {"prompt": "Once"}])
    result = command("--input", source, "--output", tmp_path / "out.jsonl", "--strict", slots=2)
    assert result.status == EXIT_USAGE
    assert result.err.splitlines()[-1].startswith(f"error: {source}: line 4: ")
    found = read(tmp_path / "out.jsonl")
    assert found
    assert not any("error" in one for one in found.values())


def test_a_row_that_fails_is_told(
    command: Callable[..., Result],
    folder: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    end = load(folder).tokenizer.encode("Once", add_bos=False)[-1]
    broken = str(write_model(tmp_path_factory.mktemp("broken"), poisoned(end)))
    source = write_input(tmp_path / "in.jsonl", [{"id": "a", "prompt": "Once"}])
    result = command("--input", source, "--output", tmp_path / "out.jsonl", model=broken)
    assert result.status == EXIT_OK
    error = read(tmp_path / "out.jsonl")["a"]["error"]
    assert re.fullmatch(r"NaN or infinite logits at position \d+", error)


def test_csv(command: Callable[..., Result], tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text('act,prompt\nteller,"Once\nupon"\nsinger,a time\n')
    result = command("--input", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 2)
    assert result.status == EXIT_OK
    assert [r["line"] for r in sorted(read(tmp_path / "out.jsonl").values(), key=str)] == [2, 4]


def test_traces(command: Callable[..., Result], tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--slots", "0"], "--slots must be at least 1, not 0"),
        (["--context", "1"], "--context must be at least 2, not 1"),
        (["--context", "999"], "--context 999: the model has 120 positions"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, not 0"),
        (["--chat", "--no-chat"], "give only one of --chat and --no-chat"),
        (["--stop", ""], "--stop: an empty text ends nothing"),
        (["--trace-top", "2"], "--trace-top and --trace-layers need --trace DIR"),
        (["--merge", "0"], "--merge must be at least 1, not 0"),
        (["--merge", "2"], "out.part-00000-of-00002.jsonl"),
        (["--process", "1"], "--coordinator, --processes and --process need --distributed"),
        (["--distributed", "--input", "-"], "each process reads all of --input"),
        (["--distributed"], "--distributed: the processes do not meet: "),
        (
            ["--distributed", "--coordinator", "nonsense"],
            "--coordinator nonsense: must be HOST:PORT",
        ),
        (["--distributed", "--coordinator", "host:0"], "the port from 1 to 65535"),
        (["--distributed", "--coordinator", "host:70000"], "the port from 1 to 65535"),
        (["--distributed", "--processes", "0"], "--processes must be at least 1, not 0"),
        (
            ["--distributed", "--processes", "2", "--process", "2"],
            "--process must be at least 0 and under --processes 2, not 2",
        ),
        (["--mesh", "data=3"], "mesh 'data=3': 3 x 1 = 3 devices, but there are 2"),
        (["--mesh", "rows=2"], "rows"),
        (["--slots", "3"], "mesh data=2,model=1: 3 slots cannot be split evenly over data=2"),
        (["--sampler", "greedi"], "no sampler preset 'greedi'"),
        (["--input", "missing.jsonl"], "missing.jsonl"),
        (["--output", "no/such/folder/out.jsonl"], "no/such/folder"),
        (["--slots", "1" + 20 * "0"], "--slots must be at most 2147483647, not 1000000"),
        (
            ["--trace", "s3://b/traces"],
            "--trace s3://b/traces: traces need a folder on this machine",
        ),
        (["--trace", "."], "--trace .: in.jsonl lies there, whose name a record's trace could"),
        (
            ["--trace", "../{name}", "--input", "-"],
            "--trace ../{name}: out.jsonl lies there, whose name a record's trace could have",
        ),
        (["--trace", ".", "--input", "-", "--output", "file://{folder}/out.jsonl"], "lies there"),
        (["--trace", ".", "--input", "-", "--output", "~/1.jsonl"], "~/1.jsonl lies there"),
        (["--trace", ".", "--input", "-", "--output", "link.jsonl"], "link.jsonl lies there"),
        (["--trace", ".", "--input", "-", "--output", "elsewhere/link"], "link lies there"),
        (["--no-chat", "--system", "x"], "a system message needs a chat"),
        (["--trace", "traces", "--context", "999"], "--context 999"),
        (["--slots", "100000000"], "do not fit into a device: weights"),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str],
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = {"{name}": tmp_path.name, "{folder}": str(tmp_path)}
    for name, value in names.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    if (output := arguments[-1]).endswith(("link", "link.jsonl")):
        (tmp_path / "elsewhere").mkdir()
        leads_to = "elsewhere/data" if output == "link.jsonl" else "../data.jsonl"
        (tmp_path / output).symlink_to(leads_to)
    before = {path.name for path in tmp_path.iterdir()} | {"in.jsonl"}
    expected = expected.replace("{name}", tmp_path.name)
    own = {"--input": "in.jsonl", "--output": "out.jsonl", "--model": folder}
    write_input(tmp_path / "in.jsonl", records(1))
    given = [part for name, value in own.items() if name not in arguments for part in (name, value)]
    assert batch.main([*given, *arguments]) == EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert expected in last
    assert "Traceback" not in captured.err
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_chat_without_a_template(command: Callable[..., Result], tmp_path: Path) -> None:
    """Told once, before anything runs, and not for each record."""
    plain = write_model(tmp_path / "plain")
    config = json.loads((plain / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (plain / "tokenizer_config.json").write_text(json.dumps(config))
    source = write_input(tmp_path / "in.jsonl", records(1))
    own = ("--input", source, "--output", tmp_path / "out.jsonl", "--chat")
    refused = command(*own, model=str(plain))
    assert refused.status == EXIT_USAGE
    assert "chat template" in refused.err.splitlines()[-1]
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("what", ["header", "compressed", "strict", "traces"])
def test_a_run_that_is_refused_leaves_nothing(
    command: Callable[..., Result], tmp_path: Path, what: str
) -> None:
    source, more = tmp_path / "in.jsonl", []
    write_input(source, [BAD[0][0], *records(1)])
    if what == "header":
        source = tmp_path / "in.csv"
        source.write_text("promt,id\nOnce,a\n")
    elif what == "compressed":
        source = tmp_path / "in.jsonl.gz"
        source.write_bytes(gzip.compress(b"{}\n" * 99)[:-9])
    elif what == "strict":
        more = ["--strict"]
    else:
        (tmp_path / "file").write_text("")
        more = ["--trace", str(tmp_path / "file" / "traces")]
    before = set(tmp_path.iterdir())
    refused = command("--input", source, "--output", tmp_path / "out.jsonl", *more)
    assert refused.status == EXIT_USAGE
    assert refused.err.splitlines()[-1].startswith("error: ")
    assert set(tmp_path.iterdir()) == before


def test_a_sampler_s_file_that_has_changed(command: Callable[..., Result], tmp_path: Path) -> None:
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
    refused = command(*arguments)
    assert refused.status == EXIT_USAGE
    told = f"{output}: line 2 (id 'b'): sampler '{own}' is not what it was for earlier results"
    assert told in refused.err
    assert output.read_bytes() == before
    assert command(*arguments, "--mix").status == EXIT_OK
    assert len({result["sampler_digest"] for result in read(output).values()}) == 2


def test_a_model_s_fingerprint(tmp_path: Path) -> None:
    """Whatever is read of its folder counts."""
    found = set()
    for name in ("", "config.json", "chat_template.jinja", "tokenizer.model", "a.safetensors"):
        if name:
            (tmp_path / name).write_text("some")
        found.add(fingerprint(tmp_path))
    assert len(found) == 5
    (tmp_path / "README.md").write_text("some")
    assert fingerprint(tmp_path) in found


def test_a_pipe_is_no_sampler(model: LanguageModel, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    errors: list[str] = []
    one = Record(1, "a", 1, prompt="Once", sampler=str(pipe))
    batch_run(model).run([one], lambda record, result: errors.append(result["error"]))
    assert errors == [f"{pipe}: cannot be read: not a regular file"]


def test_samplers_are_kept_at_hand_but_not_all_of_them(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_SAMPLERS", 3)
    loaded: list[str] = []

    def counted(name: str) -> Sampler:
        loaded.append(name)
        return load_sampler(name)

    monkeypatch.setattr(run_module, "load_sampler", counted)
    run = batch_run(model)
    names = ["greedy", "top-p", "greedy", "mirostat", "entropix", "top-p", "entropix"]
    source = [Record(i, f"r{i}", i, prompt="a", sampler=name) for i, name in enumerate(names)]
    run.run(source, lambda record, result: None)
    assert loaded == ["greedy", "top-p", "mirostat", "entropix", "top-p"]


def test_count_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_input(tmp_path / "in.jsonl", [*records(5), "", BAD[0][0]])
    assert count_records(str(source)) == count_records(f"file://{source}") == 6
    assert count_records("s3://bucket/key.jsonl") is None
    monkeypatch.chdir(write_input(tmp_path / "-", records(2)).parent)
    assert count_records("-") is None  # standard input, whatever files there are
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert count_records(str(pipe)) is None  # or else a run would find it empty


def test_from_a_pipe(command: Callable[..., Result], tmp_path: Path) -> None:
    pipe, source = tmp_path / "pipe", write_input(tmp_path / "in.jsonl", records(3))
    os.mkfifo(pipe)
    with subprocess.Popen(["cp", source, pipe]):
        status = command("--input", pipe, "--output", tmp_path / "out.jsonl").status
    assert status == EXIT_OK
    assert len(read(tmp_path / "out.jsonl")) == 3


# Slow inputs, and times


def batch_run(model: LanguageModel, slots: int = 2) -> BatchRun:
    own = Defaults(load_sampler("greedy"), max_new_tokens=9, chat=False, ignore_eos=True)
    return BatchRun(model, own, slots=slots, capacity=64)


def good(number: int) -> Record:
    return Record(number, f"r{number}", number, prompt="Once upon a time")


@pytest.mark.parametrize("what", ["refused", "done"])
def test_a_run_stops_among_records_that_run_nothing(model: LanguageModel, what: str) -> None:
    """And looks on while it goes through them."""
    run, looks, left = batch_run(model), 0, 0

    def looked() -> None:
        nonlocal looks
        looks += 1
        if looks == 50:
            run.stop()

    def source() -> Iterator[Record | BadRecord]:
        for number in range(10_000):
            yield good(number) if what == "done" else BadRecord(number, None, 0, "bad")

    def is_done(record: Record | BadRecord) -> bool:
        nonlocal left
        left += 1
        return what == "done"

    run.run(source(), lambda record, result: None, is_done, looked)
    assert left < 50 <= looks < 60


def test_rows_go_on_while_the_next_record_does_not_come(model: LanguageModel) -> None:
    """Each record comes once the one before it has its result, and not sooner."""
    results: dict[str | None, Mapping[str, Any]] = {}
    arrived = threading.Semaphore(1)

    def source() -> Iterator[Record]:
        for number in range(3):
            assert arrived.acquire(timeout=PATIENCE)
            yield good(number)

    def write(record: Record | BadRecord, result: Mapping[str, Any]) -> None:
        results[record.id] = result
        arrived.release()

    batch_run(model).run(source(), write)
    assert [(name, result["tokens"]) for name, result in results.items()] == [
        (f"r{number}", 9) for number in range(3)
    ]


def test_an_input_that_breaks_off_is_told(model: LanguageModel) -> None:
    results: list[str | None] = []

    def source() -> Iterator[Record]:
        yield good(0)
        raise UserError("broken off")

    with pytest.raises(UserError, match="broken off"):
        batch_run(model).run(source(), lambda record, result: results.append(record.id))


def test_a_row_s_time_begins_with_its_slot(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with its record, which is read ahead. On a clock that only a token moves."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    run, found = batch_run(model, slots=1), []

    def looked() -> None:
        nonlocal now
        now = float(run.progress.tokens)

    def write(record: Record | BadRecord, result: Mapping[str, Any]) -> None:
        found.append(result["timings"]["seconds"])

    run.run((good(number) for number in range(3)), write, looked=looked)
    assert len(found) == 3
    assert max(found) <= 9


# Ends


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache for compiled programs whose processes may be killed while they write to it."""
    folder = str(tmp_path_factory.mktemp("programs"))
    return {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_COMPILATION_CACHE_MAX_SIZE": "-1"}


@pytest.fixture
def start(
    folder: str, tmp_path: Path, own_cache: dict[str, str]
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
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
    start: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    number: signal.Signals,
    status: int,
) -> None:
    write_input(tmp_path / "in.jsonl", records(2000))
    output = tmp_path / "out.jsonl"
    process = start(*LONG)
    wait_for(output, 3, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert out == b""
    assert b"Traceback" not in err
    found = read(output)
    assert f"\n{len(found)} records done | ".encode() in err
    assert err.endswith(b"interrupted: the same command goes on from here\n")
    assert 3 <= len(found) < 2000
    assert all(result["finish_reason"] in ("length", "context") for result in found.values())


def test_a_run_that_is_killed_goes_on(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_an_input_that_does_not_come_holds_nothing_up(
    start: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    number: signal.Signals,
    status: int,
) -> None:
    """Neither the rows that are there, nor the end."""
    process = start("--input", "-", "--max-new-tokens", "5")
    assert process.stdin is not None
    process.stdin.write(json.dumps(records(1)[0]).encode() + b"\n")
    process.stdin.flush()
    wait_for(tmp_path / "out.jsonl", 1, process)
    process.send_signal(number)
    assert process.wait(PATIENCE) == status
    assert process.stderr is not None
    assert b"Traceback" not in (err := process.stderr.read())
    assert err.endswith(b"interrupted: the same command goes on from here\n")
    assert list(read(tmp_path / "out.jsonl")) == ["r0"]


@pytest.mark.parametrize("where", ["output", "count"])
def test_what_is_only_read_is_left_at_once(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A long output, or a long input that is counted."""
    source = write_input(tmp_path / "in.jsonl", records(4))
    arguments = ("--input", source, "--output", tmp_path / "out.jsonl", "--max-new-tokens", 1)
    assert command(*arguments).status == EXIT_OK
    before = (tmp_path / "out.jsonl").read_bytes()
    calls = 0

    def pressed(*rest: Any, **options: Any) -> Iterator[Any]:
        nonlocal calls
        for _ in range(4):
            calls += 1
            signal.raise_signal(signal.SIGINT)
            yield from ()

    if where == "output":
        monkeypatch.setattr(sinks, "lines_of", pressed)
    else:
        monkeypatch.setattr(run_module, "read_records", pressed)
    assert command(*arguments).status == 130
    assert calls == 1
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_two_runs_at_once(start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", records(2000))
    first = start(*LONG)
    wait_for(tmp_path / "out.jsonl", 1, first)
    second = start(*LONG)
    _, err = second.communicate(timeout=PATIENCE)
    assert second.returncode == 2
    assert b"another run is writing to it" in err
    assert first.poll() is None


# Buckets


def test_from_a_bucket_to_a_bucket(
    command: Callable[..., Result],
    s3: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Ended on the way, and gone on with: the same results as from a file to a file."""
    source = write_input(tmp_path / "in.jsonl", [*records(20), BAD[0][0]])
    files = fsspec.filesystem("s3")
    files.put_file(source, f"{s3}/in.jsonl")
    monkeypatch.setattr(sinks, "PART_RECORDS", 4)
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
    refused = command("--input", f"{s3}/none.jsonl", *run[2:])
    assert (refused.status, refused.err.count("\n")) == (EXIT_USAGE, 1)


# Several hosts


def meeting() -> tuple[str, ...]:
    """Options of two processes that meet on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return "--distributed", "--coordinator", address, "--processes", "2"


def test_others_that_do_not_come(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "PATIENCE", 1)
    source = write_input(tmp_path / "in.jsonl", records(1))
    own = ("--input", source, "--output", tmp_path / "out.jsonl")
    for process in (0, 1):
        alone = command(*own, *meeting(), "--process", process)
        note, error = alone.err.splitlines()
        assert alone.status == EXIT_USAGE
        assert note == "note: waiting for the other processes"
        assert error.startswith("error: --distributed: the processes do not meet: ")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_wait_for_others_ends_at_once(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, number: signal.Signals
) -> None:
    """And leaves nobody behind."""
    write_input(tmp_path / "in.jsonl", records(1))
    process = start(*meeting(), "--process", 0)
    end = time.monotonic() + PATIENCE
    while not (children := psutil.Process(process.pid).children()):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    status = process.wait(10)
    assert status == (128 + number if number != signal.SIGKILL else -number)
    psutil.wait_procs(children, 10)
    assert not any(child.is_running() for child in children)


def test_two_processes_do_what_one_does(
    command: Callable[..., Result],
    start: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    source = write_input(tmp_path / "in.jsonl", [*records(9), BAD[0][0]])
    shared = ("--max-new-tokens", 8, *meeting())
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
    # A part that lacks a result is not joined.
    parts[1].write_bytes(b"".join(parts[1].read_bytes().splitlines(keepends=True)[:-1]))
    output.unlink()
    torn = command("--input", source, "--output", output, "--merge", 2)
    assert torn.status == EXIT_USAGE
    assert "1 of 10 records" in torn.err
    assert not output.exists()


def test_a_process_is_started_again_by_itself(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    """Told its number and how many there are it meets nobody."""
    source, output = write_input(tmp_path / "in.jsonl", records(5)), tmp_path / "out.jsonl"
    own = ("--input", source, "--output", output)
    for process in (1, 0, 1):
        place = ("--distributed", "--processes", 2, "--process", process)
        assert command(*own, *place, "--max-new-tokens", 4).status == EXIT_OK
    assert command(*own, "--merge", 2).status == EXIT_OK
    assert len(read(output)) == 5


def test_the_script_for_a_tpu_vm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gcloud that says what it was asked for: one command, and no other."""
    fake = tmp_path / "gcloud"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    script = ROOT / "scripts" / "tpu_vm_batch.sh"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.run(
            [script, *arguments],
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )

    own = ["--input", "gs://b/in.jsonl", "--output", "gs://b/o.jsonl", "--stop", "it's; rm -rf"]
    asked = run("pod", "us-central1-a", *own)
    assert asked.returncode == 0, asked.stderr
    *words, command = asked.stdout.splitlines()
    assert words == [
        *("compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "us-central1-a"),
        *("--worker=all", "--command"),
    ]
    assert shlex.split(command) == [
        *("cd", "entropix_jax", "&&", ".venv/bin/python", "-m", "entropix_jax.batch"),
        *("--distributed", *own),
    ]
    elsewhere = {"~/x y": "x y", "/opt/x": "/opt/x"}
    for given, wanted in elsewhere.items():
        monkeypatch.setenv("ENTROPIX_DIR", given)
        assert shlex.split(run("pod", "z").stdout.splitlines()[-1])[1] == wanted
    usage = run("pod")
    assert usage.returncode == 2
    assert "scripts/tpu_vm_batch.sh NAME ZONE --input" in usage.stderr
