"""From what happens to rows to the API's answers: choices, parts of them, usage."""

import math
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from entropix_jax.engine.score import ScoredToken
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.model.loading import LanguageModel
from entropix_jax.serve.schema import ApiError
from entropix_jax.serve.wanted import Prompt, Wanted
from entropix_jax.serve.worker import Update

# The API knows two reasons for an end. The row's own is under `entropix`.
_REASONS = {"eos": "stop", "stop": "stop", "confidence": "stop"}
_LEAST = -9999.0  # stands for minus infinity, as in the API
_OF_TRACES = {"row", "top", "layers"}  # fields of a token that an answer leaves out

AnyToken = TokenRecord | ScoredToken


class Choice:
    """One choice of an answer, which comes part by part; `chat` says in which form."""

    def __init__(
        self, model: LanguageModel, wanted: Wanted, index: int, prompt: Prompt, *, chat: bool
    ) -> None:
        self.index = index
        self.counts: Counter[str] = Counter()  # of tokens, retracted ones and forwards
        self._tokenizer = model.tokenizer
        self._wanted = wanted
        self._prompt = prompt
        self._chat = chat
        self._offset = 0  # characters so far
        self.kept: str | None = None  # the id of its row, where that is kept
        self._began = False

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self._wanted.top is not None

    def echo(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        """The part that repeats the prompt; `scored` are its tokens but the first, if they are
        asked for."""
        logprobs: dict[str, list[Any]] | None = None
        if self.has_logprobs:
            first, *others = self._prompt.texts(self._tokenizer)
            logprobs = {
                "tokens": [self._tokenizer.decode_within(self._prompt.tokens[:1])],
                "token_logprobs": [None],
                "top_logprobs": [None],
                "text_offset": [0],
            }
            self._offset = len(first)
            for name, values in self._logprobs(scored, others).items():
                logprobs[name].extend(values)
        self._offset = len(self._prompt.text)
        end = None if self._wanted.rows else "length"
        return {
            "index": self.index,
            "text": self._prompt.text,
            "logprobs": logprobs,
            "finish_reason": end,
        }

    def part(self, updates: Sequence[Update]) -> dict[str, Any]:
        """What some updates add. ApiError where the row failed."""
        reason = updates[-1].finish_reason
        if reason == "error":
            raise ApiError(str(updates[-1].error), status=500)
        tokens = [one.token for one in updates if one.token and not one.retracted]
        self.counts["completion_tokens"] += len(tokens)
        self.counts["retracted"] += sum(one.retracted for one in updates)
        if tokens:
            before = 0 if self._wanted.begun is None else self._wanted.begun.forwards
            self.counts["forwards"] = tokens[-1].forwards - before
        text = "".join(piece.text for one in updates for piece in one.pieces)
        logprobs = None
        if self.has_logprobs:
            logprobs = {"content": self._content(tokens)} if self._chat else self._logprobs(tokens)
        own = self._own(updates, reason)
        return {
            "index": self.index,
            **({"delta": {"content": text}} if self._chat else {"text": text}),
            "logprobs": logprobs,
            "finish_reason": None if reason is None else _REASONS.get(reason, "length"),
            **({"entropix": own} if own else {}),
        }

    def _own(self, updates: Sequence[Update], reason: str | None) -> dict[str, Any]:
        """The key `entropix` of a part."""
        asked = self._wanted.own
        own: dict[str, Any] = {}
        tokens, without = asked.tokens or asked.details, () if asked.details else _OF_TRACES
        if tokens or asked.retractions:
            own["tokens"] = [
                one.token.to_json(retracted=one.retracted, without=without)
                for one in updates
                if one.token and (asked.retractions if one.retracted else tokens)
            ]
        if self.kept is not None and (reason is not None or not self._began):
            own["row"] = self.kept
        self._began = True
        if reason is not None:
            own |= {"finish_reason": reason, "seed": self._wanted.request.seed}
        return own

    # Log-probabilities

    def _logprobs(
        self, tokens: Iterable[AnyToken], texts: Iterable[str] | None = None
    ) -> dict[str, list[Any]]:
        """In the form of completions. `texts` are what the tokens add to the choice's text, if that
        is not their own."""
        lengths = iter([]) if texts is None else map(len, texts)
        found: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        for token in tokens:
            text = self._tokenizer.decode_within([token.token_id])
            found["tokens"].append(text)
            found["token_logprobs"].append(token.logprob)
            # The token is among them, likely or not, by the very same number.
            found["top_logprobs"].append(
                {**{text: p for _, text, p in reversed(self._top(token))}, text: token.logprob}
            )
            found["text_offset"].append(self._offset)
            self._offset += next(lengths, len(token.text))
        return found

    def _content(self, tokens: Iterable[AnyToken]) -> list[dict[str, Any]]:
        """In the form of chats."""
        return [
            {
                **self._named(
                    token.token_id, self._tokenizer.decode_within([token.token_id]), token.logprob
                ),
                "top_logprobs": [self._named(*one) for one in self._top(token)],
            }
            for token in tokens
        ]

    def _named(self, token_id: int, text: str, logprob: float) -> dict[str, Any]:
        """A token by its text, and by its bytes: those of a part of a character have no text."""
        data = [*self._tokenizer.token_bytes(token_id)]
        return {"token": text, "logprob": logprob, "bytes": data}

    def _top(self, token: AnyToken) -> list[tuple[int, str, float]]:
        """The likeliest tokens as asked for, with log-probabilities in nats."""
        top = (token.top or [])[: self._wanted.top or 0]
        return [
            (i, text, token.logprob if i == token.token_id else math.log(p) if p > 0 else _LEAST)
            for i, text, p in top
        ]


@dataclass
class Answer:
    """The choices of an answer, and what all its parts begin with."""

    name: str
    chat: bool
    choices: list[Choice]
    prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    warnings: Sequence[str] = ()

    def frame(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        """An answer, or a chunk of one, with some choices."""
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.name,
            "choices": choices,
            **({"warnings": [*self.warnings]} if self.warnings else {}),
        }

    def usage(self) -> dict[str, int]:
        """What the answer took; prompts count once."""
        counts = sum((choice.counts for choice in self.choices), Counter[str]())
        new = counts["completion_tokens"]
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            "forwards": counts["forwards"],
            "retracted": counts["retracted"],
        }

    def whole(self, parts: Mapping[int, Sequence[dict[str, Any]]]) -> dict[str, Any]:
        """The answer that is not streamed, of the parts of each choice."""
        return self.frame([self._join(parts[c.index]) for c in self.choices], chunk=False) | {
            "usage": self.usage()
        }

    def _join(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One choice of its parts: an echo, and all updates at once."""
        joined = dict(parts[-1])
        if self.chat:
            content = joined.pop("delta")["content"]
            joined["message"] = {"role": "assistant", "content": content, "refusal": None}
            return joined
        joined["text"] = "".join(part["text"] for part in parts)
        if joined["logprobs"] is not None:
            joined["logprobs"] = {
                name: [one for part in parts for one in part["logprobs"][name]]
                for name in joined["logprobs"]
            }
        return joined
