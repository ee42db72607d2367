"""From updates of rows to the API's answers: choices, chunks of a stream, usage."""

import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from entropix_jax.engine.score import ScoredToken
from entropix_jax.engine.search import Outcome
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.serve.model import ServedModel
from entropix_jax.serve.request import GenerationRequest
from entropix_jax.serve.schema import ApiError
from entropix_jax.serve.worker import Update

# The API has two finish reasons. `entropix.finish_reason` is the row's own.
_REASONS = {"eos": "stop", "stop": "stop", "confidence": "stop", "question": "stop"}
_MIN_LOGPROB = -9999.0  # in place of minus infinity, as in the API
# Of a token, omitted unless details are requested.
_TRACE_FIELDS = {"row", "top", "layers", "layers_varentropy", "attention"}

AnyToken = TokenRecord | ScoredToken
Updates = AsyncIterator[tuple[int, list[Update]]]  # each with the index of its row


class Choice:
    """One choice of an answer, made in parts."""

    def __init__(self, served: ServedModel, request: GenerationRequest, index: int) -> None:
        self.index = index
        self.counts: Counter[str] = Counter()  # generated and retracted tokens, forwards
        self.row_id: str | None = None  # of its kept row
        self.row_ids: list[str] = []  # of the kept rows: its own, or all continuations of a search
        self.echo: dict[str, Any] | None = None  # the part that repeats the prompt
        self._tokenizer = served.model.tokenizer
        self._request = request
        self._offset = 0  # characters so far
        self._has_part = False
        prefix = request.requests[index].prefix if request.requests else ()
        before = [token.forwards for token, retracted in prefix if not retracted]
        self._forwards_before = max(before, default=0)  # of the row that this one continues

    def set_echo(self, scored: Sequence[ScoredToken]) -> None:
        """Makes the part that repeats the prompt, whose tokens but the first are `scored` if the
        request asks for log-probabilities."""
        prompt = self._request.prompts[self.index // self._request.body.n]
        logprobs: dict[str, list[Any]] | None = None
        if self._request.top is not None:
            texts = prompt.texts(self._tokenizer)
            logprobs = self._logprobs(zip(prompt.tokens, [None, *scored], texts, strict=True))
        self._offset = len(prompt.text)
        end = None if self._request.requests else "length"
        self.echo = {"index": self.index, "text": prompt.text, "logprobs": logprobs}
        self.echo["finish_reason"] = end

    def first_delta(self) -> dict[str, Any]:
        """Returns the first part of a streamed chat."""
        delta, own = {"role": "assistant", "content": ""}, {"entropix": {"row": self.row_id}}
        part = {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return part if self.row_id is None else part | own

    def part(self, updates: Sequence[Update]) -> dict[str, Any]:
        """Returns the part of some updates.

        Raises:
            ApiError: the row failed.
        """
        reason, chat = updates[-1].finish_reason, self._request.chat
        if reason == "error":
            raise ApiError(str(updates[-1].error), status=500)
        tokens = [one.token for one in updates if one.token and not one.retracted]
        self.counts["completion_tokens"] += len(tokens)
        self.counts["retracted"] += sum(one.retracted for one in updates)
        if tokens:
            self.counts["forwards"] = tokens[-1].forwards - self._forwards_before
        if (outcome := updates[-1].outcome) is not None:
            self.counts["forwards"] = outcome.forwards
        text = "".join(piece.text for one in updates for piece in one.pieces)
        logprobs: dict[str, Any] | None = None
        if self._request.top is not None:
            entries = ((token.token_id, token, token.text) for token in tokens)
            logprobs = {"content": self._content(tokens)} if chat else self._logprobs(entries)
        own = self._own(updates, reason)
        return {
            "index": self.index,
            **({"delta": {"content": text}} if chat else {"text": text}),
            "logprobs": logprobs,
            "finish_reason": None if reason is None else _REASONS.get(reason, "length"),
            **({"entropix": own} if own else {}),
        }

    def _own(self, updates: Sequence[Update], reason: str | None) -> dict[str, Any]:
        """Returns the value of a part's key `entropix`."""
        log = [(one.token, one.retracted) for one in updates if one.token]
        own: dict[str, Any] = {**self._tokens(log)}
        for update in updates:
            own |= {} if update.choice is None else {"choice": update.choice}
        if self.row_id is not None and (reason is not None or not self._has_part):
            own["row"] = self.row_id
        self._has_part = True
        if reason is not None:
            seed = self._request.requests[self.index].seed
            own |= {"finish_reason": reason, "seed": seed}
        if (outcome := updates[-1].outcome) is not None:
            own |= self._search(outcome)
        return own

    def _tokens(self, log: Iterable[tuple[TokenRecord, bool]]) -> dict[str, Any]:
        """Returns the key `tokens` for tokens and whether each was retracted, if requested."""
        options = self._request.body.entropix
        tokens = options.tokens or options.details
        if not tokens and not options.retractions:
            return {}
        without = () if options.details else _TRACE_FIELDS
        return {
            "tokens": [
                token.to_json(retracted=retracted, without=without)
                for token, retracted in log
                if (options.retractions if retracted else tokens)
            ]
        }

    def _search(self, outcome: Outcome) -> dict[str, Any]:
        """Returns the keys of a search. Its continuations refer to each other by index."""
        found = outcome.to_json()
        for one, row in zip(found["continuations"], outcome.rows, strict=True):
            index, first = one.pop("row"), len(row.request.prompt)
            one |= {"row": self.row_ids[index]} if self.row_ids else {}
            one |= self._tokens(row.log[one.get("position", first) - first :])
        names = ("chosen", "answer", "votes", "continuations")
        return {"method": self._request.body.entropix.method} | {n: found[n] for n in names}

    # Log-probabilities

    def _logprobs(self, tokens: Iterable[tuple[int, AnyToken | None, str]]) -> dict[str, list[Any]]:
        """Returns log-probabilities in the form of completions. Each entry is a token id, its
        record (None for a prompt's first token), and the text that the token adds to the choice."""
        found: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        for token_id, token, added in tokens:
            text = self._tokenizer.decode_within([token_id])
            top: dict[str, float] | None = None
            if token is not None:
                top = {text: logprob for _, text, logprob in reversed(self._top(token))}
                top[text] = token.logprob  # includes the token, with this very log-probability
            found["tokens"].append(text)
            found["token_logprobs"].append(None if token is None else token.logprob)
            found["top_logprobs"].append(top)
            found["text_offset"].append(self._offset)
            self._offset += len(added)
        return found

    def _content(self, tokens: Iterable[AnyToken]) -> list[dict[str, Any]]:
        """Returns log-probabilities in the form of chats."""
        found = []
        for token in tokens:
            text = self._tokenizer.decode_within([token.token_id])
            one = self._entry(token.token_id, text, token.logprob)
            found.append({**one, "top_logprobs": [self._entry(*top) for top in self._top(token)]})
        return found

    def _entry(self, token_id: int, text: str, logprob: float) -> dict[str, Any]:
        # A part of a character has bytes, but no text.
        data = [*self._tokenizer.token_bytes(token_id)]
        return {"token": text, "logprob": logprob, "bytes": data}

    def _top(self, token: AnyToken) -> list[tuple[int, str, float]]:
        """Returns the requested alternatives, with log-probabilities in nats."""
        return [
            (i, text, token.logprob if i == token.token_id else math.log(p) if p else _MIN_LOGPROB)
            for i, text, p in (token.top or [])[: self._request.top or 0]
        ]


class Answer:
    """The answer to a generation request, whole or as a stream of chunks."""

    def __init__(
        self, served: ServedModel, request: GenerationRequest, warnings: Mapping[str, Any]
    ) -> None:
        self.id = secrets.token_hex(12)
        self.request = request
        self._warnings = warnings
        number = len(request.prompts) * request.body.n
        self.choices = [Choice(served, request, index) for index in range(number)]
        kind = ("chatcmpl", "chat.completion") if request.chat else ("cmpl", "text_completion")
        common = {"id": f"{kind[0]}-{self.id}", "object": kind[1], "created": int(time.time())}
        self._common = common | {"model": served.name}

    def usage(self) -> dict[str, int]:
        """Returns token counts. Prompts count once."""
        counts = sum((choice.counts for choice in self.choices), Counter[str]())
        read = sum(len(one.tokens) for one in self.request.prompts)
        new = counts["completion_tokens"]
        tokens = {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}
        return tokens | {name: counts[name] for name in ("forwards", "retracted")}

    async def chunks(self, updates: Updates) -> AsyncIterator[dict[str, Any]]:
        """Yields the chunks of a stream. A chunk has all tokens of a row since the last one. With
        log-probabilities it has at most one, because clients that show them expect that."""
        usage, chat = self.request.body.stream_options.include_usage, self.request.chat
        single = self.request.top is not None
        common = self._common | ({"object": "chat.completion.chunk"} if chat else {})

        def chunk(*choices: dict[str, Any]) -> dict[str, Any]:
            found = {**common, "choices": [*choices], **self._warnings}
            return found | ({"usage": None} if usage else {})

        for choice in self.choices:
            if chat:
                yield chunk(choice.first_delta())
            if choice.echo is not None:
                yield chunk(choice.echo)
        async for index, some in updates:
            choice = self.choices[index]
            for part in ([one] for one in some) if single else (some,):
                yield chunk(choice.part(part))
        if usage:
            yield chunk() | {"usage": self.usage()}

    async def whole(self, updates: Updates) -> dict[str, Any]:
        """Returns the answer that is not streamed."""
        collected: dict[int, list[Update]] = {}
        async for index, some in updates:
            collected.setdefault(index, []).extend(some)
        choices = []
        for choice in self.choices:
            parts = [] if choice.echo is None else [choice.echo]
            if choice.index in collected:
                parts.append(choice.part(collected[choice.index]))
            choices.append(self._join(parts))
        return {**self._common, "choices": choices, **self._warnings, "usage": self.usage()}

    def _join(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns a choice, joined from its prompt's part, if any, and the part of its updates."""
        joined = dict(parts[-1])
        if self.request.chat:
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
