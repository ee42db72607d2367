"""A conversation in the terminal: questions, answers in the colours of their regimes, commands."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from entropix_jax.cli.options import EXIT_OK, ModelOptions
from entropix_jax.cli.status import Speed, StatusLine, is_terminal, show_waits
from entropix_jax.cli.terminal import TextScreen, asker, can_ask, print_legend, summary
from entropix_jax.engine.api import Generation
from entropix_jax.engine.calibrated import calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row, Rows
from entropix_jax.engine.state import Recording
from entropix_jax.errors import UserError, nearest, printable
from entropix_jax.host.files import check_writable, replacing
from entropix_jax.host.interrupts import EXIT_INTERRUPT, deferred_interrupts, leave_on_interrupt
from entropix_jax.model.loading import LanguageModel
from entropix_jax.text.intents import may_ask

Messages = list[Mapping[str, Any]]

_TOP = 5  # most likely tokens that a saved page shows


@dataclass
class Session:
    """A conversation whose cache is kept between answers, and its commands.

    Raises:
        UserError: the model has no chat template, or the cache does not fit into memory.
    """

    model: LanguageModel
    name: str  # the model's
    options: ModelOptions  # the sampler's
    request: Request  # the next answer's, but for its prompt
    context: int  # maximum tokens of the conversation
    messages: Messages  # the conversation so far
    quiet: bool = False  # no statistics after an answer
    actions: bool = False  # only forks and steps back are coloured
    asks: bool = False  # a person on the terminal chooses between close branches

    def __post_init__(self) -> None:
        if self.model.tokenizer.chat_template is None:
            hint = "it cannot chat (entropix-jax generate continues a text)"
            raise UserError(f"{self.model.folder}: this model has no chat template: {hint}")
        options: Any = {"recording": Recording(top=_TOP, layers=True), "keep": True}
        self._engine = Engine(self.model, slots=1, capacity=self.context, **options)
        self._typed = is_terminal(sys.stdin)
        self._err = Console(stderr=True, highlight=False, soft_wrap=True)
        self._pressed: list[int] = []  # signals since the last line
        self.asks = self.asks and can_ask()
        self._running: Row | None = None
        self._answered: Rows | None = None  # the run of the last answer
        self._retries = 0  # of the last question

    def run(self) -> int:
        """Answers an open question and then the lines of standard input. Returns the exit status.

        Prints user errors on a terminal. Elsewhere they end the conversation, as Ctrl-C does.
        """
        if self._typed:
            self._show_legend()
            about = f"{self.name}, sampler {self.request.sampler.name}, context {self.context}"
            self._say(f"{about} tokens. /help lists the commands.")
        with deferred_interrupts(self._stop) as self._pressed:
            for line in self._lines():
                try:
                    self._take(line)
                except UserError as error:
                    if not self._typed:
                        raise
                    self._say(f"error: {error}")
                if self._pressed and not self._typed:
                    break
            return EXIT_INTERRUPT if self._pressed else EXIT_OK

    def _lines(self) -> Iterator[str]:
        """Yields an open question, and the lines of standard input. A line that ends with a
        backslash continues in the next one."""
        _prepare_input(self._typed)
        if self.messages and self.messages[-1]["role"] == "user":
            yield f" {self.messages.pop()['content']}"  # not a command
        text = ""
        while (line := self._line("... " if text else "> ")) is not None:
            if line.endswith("\\"):
                text += f"{line[:-1]}\n"
            else:
                yield "" if self._pressed else text + line
                text = ""
        if text:
            yield text.removesuffix("\n")

    def _line(self, prompt: str) -> str | None:
        """Returns a line of standard input, None at its end. On a terminal Ctrl-C discards the
        typed line and returns an empty one."""
        self._pressed.clear()
        if self._typed and not is_terminal(sys.stdout):  # which is only for answers
            print(prompt, end="", file=sys.stderr, flush=True)
        try:
            with leave_on_interrupt():
                return input(prompt if self._typed and is_terminal(sys.stdout) else "")
        except UnicodeDecodeError:
            raise UserError("standard input: not UTF-8") from None
        except EOFError:
            if self._typed:
                print(file=sys.stderr)
            return "" if self._typed and self._pressed else None

    def _take(self, line: str) -> None:
        """Runs a command or answers a question."""
        if not line.strip():
            return
        if not line.startswith("/"):
            self._answer([*self.messages, {"role": "user", "content": line.strip()}])
            return
        name, _, argument = line.strip().partition(" ")
        if name not in _COMMANDS:
            hint = "/help lists them; a space before it makes it a message"
            raise UserError(f"no command '{name}'{nearest(name, [*_COMMANDS])} ({hint})")
        expected, _, run = _COMMANDS[name]
        if argument and not expected:
            raise UserError(f"{name} takes no argument")
        run(self, argument.strip())

    def _say(self, line: str, style: str = "") -> None:
        self._err.print(Text(printable(line), style))

    def _show_legend(self) -> None:
        print_legend(self.request.sampler.values, actions=self.actions)

    def _stop(self) -> None:
        # After the end of a run, a stop would end the next one.
        if self._running is not None and self._running.finish_reason is None:
            self._engine.stop()

    def _answer(self, messages: Messages, retries: int = 0) -> None:
        """Generates and shows the answer to the last message. Then the conversation is the messages
        and the answer, unless it failed or was stopped before its first word."""
        prompt = self.model.tokenizer.apply_chat(messages, escape=True)
        if len(prompt) >= self.context:
            hint = "/back removes a turn, --context gives more room"
            raise UserError(f"the context is full: {len(prompt)} of {self.context} tokens ({hint})")
        seed = self.request.seed + retries
        status = StatusLine()
        ask = asker(status) if self.asks else None
        request = replace(self.request, prompt=prompt, seed=seed, messages=messages, ask=ask)
        request = replace(request, clarify=may_ask(messages))
        generation = Generation(self.model, [request], engine=self._engine)
        (row,) = generation.rows
        screen = TextScreen(status, actions=self.actions)

        self._running, programs = row, self._engine.programs
        speed = Speed(lambda: generation.seconds() - programs.waited)
        try:
            with show_waits(status, lambda: programs):
                for events in (generation.__iter__, generation.interrupt):
                    for event in events():
                        speed.add(event.token is not None and not event.retracted)
                        for piece in event.pieces:
                            screen.show(piece.text, piece.token)
        finally:
            screen.end_text()
        if row.error is not None:
            raise UserError(row.error)
        if row.text or row.finish_reason != "interrupt":
            self.messages = [*messages, {"role": "assistant", "content": row.text}]
            self._answered, self._retries = generation.rows, retries
        if not self.quiet:
            used = f"context {len(prompt) + len(row.tokens)}/{self.context}"
            again = f"seed {seed}" if retries else ""
            self._say(summary(generation.rows, speed.value, used, again), "dim")
        if self._typed:
            self._say("")

    # Commands

    def _last_question(self) -> int:
        """Returns the index of the last question. UserError if there is none."""
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise UserError("there is no turn yet")
        return asked[-1]

    def _retry(self, _: str) -> None:
        self._answer(self.messages[: self._last_question() + 1], self._retries + 1)

    def _back(self, _: str) -> None:
        at = self._last_question()
        question = " ".join(self.messages[at]["content"].split())
        del self.messages[at:]
        self._answered, self._retries = None, 0
        self._say(f"taken back: {question if len(question) <= 50 else f'{question[:47]}...'}")

    def _instruct(self, text: str) -> None:
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest
        self._say("the system message is set" if text else "there is no system message any more")

    def _choose(self, name: str) -> None:
        self._use(replace(self.options.with_settings(), sampler=name) if name else self.options)

    def _set(self, setting: str) -> None:
        key, equals, value = setting.partition("=")
        key = f"sampler.{key.strip().removeprefix('sampler.')}{equals}"
        others = (one for one in self.options.settings if not one.startswith(key))
        self._use(self.options.with_settings(*others, f"{key}{value.strip()}"))

    def _use(self, options: ModelOptions) -> None:
        """Uses the sampler of the options for the next answers. UserError if the model cannot."""
        sampler = calibrate_sampler(options.choose_sampler(), self.model)
        self.request, self.options = replace(self.request, sampler=sampler), options
        for note in sampler.notes:
            self._say(f"note: {note}")
        self._say(" ".join(["sampler", sampler.name, *options.settings]))
        if self._typed:
            self._show_legend()

    def _save(self, name: str) -> None:
        path = Path(name)
        if path.suffix not in (".json", ".jsonl", ".html"):
            raise UserError("/save FILE: the name must end in .json, .jsonl or .html (see /help)")
        check_writable(path)
        if path.suffix == ".json":
            with replacing(path) as scratch:
                text = json.dumps(self.messages, ensure_ascii=False, indent=1)
                scratch.write_text(f"{text}\n", encoding="utf-8")
        elif (rows := self._answered) is None or rows.header is None:
            raise UserError("there is no answer of this session to save")
        else:
            rows.header = {**rows.header, "model": self.name}
            (rows.save_trace if path.suffix == ".jsonl" else rows.save_report)(path)
        self._say(f"saved: {path}")

    def _help(self, _: str) -> None:
        for name, (argument, meaning, _run) in _COMMANDS.items():
            self._say(f"{f'{name} {argument}':<21}{meaning}")
        self._say("Ctrl-C stops an answer. A line that ends with \\ continues on the next line.")

    def _quit(self, _: str) -> None:
        raise SystemExit


# By name: the argument, what the command does, and its function.
_COMMANDS: dict[str, tuple[str, str, Callable[[Session, str], None]]] = {
    "/sampler": ("[NAME|FILE]", "use another sampler; without a name, show it", Session._choose),
    "/set": ("KEY=VALUE", "change a setting of the sampler", Session._set),
    "/retry": ("", "answer the last question again with the next seed", Session._retry),
    "/back": ("", "remove the last question and its answer", Session._back),
    "/system": ("[TEXT]", "set the system message; without a text, remove it", Session._instruct),
    "/save": ("FILE", "the conversation (.json), the last answer (.jsonl, .html)", Session._save),
    "/help": ("", "show this list", Session._help),
    "/quit": ("", "end the chat (or Ctrl-D)", Session._quit),
}


def _prepare_input(typed: bool) -> None:
    """Prepares standard input: UTF-8, and on a terminal editing and pasting."""
    if not isinstance(sys.stdin, io.TextIOWrapper):
        raise UserError("standard input is closed: questions are read from it")
    sys.stdin.reconfigure(encoding="utf-8-sig")
    if typed:
        with contextlib.suppress(ImportError):  # not on every system
            import readline

            # Pasted text is one message. Python switches this off.
            readline.parse_and_bind("set enable-bracketed-paste on")
