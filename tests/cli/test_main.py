"""The command line: output, exit status, trace, and errors."""

import ast
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import pytest

import entropix_jax
from entropix_jax.__main__ import COMMANDS, main
from entropix_jax.errors import printable
from entropix_jax.model import loading
from entropix_jax.model.loading import load
from tests.support.commands import (
    PROMPT,
    Command,
    Result,
    Start,
    one_error,
    refusal,
    run_command,
    set_stdin,
    short,
)
from tests.support.model_folders import MAX_POSITIONS, poisoned, token_ids, write_model
from tests.support.samplers import LITERAL
from tests.support.terminals import ESCAPE, Screen
from tests.support.traces import Json, read_trace
from tests.support.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.usefixtures("own_environment")


ROOT = Path(__file__).parents[2]


# Output.

# With this seed, each of three rows of the tests' model branches and retracts.
SEED = ("--seed", 3)


def command_rows(command: Command, *arguments: object) -> list[Json]:
    result = command("--format", "json", *arguments)
    assert result.status == 0
    return [json.loads(line) for line in result.out.splitlines()]


def test_text_json_and_the_trace(command: Command, tmp_path: Path, folder: str) -> None:
    """Samples are printed one after the other. Both formats and the trace have the same content."""
    path = tmp_path / "trace.jsonl"
    options = ("--trace", path, "--samples", 3, "--sampler", LITERAL, *SEED)
    rows = command_rows(command, *short(*options))
    assert [row["row"] for row in rows] == [0, 1, 2]
    assert len({row["text"] for row in rows}) > 1
    header, *objects, footer = read_trace(path)
    model = load(folder)
    prompt = model.tokenizer.encode(PROMPT, add_bos=True)
    expected = {"type": "header", "format_version": 1, "model": folder, "seed": SEED[1]}
    expected |= {"sampler": "literal", "prompt": "<|begin_of_text|>" + PROMPT}
    expected |= {"prompt_tokens": prompt}
    assert {name: header[name] for name in expected} == expected
    assert header["model_config"]["vocab_size"] == model.config.vocab_size
    assert header["versions"]["entropix_jax"] == entropix_jax.__version__
    assert header["versions"]["jax"] == jax.__version__
    assert 0 < footer["timings"]["first_token"] <= footer["timings"]["total"]
    kinds = {(token["type"], token["action"]) for token in objects}
    assert {("token", "branch"), ("token", "backspace")} <= kinds
    for row, ended in zip(rows, footer["rows"], strict=True):
        own = [line for line in objects if line["row"] == row["row"]]
        tokens = [line for line in own if line["type"] == "token"]
        assert row.pop("token_records") == tokens
        assert row.pop("prompt_tokens") == prompt
        assert ended.pop("request")["seed"] == SEED[1]
        assert row == ended
        assert [token["position"] for token in tokens] == [len(prompt) + i for i in range(12)]
        assert "".join(token["text"] for token in tokens) == row["text"]
        assert (row["finish_reason"], row["tokens"]) == ("length", 12)
        assert row["forwards"] == own[-1]["forwards"]
        assert row["retracted"] == len(own) - len(tokens) > 0
    # The same run gives the same trace in any output format.
    result = command(*short(*options))
    assert result.out == "".join(row["text"].removesuffix("\n") + "\n" for row in rows)
    (summary,) = result.err.splitlines()
    assert summary.startswith("36 tokens (")
    assert " tok/s) | token limit | " in summary
    assert read_trace(path)[:-1] == [header, *objects]
    assert command(*short(*options, "--seed", 1)).status == 0
    assert read_trace(path)[1:-1] != objects


def test_an_output_encoding_without_some_characters(
    folder: str, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    rows = command_rows(command, *short("--sampler", LITERAL, tokens=40))
    assert not rows[0]["text"].isascii()
    for form in ("json", "text"):
        out = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii"))
        given = ("--model", folder, "--sampler", LITERAL, "--format", form)
        arguments = map(str, short(*given, tokens=40))
        assert main(["generate", *arguments]) == 0
        if form == "json":
            assert json.loads(out.getvalue())["text"] == rows[0]["text"]
        else:
            text = rows[0]["text"].encode("ascii", "replace").decode()
            assert out.getvalue().decode() == text + "\n"


Traced = Callable[..., list[Json]]
COLOUR = re.compile(r"\x1b\[(?=[^m]*[34]\d)[\d;]+m")
ERASED = "\x1b[2K"


@pytest.mark.parametrize("option", [[], ["--verbose"]])
def test_terminal_output(
    command: Command, folder: str, monkeypatch: pytest.MonkeyPatch, option: list[object]
) -> None:
    """The text is the same with or without colours and status lines. The terminal is wide, as words
    are wrapped."""
    options = (*option, "--sampler", LITERAL, "--model", folder)
    arguments = [str(a) for a in short(*options, tokens=40)]
    plain = printable(command(*arguments[:-2]).out)
    monkeypatch.setattr("entropix_jax.cli.status._PATIENCE", math.inf)  # no line within the text
    for environment, colours in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        screen = Screen(monkeypatch, COLUMNS="1000", **environment)
        assert main(["generate", *arguments]) == 0
        written = screen.read()
        screen.close()
        assert bool(COLOUR.search(written)) == colours
        legend = "certain: top token  undecided: thought  forked: fork, keep the best"
        assert (legend in ESCAPE.sub("", written)) == colours
        for line in ("loading JAX", "loading the model"):
            assert (line in written) == ("TERM" not in environment)
        _, found, text = ESCAPE.sub("", written.rpartition(ERASED)[2]).partition(plain)
        assert found
        assert text.count("\n") == (4 if option else 1), "the summary"
        assert ("weights float32, hidden states float32\n" in text) == bool(option)


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"harness"}))
def test_help(command: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Lines are wrapped at the width of the terminal, not as in docstrings. No default is None."""
    for width in (80, 1000):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= width
        assert f"\n\nexample:\n  entropix-jax {command} " in text
        assert "(default: )" not in text
        assert "None" not in text
    assert not re.search(r"\n {10,}\S.*\n {10,}\S", text), "an option's help is one line"


# Prompts.


@pytest.fixture
def traced(command: Command, tmp_path: Path) -> Traced:
    """Returns a function that runs the command and returns its trace."""

    def run(*arguments: object, model: object = None) -> list[Json]:
        path = tmp_path / "trace.jsonl"
        assert command(*arguments, "--trace", path, model=model and str(model)).status == 0
        return read_trace(path)

    return run


ONE = ("--no-chat", "--max-new-tokens", 1, "--sampler", "greedy")


def test_prompt_options(traced: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One final line break of a file is dropped. Prompts may look like options."""
    path = tmp_path / "prompt.txt"
    for content, prompt in (("né\n", "né"), ("a\n\n", "a\n"), ("a", "a"), ("\ufeffa\r\n", "a")):
        path.write_bytes(content.encode())
        set_stdin(monkeypatch, content.encode())
        for file in (path, "-"):
            assert traced("--prompt-file", file, *ONE)[0]["prompt"] == "<|begin_of_text|>" + prompt
    for prompt in ("None", "-5 degrees", "--", "🙂"):
        assert traced(f"--prompt={prompt}", *ONE)[0]["prompt"] == "<|begin_of_text|>" + prompt


def test_chat_options(
    traced: Traced, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = shutil.copytree(folder, tmp_path / "base")
    end = token_ids()["<|end_of_text|>"]
    for name in ("generation_config.json", "config.json"):
        raw = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps(raw | {"eos_token_id": end}))

    def prompt(*arguments: object, model: object = folder) -> str:
        header, *_ = traced(*arguments, *ONE[1:], model=model)
        return header["prompt"].removeprefix("<|begin_of_text|>")

    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    answer = head.format("assistant")
    turn = head.format("user") + "Hi<|eot_id|>"
    system = head.format("system") + "Be brief.<|eot_id|>"
    assert prompt("--prompt", "Hi") == turn + answer
    assert prompt("--prompt", "Hi", "--no-chat") == "Hi"
    assert prompt("--prompt", "Hi", model=base) == "Hi"
    assert prompt("--prompt", "Hi", "--chat", model=base) == turn + answer
    assert prompt("--prompt", "Hi", "--system", "Be brief.") == system + turn + answer
    messages = tmp_path / "messages.json"
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "Hi")]
    messages.write_text(json.dumps([{"role": r, "content": c} for r, c in turns]))
    expected = f"{system}{turn}{answer}Yes?<|eot_id|>{turn}{answer}"
    assert prompt("--messages", messages) == expected
    set_stdin(monkeypatch, messages.read_bytes())
    assert prompt("--messages", "-") == expected


# Options.


def test_set_options(traced: Traced, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "entropix"\n[base]\ntemperature = 0.25\ntop_k = 3\n')

    def sampler(*arguments: object) -> tuple[str, Json]:
        header, *_ = traced(*short(*arguments, tokens=1))
        return header["sampler"], header["sampler_parameters"]

    name, values = sampler()
    assert name == "entropix"
    changes = ["sampler.base.temperature=0.25", "sampler.base.top_k=3", "sampler.arms.mid=sample"]
    changed = {**values, "base.temperature": 0.25, "base.top_k": 3, "arms.mid": "sample"}
    assert sampler("--set", *changes[:2], "--set", changes[2]) == (name, changed)
    assert sampler("--sampler", mine, "--set", changes[2]) == ("mine", changed)


def test_stop_strings(command: Command) -> None:
    (whole,) = command_rows(command, *short(tokens=40))
    stop = whole["text"][20:26]
    before = whole["text"][: whole["text"].index(stop)]
    for options in (["never", stop], ["never", "--stop", stop]):
        result = command(*short("--stop", *options, tokens=40))
        assert result.out == before.removesuffix("\n") + "\n"
        assert " | stop string | " in result.err


def test_options_reach_the_run(command: Command, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    recorded = ["--trace", trace, "--trace_top", 2, "--trace-layers", "--trace-attention"]
    types = ["--weights", "int8", "--precision", "bfloat16"]
    options = short(*types, "--sampler", "greedy", *recorded, tokens=10**12)
    result = command(*options)
    assert " | context limit | " in result.err, "a budget beyond the model's positions"
    header, *tokens, _ = read_trace(trace)
    texts: dict[int, str] = {}
    assert header["precision"] == {"weights": "int8", "activations": "bfloat16"}
    for token in tokens:
        assert [len(entry) for entry in token["top"]] == [3, 3]
        for name in ("layers", "layers_varentropy"):
            assert [len(heads) for heads in token[name]] == [4, 4]
        for head in token["attention"]:
            assert (head["layer"], 0 <= head["head"] < 4) == (1, True)  # of the upper half
            weights = [weight for _, _, weight in head["to"]]
            assert weights == sorted(weights, reverse=True)
            assert 0 < sum(weights) < 1.00001
            for at, text, _ in head["to"]:
                assert at < token["position"]
                assert text == texts.get(at, text)
        texts[token["position"]] = token["text"]


# The trace.


def test_thresholds_in_percent(command: Command, tmp_path: Path) -> None:
    """The trace contains the percentiles, and the bounds from the model's own tables."""
    path = tmp_path / "trace.jsonl"
    settings = ("sampler.thresholds.h1=40%", 'sampler.regimes.helv=["attn_entropy_norm > 75%"]')
    assert command(*short("--trace", path, "--set", *settings)).status == 0
    header = read_trace(path)[0]
    for found, h1, helv in (
        (header["sampler_parameters"], 0.85, "attn_entropy_norm > 0.72"),
        (header["percentiles"], "40%", "attn_entropy_norm > 75%"),
    ):
        assert (found["thresholds.h1"], found["regimes.helv"]) == (h1, [helv])
    assert header["calibration"]["quantiles"]["entropy"][40] == 0.85


def test_a_model_without_tables(command: Command, tmp_path: Path) -> None:
    """A note is printed once if the sampler depends on percentiles."""
    bare = write_model(tmp_path / "bare", calibrated=False)
    note = "note: the model has no calibration: the generic table is used; "
    note += f"`entropix-jax calibrate --model {bare}` measures its own\n"
    for sampler, number in (("entropix", 1), ("min-p", 0), (LITERAL, 0)):
        result = command(*short("--sampler", sampler, tokens=2), model=str(bare))
        assert (result.status, result.err.count(note)) == (0, number)


def test_invalid_tables_are_reported(tmp_path: Path) -> None:
    """Every command that loads a sampler reports them, with or without percentiles."""
    folder = write_model(tmp_path / "model")
    path = folder / "calibration.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "Once"}\n')
    output = tmp_path / "out.jsonl"
    for name, arguments in (
        ("generate", short()),
        ("generate", short("--sampler", "min-p")),
        ("inspect", ["--text", PROMPT]),
        ("batch", ["--input", prompts, "--output", output]),
        ("serve", ["--port", 0]),
    ):
        line = refusal(run_command(name, *arguments, "--model", folder))
        assert line.startswith(f"error: {path}: calibration format 1 is not supported (expected 2)")
        assert line.endswith(f": run entropix-jax calibrate --model {folder}")
    assert not output.exists()


def test_ask_is_ignored_without_a_terminal(command: Command) -> None:
    options = short("--set", "sampler.branch.margin=1000", tokens=20)
    asked = command(*options, "--ask")
    assert "note: --ask has no effect without a terminal\n" in asked.err
    assert asked.out == command(*options).out


def test_ask_on_a_terminal(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text so far precedes the question. The answer determines the continuation."""
    settings = ["sampler.branch.margin=1000", "sampler.branch.min_p=0", "sampler.branch.top_p=1"]
    options = ("--model", folder, "--sampler", LITERAL, "--set", *settings)
    arguments = [str(a) for a in short(*options, tokens=20)]
    shown = {}
    for typed in ("", "1\n" * 99, "2\n" * 99):
        screen = Screen(monkeypatch, TERM="dumb", COLUMNS="1000")  # without a status line
        keyboard = io.StringIO(typed)
        monkeypatch.setattr(keyboard, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", keyboard)
        assert main(["generate", *arguments, *["--ask"] * bool(typed)]) == 0
        parts = re.fullmatch(r"([^|]*\n)20 tokens.*\n", ESCAPE.sub("", screen.read()))
        assert parts
        shown[typed[:1]] = parts[1]
        screen.close()
    question = re.compile(
        r"\nTwo ways to continue, too close to call:\n  1  (.*)\n  2  (.*)\n"
        r"1, 2, or Enter for the model's choice \(1\): "
    )
    assert not question.search(shown[""])
    for answer in (1, 2):
        before, *rest = question.split(shown[str(answer)])
        assert shown[""].startswith(before)
        assert len(rest) >= 6, "it was asked more than once"
        for *texts, after in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            chosen = ast.literal_eval(texts[answer - 1])
            assert after.startswith(chosen) or chosen.startswith(after.rstrip("\n"))
        same = question.sub("", shown[str(answer)]) == shown[""]
        assert same == (answer == 1), "the first one is what nobody would have been asked about"


# Errors.


BAD: list[tuple[list[object], str]] = [
    ([], "--prompt is missing: give it, or --prompt-file or --messages"),
    (["Once"], "unexpected argument 'Once': give a text as --prompt TEXT"),
    (["--prompt", ""], "the prompt is empty"),
    (["--prompt", "a", "--prompt-file", "b"], "only one of --prompt, --prompt-file and --messages"),
    (["--prompt-file", "missing.txt"], "missing.txt: no such file"),
    (["--prompt-file", "empty.txt"], "the prompt is empty"),
    (["--prompt-file", "bytes.bin"], "bytes.bin: not UTF-8 at byte 1"),
    (["--prompt", os.fsdecode(b"a\xff")], "text is not valid Unicode at character"),
    (
        ["--prompt", "a " * 200, "--no-chat"],
        f"tokens, but the model has positions for {MAX_POSITIONS}",
    ),
    (["--prompt"], "argument --prompt: expected one argument"),
    (["--prompt", "a", "--max-new-tokens", 0], "--max-new-tokens must be at least 1, not 0"),
    (["--prompt", "a", "--max-new-tokens", "many"], "--max-new-tokens: invalid int value: 'many'"),
    (short("--samples", 10**9), "--samples must be at most 1024, not 1000000000"),
    (short("--dtype", "int4"), "argument --dtype/--weights: invalid choice: 'int4' (choose from"),
    (short("--precision", "int8"), "argument --precision: invalid choice: 'int8'"),
    (short("--promt", "a"), "unknown options: --promt a, did you mean --prompt? (see"),
    (short("--Max-new", 3), "unknown options: --Max-new 3 (see"),
    (short("--stop", ""), "--stop: stop strings must not be empty"),
    (short("--report", "-"), "--report -: standard output is for the text"),
    (short("--trace", "-"), "--trace -: standard output is for the text"),
    (short("--set"), "argument --set: expected at least one argument"),
    (short("--set", ""), "--set : expected sampler.KEY=VALUE"),
    (short("--set", "sampler.base.temprature=1"), "did you mean 'base.temperature'?"),
    (short("--set", "sampler.metrics.layers=[1.0]"), "the model has 2 layers"),
    (short("--set", "sampler.thresholds.h2=20%"), "h1 = 30% is above thresholds.h2 ="),
    (short("--sampler", "entropy"), "(a file's name ends in .toml), did you mean 'entropix'?"),
    (short("--min-p", 2), "base.min_p = 2.0: must be a number in [0.0, 1.0]"),
    (short("--chat"), "only one of --chat and --no-chat"),
    (short("--system", "Be brief."), "a system message needs a chat (--chat)"),
    (["--messages", "messages.json", "--no-chat"], "cannot be used with --messages"),
    (["--messages", "messages.json", "--system", "a"], "cannot be used with --messages"),
    (["--messages", "deep.json"], "deep.json: not valid JSON"),
    (["--messages", "contentless.json"], "message 1 must be an object with a text"),
    (short("--trace-top", 99999), "likely tokens must be at most 1024"),
    (short("--trace-top", -1), "--trace-top must be at least 0, not -1"),
    (short("--trace", "missing/trace.jsonl"), "cannot be written: no folder missing"),
    (short("--trace", "/dev/full"), "/dev/full: cannot be written: No space left on device"),
]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the bad inputs."""
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "empty.txt": "",
        "deep.json": "[" * 100_000,
        "messages.json": '[{"role": "user", "content": "Hi"}]',
        "contentless.json": '[{"role": "user"}]',
    }.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "bytes.bin").write_bytes(b"a\xffb")
    return tmp_path


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_errors_of_generate(
    command: Command, workplace: Path, arguments: list[object], message: str
) -> None:
    trace = [] if "--trace" in arguments else ["--trace", "trace.jsonl"]
    one_error(command(*trace, *arguments), message)
    assert not (workplace / "trace.jsonl").exists()


def test_errors_of_file_options(
    command: Command, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_error(command(*short("--trace-layers")), "--trace-attention need --trace FILE")
    path = workplace / "messages.json"
    before = path.read_text()
    for given, written in (("--prompt-file", "--trace"), ("--messages", "--report")):
        message = f"{path}: would overwrite its own input"
        one_error(command(given, path, written, path), message)
        assert path.read_text() == before
    set_stdin(monkeypatch, b"ab\xff")
    one_error(command("--prompt-file", "-"), "standard input: not UTF-8 at byte 2")
    set_stdin(monkeypatch, "ab".encode("utf-16"))  # of a redirection in PowerShell
    one_error(command("--prompt-file", "-"), "standard input: UTF-16, not UTF-8 at byte 0")
    monkeypatch.setattr(sys, "stdin", None)  # Python's value after `<&-`
    one_error(command("--prompt-file", "-"), "standard input is closed")


def test_an_error_of_one_sample_does_not_affect_others(command: Command, tmp_path: Path) -> None:
    options = ("--samples", 3, "--sampler", LITERAL, *SEED)
    whole = command_rows(command, *short(*options))
    ids = [[record["token_id"] for record in row["token_records"]] for row in whole]
    tried = {
        token
        for row in whole
        for record in row["token_records"]
        for branch in record.get("branches", ())
        for token in branch["tokens"]
    }
    # In the first row, whose text is printed while the others wait.
    at, token = next(
        (i, t)
        for i, t in enumerate(ids[0])
        if t not in {*ids[1], *ids[2], *ids[0][:i], *tried} and 2 < i < 11
    )
    broken = str(write_model(tmp_path / "broken", poisoned(token)))
    result = command(*short(*options), model=broken)
    assert result.status == 2
    position = whole[0]["token_records"][at]["position"] + 1
    error = f"error: row 0: NaN or infinite logits at position {position} (--check"
    (told,) = [line for line in result.err.splitlines() if line.startswith("error")]
    assert told.startswith(error)
    cut = "".join(record["text"] for record in whole[0]["token_records"][: at + 1])
    assert result.out == f"{cut}\n{whole[1]['text']}\n{whole[2]['text']}\n"


def test_errors_while_loading(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(error: BaseException) -> Result:
        monkeypatch.setattr(loading, "read_params", Mock(side_effect=error))
        return command(*short("--trace", tmp_path / "t"))

    for error in (MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")):
        one_error(run(error), "not enough memory")
    assert run(KeyboardInterrupt()) == Result(130, "", "")
    with pytest.raises(RuntimeError, match="a defect"):  # our own defects are not hidden
        run(RuntimeError("a defect"))
    assert not (tmp_path / "t").exists()


# Interrupts.


def test_an_interrupt_while_a_token_is_written(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The token is written completely, then the run ends."""
    from entropix_jax.engine.trace import TraceWriter

    options = short("--samples", 3, "--sampler", LITERAL, tokens=40)
    whole = command_rows(command, *options)
    # Not a branch, whose tokens come together.
    pressed = next(one for one in whole[1]["token_records"][4:] if one["action"] != "branch")
    write = TraceWriter.write

    def press(self: TraceWriter, record: Json) -> None:
        if record == pressed:
            os.kill(os.getpid(), signal.SIGINT)
        write(self, record)

    monkeypatch.setattr(TraceWriter, "write", press)
    trace = tmp_path / "trace.jsonl"
    result = command(*options, "--trace", trace)
    assert result.status == 130
    _, *objects, footer = read_trace(trace)
    tokens = [token for token in objects if token["type"] == "token"]
    assert [row["finish_reason"] for row in footer["rows"]] == ["interrupt"] * 3
    assert sum(row["tokens"] for row in footer["rows"]) == len(tokens)
    later = objects[objects.index(pressed) + 1 :]
    rows = [token["row"] for token in later if token["action"] != "branch"]
    assert len({*rows}) == len(rows), "what was held back, and a branch's last tokens"
    texts = [row["text"] for row in footer["rows"]]
    assert result.out == "".join(f"{text}\n" for text in texts if text)
    for index, full in enumerate(whole):
        own = [token for token in tokens if token["row"] == index]
        held = index in {token["row"] for token in later}
        sure = own[:-1] if held else own  # a held-back token might have been retracted
        assert sure == full["token_records"][: len(sure)]
    assert " | stopped | " in result.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Returns a function that starts a long run in another process."""
    path = write_model(tmp_path / "long")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": 100_000}))
    running = []

    def popen(*arguments: object, flags: Sequence[str], env: Json) -> subprocess.Popen[bytes]:
        # The sampler that compiles fastest.
        own = ["-m", "entropix_jax.main", "--model", str(path), "--sampler", "temperature"]
        # Unbuffered, since `communicate` would miss buffered data.
        process = subprocess.Popen(
            [sys.executable, *flags, *own, *map(str, short(*arguments, tokens=90_000))],
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        running.append(process)
        return process

    yield popen
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("module", [b" rich", b" jax._src.core", b""])
def test_ctrl_c_while_importing_or_compiling(start: Start, module: bytes, tmp_path: Path) -> None:
    """An interrupted import can raise unrelated errors, which must not be printed."""
    trace = tmp_path / "trace.jsonl"
    env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "empty")}
    process = start("--trace", trace, flags=["-X", "importtime"] if module else [], env=env)
    assert process.stderr is not None
    if module:
        next(line for line in process.stderr if module in line)
    else:
        wait_for(trace, 1, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, b"")
    if module:
        assert all(line.startswith(b"import time:") for line in err.splitlines()[:-1])
        assert not trace.exists()
    else:
        assert b"Traceback" not in err
        assert read_trace(trace)[-1]["rows"][0]["finish_reason"] == "interrupt"


# The installed command.


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Restores the signal handlers that a program changes."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_installed_command(
    own_handlers: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = run_command("generate", "--nonsense")
    one_error(unknown, "unknown options: --nonsense (see entropix-jax generate --help)")
    misspelt = run_command("generate", *short("--model", "smolm2"))
    one_error(misspelt, "no such model: 'smolm2', did you mean 'smollm2'?")
    for arguments, message in (
        (["x"], "no command 'x' (known: generate, chat, "),
        (["generat"], "no command 'generat', did you mean 'generate'? (see entropix-jax --help)"),
    ):
        one_error(run_command(*arguments), message)
    monkeypatch.setenv("COLUMNS", "60")
    for arguments, status in ((["--help"], 0), ([""], 2), ([], 2)):
        help_text = run_command(*arguments)
        assert help_text.status == status
        assert all(f"  {name} " in help_text.out for name in COMMANDS)
        assert max(map(len, help_text.out.splitlines())) <= 60
    monkeypatch.setattr(sys, "argv", ["entropix-jax", "--version"])
    before = signal.getsignal(signal.SIGINT)
    assert main() == 0
    assert signal.getsignal(signal.SIGINT) is not before, "Ctrl-C ends the program"
    assert capsys.readouterr().out == f"entropix-jax {entropix_jax.__version__}\n"


# The package as a library.


def test_public_names() -> None:
    assert {*dir(entropix_jax)} == {*entropix_jax.__all__, "__version__"}
    for name in entropix_jax.__all__:
        assert getattr(entropix_jax, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = entropix_jax.nothing
