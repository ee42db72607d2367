"""A conversation with a model: its turns, and the engine that keeps what it has read of them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entropix_jax.engine.engine import Engine
from entropix_jax.engine.preparation import CalibratedSampler
from entropix_jax.engine.results import Event, Request, Row, Rows
from entropix_jax.engine.state import Recording
from entropix_jax.engine.trace import header
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel


@dataclass
class Turn:
    """A question and its answer. `at` is its index among the turns, `seed` that of its answer,
    `row` its run, None of an answer that was read from a file."""

    at: int
    question: str
    seed: int
    answer: str = ""
    row: Row | None = None
    timings: dict[str, float] = field(default_factory=dict)  # seconds, as those of `Rows`


class Dialogue:
    """The turns so far, and what the next answer is generated with: attributes that may be
    changed at any time. A turn reads only what the one before has not cached.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampler: CalibratedSampler,
        *,
        context: int,
        system: str | None = None,
        seed: int = 0,
        max_new_tokens: int = 256,
        stop: Sequence[str] = (),
        recording: Recording | None = None,
    ) -> None:
        """`context` is the most tokens of the conversation. UserError if the model has no chat
        template, or the cache does not fit into memory."""
        if model.tokenizer.chat_template is None:
            told = "it cannot chat (entropix-jax generate continues a text)"
            raise UserError(f"{model.folder}: this model has no chat template: {told}")
        self.turns: list[Turn] = []
        self.sampler = sampler
        self.system = system
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.context = context
        self.model = model
        self.engine = Engine(model, slots=1, capacity=context, recording=recording, keep=True)
        self._stop = stop
        self._running: Row | None = None

    def messages(self, until: Turn | None = None) -> list[dict[str, str]]:
        """The conversation as a chat's messages: all of it, or up to the question of a turn."""
        told = [] if self.system is None else [_message("system", self.system)]
        for turn in self.turns if until is None else self.turns[: until.at]:
            told += [_message("user", turn.question), _message("assistant", turn.answer)]
        return told if until is None else [*told, _message("user", until.question)]

    def question(self, text: str) -> Turn:
        """A turn that asks a question. UserError if the conversation has no room for an answer."""
        return self._begin(Turn(len(self.turns), text, self.seed))

    def retry(self) -> Turn:
        """A turn that asks the last question again, with the next seed. UserError if there is
        none."""
        last = self.last()
        return self._begin(Turn(last.at, last.question, last.seed + 1))

    def back(self) -> Turn:
        """Takes the last turn back. UserError if there is none."""
        self.last()
        return self.turns.pop()

    def last(self) -> Turn:
        """The last turn. UserError if there is none."""
        if not self.turns:
            raise UserError("there is no turn yet")
        return self.turns[-1]

    def _begin(self, turn: Turn) -> Turn:
        prompt = self.model.tokenizer.apply_chat(self.messages(turn), escape=True)
        if len(prompt) >= self.context:
            raise UserError(
                f"the context is full: the conversation has {len(prompt)} tokens, {self.context} "
                "are possible (/back takes turns back, --context gives more room)"
            )
        request = Request(
            prompt,
            self.sampler,
            max_new_tokens=self.max_new_tokens,
            seed=turn.seed,
            eos_ids=self.model.end_ids(chat=True),
            stop=self._stop,
            messages=self.messages(turn),
        )
        turn.row = Row(request)
        return turn

    def run(self, turn: Turn) -> Iterator[Event]:
        """Generates the answer of a turn that has begun, and yields its events. Once it has ended
        the turn is the conversation's last, in place of the one that was asked again. One that
        failed, or was stopped before its first word, changes nothing."""
        row = turn.row
        assert row is not None
        start = time.perf_counter()
        self._running = row
        try:
            for event in self.engine.run([row]):
                if event.token is not None:
                    turn.timings.setdefault("first_token", time.perf_counter() - start)
                yield event
            yield from self.engine.interrupt()  # where it was stopped
        finally:
            self._running = None
        turn.timings["total"] = time.perf_counter() - start
        turn.answer = row.text
        if row.error is None and (row.text or row.finish_reason != "interrupt"):
            self.turns[turn.at :] = [turn]

    def stop(self) -> None:
        """Ends the answer that is being generated, as "interrupt". A signal handler may call it."""
        # A run that is over would leave it to the next one.
        if self._running is not None and self._running.finish_reason is None:
            self.engine.stop()

    def rows(self, name: str) -> Rows:
        """The last answer as a run of one row, whose trace names the model so. UserError if there
        is none, or it was not generated here."""
        turn = self.last()
        if turn.row is None:
            raise UserError("the last answer was not generated here: it has no trace")
        one = turn.row.request
        told = header(
            self.model, one.sampler, one.prompt, seed=turn.seed, name=name, messages=one.messages
        )
        return Rows([turn.row], told, turn.timings)


def turns_of(messages: object, where: Path, seed: int) -> tuple[str | None, list[Turn], str | None]:
    """The system message, the turns, and a last question without answer, of a list of messages, in
    the manner of `Dialogue.messages`. UserError, which names the file `where`, if it is none."""
    from entropix_jax.text.chat_template import plain_messages

    try:
        plain = plain_messages(messages)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    system, question = None, None
    turns: list[Turn] = []
    for number, message in enumerate(plain, start=1):
        role, content = message["role"], message["content"]
        wanted = ["user" if question is None else "assistant", *(["system"] if number == 1 else [])]
        if role not in wanted:
            expected = " or ".join(wanted)
            raise UserError(f"{where}: message {number}: expected a text of role {expected}")
        if role == "system":
            system = content
        elif question is None:
            question = content
        else:
            turns.append(Turn(len(turns), question, seed, content))
            question = None
    return system, turns, question


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
