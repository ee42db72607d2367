"""Conversations in the terminal. Each answer equals that of `generate` for the same messages."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import entropix_jax
from entropix_jax.chat import session
from entropix_jax.chat.session import Session
from entropix_jax.cli import terminal
from entropix_jax.engine.api import Generation
from entropix_jax.model import loading
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import REGIMES
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.text.tokenizer import Tokenizer
from tests.support.commands import Result, one_error, run_command, set_stdin
from tests.support.terminals import ESCAPE
from tests.support.traces import read_trace
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("own_environment")

SHORT = ("--model", "tiny", "--sampler", "min-p", "--max-new-tokens", 16, "--context", 512)
Chat = Callable[..., Result]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Returns a function that runs the command on lines of standard input."""

    def run(*lines: str, options: tuple[object, ...] = ()) -> Result:
        set_stdin(monkeypatch, "".join(["\ufeff", *(f"{line}\r\n" for line in lines)]).encode())
        return run_command("chat", *SHORT, *options)

    return run


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """The sessions that the command has run so far."""
    seen: list[Session] = []
    run = Session.run

    def record(self: Session) -> int:
        seen.append(self)
        return run(self)

    monkeypatch.setattr(Session, "run", record)
    return seen


@pytest.fixture
def typing(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Returns a function that runs the command on typed lines."""
    typed: list[str] = []

    def read(prompt: str) -> str:
        if not typed:
            raise EOFError
        return typed.pop(0)

    def run(*lines: str, **options: Any) -> Result:
        typed[:] = lines
        return chat(**options)

    monkeypatch.setattr(session, "is_terminal", lambda stream: True)
    monkeypatch.setattr("builtins.input", read)
    return run


@pytest.fixture
def press(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Returns a function that schedules Ctrl-C during an answer, after a number of its events."""
    iterate = Generation._iterate
    answers = iter(range(100))
    times: dict[int, int] = {}

    def pressed(self: Generation) -> Iterator[Any]:
        after = times.get(next(answers))
        if after == 0:
            os.kill(os.getpid(), signal.SIGINT)
        for number, event in enumerate(iterate(self), start=1):
            if number == after:
                os.kill(os.getpid(), signal.SIGINT)
            yield event

    monkeypatch.setattr(Generation, "_iterate", pressed)
    return times.__setitem__


def expected(model: LanguageModel, *said: str, seed: int = 0, **options: Any) -> str:
    """Returns the answer to alternating messages of user and model."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    options = {"sampler": "min-p", "seed": seed, "max_new_tokens": 16, **options}
    return entropix_jax.generate(model, messages, **options)[0].text


def test_a_scripted_conversation(chat: Chat, tiny: LanguageModel, sessions: list[Session]) -> None:
    lines = (" Hello", "", "Where is Rita?", "/retry", "/retry", "/back", "Who\\", "are you?")
    first = expected(tiny, "Hello")
    second = expected(tiny, "Hello", first, "Where is Rita?")
    again = [expected(tiny, "Hello", first, "Where is Rita?", seed=seed) for seed in (1, 2)]
    other = expected(tiny, "Hello", first, "Who\nare you?")
    result = chat(*lines)
    assert result.status == 0
    assert result.out == "".join(f"{text}\n" for text in (first, second, *again, other))
    one, two, three, four, back, five = result.err.splitlines()
    assert re.fullmatch(r"\d+ tokens \(\d+ tok/s\) \| \w+ \w+.* \|.* \| context \d+/512", one)
    assert "seed" not in two + five
    assert three.endswith(" | seed 1")
    assert four.endswith(" | seed 2")
    assert back == "taken back: Where is Rita?"
    quiet = chat(*lines[:3], options=("--quiet", "--system", "Be kind."))
    assert quiet.err == ""
    assert len(quiet.out.splitlines()) == 2


def test_only_new_text_is_read(chat: Chat, tiny: LanguageModel, sessions: list[Session]) -> None:
    chat("Hello", "Where is Rita?", "/retry")
    (only,) = sessions
    ids = tiny.tokenizer.apply_chat(only.messages[:-1])
    assert only._engine._reader.read < len(ids)


@pytest.mark.parametrize("events", [0, 2])
def test_a_stopped_answer_is_kept(
    typing: Chat,
    tiny: LanguageModel,
    sessions: list[Session],
    press: Callable[[int, int], None],
    events: int,
) -> None:
    """The next answer is complete. A stopped answer without text is removed with its question."""
    press(0, events)
    result = typing("Once upon a time", "Hello", "Who is Rita?")
    assert (result.status, len(result.out.splitlines())) == (0, 2 + (events > 0))
    told = [message["content"] for message in sessions[0].messages]
    assert (len(told), told[-2]) == (6 if events else 4, "Who is Rita?")
    assert told[-1] == expected(tiny, *told[:-1])
    if events:
        whole = expected(tiny, "Once upon a time")
        assert 0 < len(told[1]) < len(whole)
        assert whole.startswith(told[1])


def test_ctrl_c_ends_a_script(chat: Chat, press: Callable[[int, int], None]) -> None:
    """The printed text is kept, and the exit status is 130."""
    press(1, 2)
    whole = chat("Once upon a time", options=("--quiet",)).out
    result = chat("Once upon a time", "Hello", options=("--quiet",))
    assert result.status == 130
    assert result.out
    assert whole.startswith(result.out[:-1])
    assert result.out != whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_samplers_and_settings(chat: Chat, tiny: LanguageModel) -> None:
    lines = (
        "/sampler;/set base.temperature=2;/set sampler.base.min_p=0.01;/set base.temperature = 3"
    )
    lines += ";Hello;/sampler greedy;/system Sing.;/system;Hello again"
    options = ("--set", "sampler.base.min_p=0.2", "--quiet")
    result = chat(*lines.split(";"), options=options)
    values = {"base.temperature": 3, "base.min_p": 0.01}
    hot = entropix_jax.load_sampler("min-p").with_values(values)
    first = expected(tiny, "Hello", sampler=hot)
    second = expected(tiny, "Hello", first, "Hello again", sampler="greedy")
    assert result.out == f"{first}\n{second}\n"
    assert result.err.splitlines() == [
        "sampler min-p sampler.base.min_p=0.2",
        "sampler min-p sampler.base.min_p=0.2 sampler.base.temperature=2",
        "sampler min-p sampler.base.temperature=2 sampler.base.min_p=0.01",
        "sampler min-p sampler.base.min_p=0.01 sampler.base.temperature=3",
        "sampler greedy",
        "the system message is set",
        "there is no system message any more",
    ]


def test_a_saved_conversation_is_continued(chat: Chat, tmp_path: Path) -> None:
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
    # Continue the saved conversation.
    assert chat("And Adam?", options=("--messages", names[0])).out == f"{third}\n"
    # An unanswered question is answered at once, like in `generate`.
    names[0].write_text(json.dumps(messages[:3]))
    assert chat("/retry", options=("--messages", names[0])).out.startswith(f"{second}\n")
    assert run_command("generate", "--messages", names[0], *SHORT[:-2]).out == f"{second}\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/bak", "no command '/bak', did you mean '/back'? (/help lists them"),
        ("/retry", "there is no turn yet"),
        ("/retry now", "/retry takes no argument"),
        ("/set base.temperature", "sampler.base.temperature: expected sampler.KEY=VALUE"),
        ("/set base.temprature=1", "did you mean 'base.temperature'"),
        ("/set base.temperature=hot", "base.temperature"),
        ("/sampler grady", "did you mean 'greedy'"),
        ("/save", "the name must end in .json, .jsonl or .html"),
        ("/save chat.txt", "the name must end in .json, .jsonl or .html"),
        ("/save /nowhere/chat.json", "no folder /nowhere"),
        ("/save last.html", "there is no answer of this session to save"),
        ("word " * 600, "the context is full: "),
    ],
)
def test_a_script_ends_at_an_error(
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
        (("--stop", ""), "--stop: stop strings must not be empty"),
        (("--messages", "chat.json", "--system", "Sing."), "cannot be used with --messages"),
        (("--messages", "none.json"), "error: none.json: no such file"),
        (("--messages", "torn.json"), "torn.json: not valid JSON"),
        (("--messages", "list.json"), "message 1"),
        (("--prompt", "Hello"), "unknown options: --prompt"),
        (("--sampler", "grady"), "did you mean 'greedy'"),
    ],
)
def test_errors_of_options(
    chat: Chat,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: tuple[object, ...],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("torn.json").write_text("[")
    Path("list.json").write_text("[1]")
    one_error(chat("Hello", options=options), told)


def test_lines_of_a_script(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, sessions: list[Session]
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(Session, "_take", lambda self, line: taken.append(line))
    set_stdin(monkeypatch, "one\r\n\ntwo\\\nthree\\\n\\\\\n\nfünf\\".encode())
    assert run_command("chat", *SHORT).status == 0
    assert taken == ["one", "", "two\nthree\n\\\n", "fünf"]
    set_stdin(monkeypatch, b"\xff\n")
    one_error(run_command("chat", *SHORT), "standard input: not UTF-8")
    monkeypatch.setattr(sys, "stdin", None)
    one_error(run_command("chat", *SHORT), "standard input is closed")


def test_a_model_without_a_template(
    chat: Chat, tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(tiny.tokenizer._settings, chat_template=None)
    path = tiny.folder / "tokenizer.json"
    plain = replace(tiny, tokenizer=Tokenizer(path, path.read_bytes(), settings))
    monkeypatch.setattr(loading, "load", lambda *_, **options: plain)
    one_error(chat("Hello"), "no chat template: it cannot chat")


def test_a_question_is_a_turn(chat: Chat, tiny: LanguageModel, tmp_path: Path) -> None:
    arms = [f"sampler.arms.{regime}=clarify" for regime in REGIMES]
    own = ["clarify.least=0", "clarify.most=9", "clarify.length=4", "base.min_p=0"]
    own.append(f"draw.bans={[*tiny.end_ids(chat=True)]}")  # it ends with a question
    settings = [*arms, *(f"sampler.{one}" for one in own)]
    result = chat("Where is she?", "Rita.", options=("--set", *settings))
    first, *_ = result.out.splitlines()
    assert first.startswith(" One question:")
    assert result.err.count("question to the user") == 2
    # A user who has replied is not asked again.
    said = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Who?"}]
    (tmp_path / "said.json").write_text(json.dumps(said))
    options = ("--messages", str(tmp_path / "said.json"), "--max-new-tokens", "60")
    assert "One question" not in chat("Rita.", options=(*options, "--set", *settings)).out


def test_a_person_chooses_between_branches(
    typing: Chat, tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    settings: dict[str, Any] = {f"arms.{regime}": "branch" for regime in REGIMES}
    settings |= {"branch.margin": 1000, "branch.min_p": 0, "branch.top_p": 1}
    sampler = load_sampler("min-p").with_values(settings)
    own = [f"sampler.{key}={value}" for key, value in settings.items()]
    options = ("--set", *own, "--quiet")
    second = expected(tiny, "Hello", sampler=sampler, ask=lambda row, texts: 1)
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: True)

    def choose(row: int, texts: Sequence[str]) -> int:
        asked.append(row)
        return 1

    monkeypatch.setattr(terminal, "ask_person", choose)
    assert f"{second}\n" in typing("Hello", options=(*options, "--ask")).out
    assert asked
    asked.clear()
    typing("Hello", options=options)
    assert not asked


def test_ask_without_a_terminal_is_a_note(chat: Chat) -> None:
    assert "note: --ask has no effect without a terminal\n" in chat(options=("--ask",)).err


class Typist:
    """A chat on a pseudo-terminal, into which a test types, and whose output it reads."""

    def __init__(self) -> None:
        self._far, near = pty.openpty()
        command = [sys.executable, "-m", "entropix_jax", "chat", *map(str, SHORT)]
        command += ["--sampler", "entropix"]
        files: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), near)
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(command, **files, env=environment, start_new_session=True)
        os.close(near)
        self.shown = ""

    def type(self, text: str, until: str) -> str:
        """Types, waits until a text is shown, and returns the new output without colours."""
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
    typist = Typist()
    yield typist
    typist.process.kill()
    typist.process.wait()
    os.close(typist._far)


def test_chat_on_a_terminal(typist: Typist) -> None:
    first = typist.type("", "> ")
    assert "certain: top token  undecided: warmer draw  forked: fork, keep the best" in first
    assert "tiny, sampler entropix, context 512 tokens. /help lists the commands." in first
    answer = typist.type("Hello\n", "\n> ")
    assert "Hello! How can I help you?\n" in answer
    assert "context 20/512\n\n> " in answer
    # The chat continues after an error, and after Ctrl-C.
    assert "error: no command '/bak'" in typist.type("/bak\n", "\n> ")
    assert typist.type("half a line", "half a line")
    time.sleep(0.5)  # readline misses a signal that arrives during the last key
    typist.process.send_signal(signal.SIGINT)
    typist.type("", "> ")
    assert "/save FILE" in typist.type("/help\n", "\n> ")
    # Pasted text is one message.
    pasted = typist.type("\x1b[200~one\ntwo\x1b[201~\n", "\n> ")
    assert pasted.count("tok/s") == 1
    assert "taken back: one two" in typist.type("/back\n", "\n> ")
    typist.type("\x04", "never")
    assert typist.process.wait(timeout=PATIENCE) == 0
    assert ESCAPE.search(typist.shown)
    assert "Traceback" not in typist.shown
