"""The command: turns and commands from a script, what goes where, a real terminal, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import entropix_jax
from entropix_jax.chat.command import main
from entropix_jax.chat.dialogue import Dialogue
from entropix_jax.chat.lines import Lines
from entropix_jax.cli import generate
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from tests.support.commands import Result, one_error, run_command
from tests.support.terminals import ESCAPE
from tests.support.traces import read_trace
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("own_environment")

SHORT = ("--model", "tiny", "--max-new-tokens", 16, "--context", 512)
Chat = Callable[..., Result]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Runs the command on some lines of standard input."""

    def run(*lines: str, options: tuple[object, ...] = ()) -> Result:
        data = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "ascii"))
        return run_command(main, *SHORT, *options)

    return run


def expected(model: LanguageModel, *said: str, seed: int = 0, **options: Any) -> str:
    """The answer to what a user and the model said in turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return entropix_jax.generate(model, messages, seed=seed, max_new_tokens=16, **options)[0].text


def test_a_script_talks(chat: Chat, tiny: LanguageModel) -> None:
    lines = (" Hello", "", "Where is Rita?", "/retry", "/back", "Who\\", "are you?")
    first = expected(tiny, "Hello")
    second = expected(tiny, "Hello", first, "Where is Rita?")
    again = expected(tiny, "Hello", first, "Where is Rita?", seed=1)
    other = expected(tiny, "Hello", first, "Who\nare you?")
    result = chat(*lines)
    assert result.status == 0
    assert result.out == f"{first}\n{second}\n{again}\n{other}\n"
    one, two, three, back, four = result.err.splitlines()
    assert re.fullmatch(r"\d+ tokens \(\d+ tok/s\) \| \d\.\d\d bits \| certain .* 20/512", one)
    assert "seed" not in two + four
    assert " | seed 1" in three
    assert back == "taken back: Where is Rita? (1 left)"
    quiet = chat(*lines[:3], options=("--quiet", "--system", "Be kind."))
    assert quiet.err == ""
    assert len(quiet.out.splitlines()) == 2


def test_samplers_and_settings(chat: Chat, tiny: LanguageModel) -> None:
    result = chat(
        "/sampler",
        "/set base.temperature=2",
        "/set sampler.base.min_p=0.01",
        "/set base.temperature = 3",
        "Hello",
        "/sampler greedy",
        "/set seed=7",
        "/set max_new_tokens=3",
        "/system Sing.",
        "/system",
        "Hello again",
        options=("--sampler", "min-p", "--set", "sampler.base.min_p=0.2", "--quiet"),
    )
    hot = entropix_jax.load_sampler("min-p").with_values(
        {"base.temperature": 3, "base.min_p": 0.01}
    )
    first = expected(tiny, "Hello", sampler=hot)
    assert result.out.startswith(f"{first}\n")
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Hello again"},
    ]
    (row,) = entropix_jax.generate(tiny, messages, "greedy", max_new_tokens=3)
    assert result.out == f"{first}\n{row.text}\n"
    assert result.err.splitlines() == [
        "sampler min-p: base.min_p=0.2, seed=0, max_new_tokens=16",
        "sampler min-p: base.min_p=0.2, base.temperature=2, seed=0, max_new_tokens=16",
        "sampler min-p: base.temperature=2, base.min_p=0.01, seed=0, max_new_tokens=16",
        "sampler min-p: base.min_p=0.01, base.temperature=3, seed=0, max_new_tokens=16",
        "sampler greedy: seed=0, max_new_tokens=16",
        "sampler greedy: seed=7, max_new_tokens=16",
        "sampler greedy: seed=7, max_new_tokens=3",
        "the system message is set",
        "there is no system message any more",
    ]


def test_saved_and_taken_up_again(chat: Chat, tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("chat.json", "last.jsonl", "last.html")]
    said = chat("Hello", "Where is Rita?", *(f"/save {name}" for name in names), "And Adam?")
    assert said.err.count("saved: ") == 3
    *_, second, third = said.out.splitlines()
    messages = json.loads(names[0].read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert (messages[0]["content"], messages[3]["content"]) == ("Hello", second)
    header, *_, footer = read_trace(names[1])
    assert (header["model"], footer["rows"][0]["text"]) == ("tiny", second)
    assert len(read_trace(names[1])[1]["top"]) == 5
    assert "<html" in names[2].read_text()[:1000]
    # On from there.
    assert chat("And Adam?", options=("--messages", names[0])).out == f"{third}\n"
    # An open question is answered at once, as by `generate`.
    names[0].write_text(json.dumps(messages[:3]))
    assert chat("/retry", options=("--messages", names[0])).out.startswith(f"{second}\n")
    short = ("--model", "tiny", "--max-new-tokens", 16)
    assert run_command(generate.main, "--messages", names[0], *short).out == f"{second}\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/bak", "no command '/bak', did you mean '/back'? (/help lists them"),
        ("/retry", "there is no turn yet"),
        ("/retry now", "/retry takes no argument"),
        ("/set base.temperature", "/set base.temperature: expected KEY=VALUE"),
        ("/set base.temprature=1", "did you mean 'base.temperature'"),
        ("/set base.temperature=hot", "base.temperature"),
        ("/set seed=one", "seed must be a whole number, not 'one'"),
        ("/set max_new_tokens=0", "max_new_tokens must be at least 1"),
        ("/sampler grady", "did you mean 'greedy'"),
        ("/save", "its name ends in .json, .jsonl or .html"),
        ("/save chat.txt", "its name ends in .json, .jsonl or .html"),
        ("/save /nowhere/chat.json", "no folder /nowhere"),
        ("/save last.html", "there is no turn yet"),
        ("word " * 600, "the context is full"),
    ],
)
def test_a_script_ends_at_a_mistake(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    one_error(chat(line, "Hello"), told)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--context", 1), "--context must be at least 2"),
        (("--context", 10**6), "the model has"),
        (("--max-new-tokens", 0), "--max-new-tokens must be at least 1"),
        (("--stop", ""), "--stop: stop strings must not be empty"),
        (("--messages", "chat.json", "--system", "Sing."), "does not go with --system"),
        (("--messages", "none.json"), "none.json: no such file"),
        (("--prompt", "Hello"), "unknown options: --prompt"),
        (("--sampler", "grady"), "did you mean 'greedy'"),
    ],
)
def test_wrong_options(chat: Chat, options: tuple[object, ...], told: str) -> None:
    one_error(chat("Hello", options=options), told)


def test_damaged_messages(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    for text, told in (("[", "not valid JSON"), ("[1]", "message 1")):
        path.write_text(text)
        one_error(chat("Hello", options=("--messages", path)), told)


def test_lines_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    data = "one\r\n\ntwo\\\nthree\\\n\\\\\n\nfünf\\".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "ascii"))
    lines = Lines()
    assert [*iter(lines.read, None)] == ["one", "", "two\nthree\n\\\n", "fünf"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "ascii"))
    with pytest.raises(UserError, match="not UTF-8 at byte 0"):
        Lines().read()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        Lines().read()


def test_ctrl_c_ends_a_script(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written stays, and the status says so."""
    whole = chat("Once upon a time", options=("--quiet",)).out
    run = Dialogue.run

    def pressed(self: Dialogue, turn: Any) -> Iterator[Any]:
        for number, event in enumerate(run(self, turn)):
            if number == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield event

    monkeypatch.setattr(Dialogue, "run", pressed)
    result = chat("Once upon a time", "Hello", options=("--quiet",))
    assert result.status == 130
    assert result.out
    assert whole.startswith(result.out[:-1])
    assert result.out != whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Typist:
    """Types into a chat on a terminal of its own, and reads along."""

    def __init__(self, process: subprocess.Popen[bytes], far: int) -> None:
        self.process = process
        self._far = far
        self.shown = ""

    def keeps_typed_text(self) -> bool:
        """Whether the terminal keeps typed text when Ctrl-C is pressed."""
        return bool(termios.tcgetattr(self._far)[3] & termios.NOFLSH)

    def type(self, text: str, until: str) -> str:
        """Types, waits until a text is shown, and returns what was shown since, without colours."""
        os.write(self._far, text.encode())
        fresh = ""
        while until not in fresh:
            assert select.select([self._far], [], [], PATIENCE)[0], fresh
            try:
                data = os.read(self._far, 1 << 16).decode(errors="replace")
            except OSError:  # the process has ended
                break
            self.shown += data
            fresh += re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", data)
        return fresh.replace("\r", "")


@pytest.fixture
def typist() -> Iterator[Typist]:
    far, near = pty.openpty()
    command = [sys.executable, "-m", "entropix_jax.chat", *map(str, SHORT)]
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=near, stdout=near, stderr=near, env=environment, start_new_session=True
    )
    os.close(near)
    yield Typist(process, far)
    process.kill()
    process.wait()
    os.close(far)


def test_at_a_terminal(typist: Typist) -> None:
    first = typist.type("", "> ")
    assert "certain (LELV)" in first
    assert "tiny, sampler entropix, context 512 tokens. /help lists the commands." in first
    answer = typist.type("Hello\n", "\n> ")
    assert "Hello! How can I help you?\n" in answer
    assert "context 20/512\n\n> " in answer
    # A mistake is told, and the chat goes on; so after Ctrl-C.
    assert "error: no command '/bak'" in typist.type("/bak\n", "\n> ")
    assert typist.type("half a line", "half a line")
    time.sleep(0.5)  # readline misses a signal that comes within the last key
    typist.process.send_signal(signal.SIGINT)
    typist.type("", "> ")
    assert typist.type("\x1b[A", "half a line"), "the up key brings it back"
    assert "/save FILE" in typist.type("\x15/help\n", "\n> ")
    assert typist.keeps_typed_text()
    # What is pasted is one message.
    pasted = typist.type("\x1b[200~one\ntwo\x1b[201~\n", "\n> ")
    assert pasted.count("tok/s") == 1
    assert "taken back: one two (1 left)" in typist.type("/back\n", "\n> ")
    typist.type("\x04", "never")
    assert typist.process.wait(timeout=PATIENCE) == 0
    assert not typist.keeps_typed_text()
    assert ESCAPE.search(typist.shown)
    assert "Traceback" not in typist.shown
