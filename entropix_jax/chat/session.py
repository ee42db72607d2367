"""A chat as a person sees it: lines in, answers in the colours of their regimes, and commands."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from entropix_jax.chat.dialogue import Dialogue, Turn
from entropix_jax.chat.lines import Lines, ctrl_c
from entropix_jax.cli.options import EXIT_OK
from entropix_jax.cli.status import StatusLine
from entropix_jax.cli.terminal import TextScreen, print_legend
from entropix_jax.engine.preparation import calibrate_sampler
from entropix_jax.errors import UserError, check_range, nearest, printable
from entropix_jax.host.files import check_writable, replacing
from entropix_jax.host.interrupts import EXIT_INTERRUPT, deferred_interrupts
from entropix_jax.names import MEANINGS, REGIMES
from entropix_jax.report.page import check_report
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.presets import load_sampler, parse_setting
from entropix_jax.sampler.sampler import Sampler

_NUMBERS = {"seed": None, "max_new_tokens": 1}  # what `/set` takes besides settings, at least

_ENDS = {"interrupt": "stopped", "length": "token limit", "stop": "stop string"}


class _Command(NamedTuple):
    argument: str
    meaning: str
    run: Callable[["Session", str], None]


class Session:
    """Asks, answers and obeys until the lines end."""

    def __init__(
        self,
        dialogue: Dialogue,
        sampler: Sampler,
        settings: Sequence[str],
        *,
        own: Sequence[Mechanism] = (),
        name: str,
        quiet: bool = False,
    ) -> None:
        """`sampler` is the dialogue's before its calibration, with a command line's `settings`;
        `own` are the user's mechanisms. `name` is the model's. With `quiet` no line of figures
        follows an answer."""
        self._dialogue = dialogue
        self._sampler = sampler
        self._settings = [setting.removeprefix("sampler.") for setting in settings]
        self._own = own
        self._name = name
        self._quiet = quiet
        self._lines = Lines()
        self._err = Console(stderr=True, highlight=False)
        self._err.soft_wrap = not self._err.is_terminal
        self._left = False
        self._interrupted = False

    def greet(self) -> None:
        """Tells a person what the colours mean, with whom they talk, and how to end it."""
        if TextScreen().coloured:
            print_legend()
        context = f"context {self._dialogue.context} tokens"
        self._say(
            f"{self._name}, sampler {self._sampler.name}, {context}. /help lists the commands."
        )

    def run(self, question: str | None = None) -> int:
        """Runs the chat, beginning with a question that has no answer yet. Returns the exit status.
        What a person gets wrong is told, and the chat goes on; where nobody types, it ends the
        chat, as Ctrl-C does: UserError."""
        if not self._lines.typed:
            return self._run(question)
        with ctrl_c(lambda number, frame: None):  # the conversation would be lost
            return self._run(question)

    def _run(self, question: str | None) -> int:
        line = None if question is None else f" {question}"  # no command
        while True:
            try:
                if line is None and (line := self._lines.read()) is None:
                    return EXIT_OK
                self._take(line)
            except UserError as error:
                if not self._lines.typed:
                    raise
                self._say(f"error: {error}")
            if self._left:
                return EXIT_OK
            if self._interrupted and not self._lines.typed:
                return EXIT_INTERRUPT
            line = None

    def _take(self, line: str) -> None:
        """Obeys a command, or asks a question."""
        if not line.strip():
            return
        if not line.startswith("/"):
            self._answer(self._dialogue.question(line.strip()))
            return
        name, _, argument = line.partition(" ")
        if name not in _COMMANDS:
            hint = "/help lists them; a space before it makes it a message"
            raise UserError(f"no command '{name}'{nearest(name, [*_COMMANDS])} ({hint})")
        command, argument = _COMMANDS[name], argument.strip()
        if argument and not command.argument:
            raise UserError(f"{name} takes no argument")
        command.run(self, argument)

    def _say(self, line: str, style: str = "") -> None:
        self._err.print(Text(printable(line), style))

    # Answers

    def _answer(self, turn: Turn) -> None:
        """Generates an answer and shows it while it grows."""
        row = turn.row
        assert row is not None
        status = StatusLine()
        screen = TextScreen(status)
        begun = self._dialogue.engine.steps > 0
        status.show(f"{'reading' if begun else 'compiling and reading'} ... (Ctrl-C stops it)")
        with deferred_interrupts(self._dialogue.stop) as pressed:
            try:
                for event in self._dialogue.run(turn):
                    for piece in event.pieces:
                        screen.show(piece.text, piece.token)
            finally:
                status.clear()
                screen.end_text()
        self._interrupted = bool(pressed)
        if row.error is not None:
            raise UserError(row.error)
        if self._dialogue.turns[turn.at : turn.at + 1] != [turn]:
            self._say("stopped before the first word: nothing has changed")
        elif not self._quiet:
            self._say(self.figures(turn), "dim")
        if row.finish_reason == "context":
            self._say("the context is full: /back takes turns back, --context gives more room")
        if self._lines.typed:
            self._say("")

    def figures(self, turn: Turn) -> str:
        """Figures of an answer, on one line: tokens, speed, mean entropy, regimes, how much of the
        context is used, and an unusual seed or end. The speed leaves out the first token."""
        row = turn.row
        assert row is not None
        count, reason = len(row.tokens), str(row.finish_reason)
        seconds = turn.timings["total"] - turn.timings.get("first_token", 0.0)
        speed = f" ({(count - 1) / seconds:.0f} tok/s)" if count > 1 else ""
        entropy = sum(token.entropy for token in row.tokens) / max(count, 1)
        regimes = {MEANINGS[r]: sum(token.regime == r for token in row.tokens) for r in REGIMES}
        shares = " ".join(f"{name} {n / count:.0%}" for name, n in regimes.items() if n)
        parts = [
            f"{count} token{'' if count == 1 else 's'}{speed}",
            f"{entropy:.2f} bits",
            shares,
            f"context {len(row.request.prompt) + count}/{self._dialogue.context}",
            *([f"seed {turn.seed}"] if turn.seed != self._dialogue.seed else []),
            *([_ENDS.get(reason, f"ended by {reason}")] if reason != "eos" else []),
        ]
        return " | ".join(filter(None, parts))

    # Commands

    def _choose(self, name: str) -> None:
        if name:
            self._use(load_sampler(name, self._own), [])
        self._tell_sampler()

    def _set(self, setting: str) -> None:
        key, equals, value = (part.strip() for part in setting.partition("="))
        if setting and not equals:
            raise UserError(f"/set {setting}: expected KEY=VALUE")
        if key in _NUMBERS:
            try:
                number = int(value)
            except ValueError:
                raise UserError(f"{key} must be a whole number, not '{value}'") from None
            if (least := _NUMBERS[key]) is not None:
                check_range(key, number, least)
            setattr(self._dialogue, key, number)
        elif setting:
            key = key.removeprefix("sampler.")
            name, parsed = parse_setting(f"sampler.{key}={value}")
            kept = [one for one in self._settings if one.partition("=")[0] != key]
            self._use(self._sampler.with_values({name: parsed}), [*kept, f"{key}={value}"])
        self._tell_sampler()

    def _use(self, sampler: Sampler, settings: list[str]) -> None:
        """Takes a sampler for the answers to come, if it can be used."""
        self._dialogue.sampler = calibrated = calibrate_sampler(sampler, self._dialogue.model)
        self._sampler, self._settings = sampler, settings
        for note in calibrated.notes:
            self._say(f"note: {note}")

    def _tell_sampler(self) -> None:
        numbers = [f"{name}={getattr(self._dialogue, name)}" for name in _NUMBERS]
        self._say(f"sampler {self._sampler.name}: {', '.join([*self._settings, *numbers])}")

    def _instruct(self, text: str) -> None:
        self._dialogue.system = text or None
        self._say("the system message is set" if text else "there is no system message any more")

    def _retry(self, _: str) -> None:
        self._answer(self._dialogue.retry())

    def _back(self, _: str) -> None:
        question = " ".join(self._dialogue.back().question.split())
        shown = question if len(question) <= 50 else f"{question[:47]}..."
        self._say(f"taken back: {shown} ({len(self._dialogue.turns)} left)")

    def _save(self, name: str) -> None:
        path = Path(name)
        if path.suffix == ".json":
            check_writable(path)
            messages = self._dialogue.messages()
            with replacing(path) as scratch:
                text = json.dumps(messages, ensure_ascii=False, indent=1)
                scratch.write_text(f"{text}\n", encoding="utf-8")
        elif path.suffix == ".jsonl":
            check_writable(path)
            self._dialogue.rows(self._name).save_trace(path)
        elif path.suffix == ".html":
            check_report(path)
            self._dialogue.rows(self._name).save_report(path)
        else:
            raise UserError("/save FILE: its name ends in .json, .jsonl or .html (see /help)")
        self._say(f"saved: {path}")

    def _help(self, _: str) -> None:
        for name, command in _COMMANDS.items():
            self._say(f"{f'{name} {command.argument}':<21}{command.meaning}")
        self._say("Ctrl-C stops an answer. A line that ends with \\ continues on the next line.")

    def _quit(self, _: str) -> None:
        self._left = True


_COMMANDS = {
    "/sampler": _Command(
        "[NAME|FILE]", "use another sampler; without a name, show the current one", Session._choose
    ),
    "/set": _Command("KEY=VALUE", "change a sampler setting, seed or max_new_tokens", Session._set),
    "/retry": _Command("", "answer the last question again with the next seed", Session._retry),
    "/back": _Command("", "remove the last question and its answer", Session._back),
    "/system": _Command(
        "[TEXT]", "set the system message; without a text, remove it", Session._instruct
    ),
    "/save": _Command(
        "FILE", "save the conversation (.json) or the last answer (.jsonl, .html)", Session._save
    ),
    "/help": _Command("", "show this list", Session._help),
    "/quit": _Command("", "end the chat (or Ctrl-D)", Session._quit),
}
