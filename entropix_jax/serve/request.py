"""From the body of a request to rows for the engine."""

import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from entropix_jax.engine.calibrated import CalibratedSampler
from entropix_jax.engine.methods import find_method
from entropix_jax.engine.request import Request, check_request
from entropix_jax.engine.results import Row
from entropix_jax.engine.search import Method, Search, recording_for
from entropix_jax.errors import UserError
from entropix_jax.sampler.keys import keys
from entropix_jax.sampler.settings import MAX_BANS, MAX_BIASES
from entropix_jax.serve.kept import continue_row
from entropix_jax.serve.model import GREEDY, PLAIN, ServedModel
from entropix_jax.serve.schema import ApiError, Chat, Completion, Generating, unsupported
from entropix_jax.text.intents import may_ask
from entropix_jax.text.tokenizer import Tokenizer

_DEFAULT_TOKENS = 16  # of a completion, as in the API
_DEFAULT_FORKS = 8
_BAN = -100.0  # the bias that bans a token
_MIN_TOP_P = keys()["base.top_p"].low
_SETTINGS = {
    "temperature": "base.temperature",
    "top_p": "base.top_p",
    "frequency_penalty": "repetition.frequency",
    "presence_penalty": "repetition.presence",
    # Of vLLM and llama.cpp.
    "top_k": "base.top_k",
    "min_p": "base.min_p",
    "repetition_penalty": "repetition.penalty",
}
_SHAPES = {"temperature", "top_p", "top_k", "min_p"}  # keys that shape the distribution


@dataclass(frozen=True)
class Prompt:
    """A prompt, its text if the answer repeats it, and where each token begins in a given text."""

    tokens: Sequence[int]
    text: str = ""
    offsets: Sequence[int] | None = None

    def texts(self, tokenizer: Tokenizer) -> list[str]:
        """Returns what each token adds to the text."""
        if self.offsets is None:
            return [*map(tokenizer.stream(skip_special=False).push, self.tokens)]
        bounds = pairwise([0, *self.offsets[1:], len(self.text)])
        return [self.text[start:end] for start, end in bounds]


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request: rows to generate, and the form of their answer.

    Attributes:
        prompts: each has `body.n` choices.
        requests: of the choices, prompt by prompt. Empty if only prompts are repeated.
        sampler: of the rows, and of the prompts' scores.
        top: alternatives per token. None: no log-probabilities.
        chat: whether the answer is a chat completion.
        echo: whether the answer repeats the prompts.
        search: runs in place of the only request.
    """

    body: Generating
    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    sampler: CalibratedSampler
    top: int | None
    chat: bool = False
    echo: bool = False
    search: Search | None = None


def choose_method(
    served: ServedModel, body: Generating, *, slots: int, keeps: bool
) -> tuple[Method, int] | None:
    """Returns the search method of a request and its maximum number of continuations, None without
    a method. `keeps` is whether the server records the states of rows.

    Raises:
        ApiError: options exclude each other, or the server cannot run the method.
    """
    own = body.entropix

    def refused(message: str) -> ApiError:
        return ApiError(f"entropix.{message}", param="entropix")

    if own.method is None:
        if own.vote or own.forks is not None:
            raise refused(f"{'vote' if own.vote else 'forks'} requires entropix.method")
        return None
    excluded = {
        "n above 1": body.n > 1,
        "several prompts": body.rows > body.n,
        "echo": getattr(body, "echo", False),
        "best_of": getattr(body, "best_of", None) is not None,
        "entropix.from": own.begin is not None,
        "entropix.ask": own.ask,
    }
    if names := [name for name, is_given in excluded.items() if is_given]:
        raise refused(f"method cannot be combined with {names[0]}")
    try:
        method = find_method(own.method).with_vote(own.vote)
    except UserError as error:
        raise refused(f"method: {error}") from None
    forks = own.forks or min(_DEFAULT_FORKS, slots)
    if forks > slots:
        raise refused(f"forks must be at most {slots}, the server's --slots, not {forks}")
    needed = recording_for(method, forks)
    if needed.state and not keeps:
        raise refused(f"method: '{method.name}' requires a server with --keep above 0")
    if needed.top > served.top:
        raise refused(f"method: '{method.name}' requires a server with --top-logprobs {needed.top}")
    return method, forks


def completion_request(served: ServedModel, body: Completion) -> GenerationRequest:
    """Returns the rows of a completion's prompts.

    Raises:
        ApiError: options exclude each other.
        UserError: the model cannot read a prompt.
    """
    if body.best_of not in (None, body.n):
        raise unsupported("best_of")
    budget = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if budget == 0 and not body.echo:
        raise ApiError("max_tokens: 0 requires echo", param="max_tokens")
    tokenizer, prompts = served.model.tokenizer, []
    encode = partial(tokenizer.encode_offsets, escape=bool(body.entropix.escape_special))
    for prompt in body.prompt:
        is_text = isinstance(prompt, str)
        tokens, offsets = encode(prompt) if is_text else (prompt, None)
        _check_prompt(served, tokens, budget)
        text = prompt if is_text else tokenizer.decode(tokens, skip_special=False)
        prompts.append(Prompt(tokens, text, offsets))
    return _new_rows(served, body, prompts, budget, body.logprobs, echo=body.echo)


def continuation_request(served: ServedModel, body: Completion, row: Row) -> GenerationRequest:
    """Returns the request of a row that continues a kept one, whose options it has unless the body
    has others.

    Raises:
        ApiError: options exclude each other.
        UserError: the row cannot continue there.
    """
    own, old, place = body.entropix, row.request, body.entropix.begin
    assert place is not None
    excluded = {"prompt": body.prompt, "n": body.n > 1, "echo": body.echo}
    excluded |= {"best_of": body.best_of not in (None, body.n), "entropix.id": own.id}
    if names := [name for name, is_given in excluded.items() if is_given]:
        message = f"{names[0]} cannot be combined with entropix.from"
        raise ApiError(message, param=names[0].partition(".")[0])
    if body.max_tokens == 0:
        raise ApiError("max_tokens must be at least 1", param="max_tokens")
    _check_top(served, body.logprobs, "logprobs")
    served.check_tokens(place.token, "entropix.from", "entropix")
    remaining = old.max_new_tokens - place.position
    budget = body.max_tokens or (remaining if remaining > 0 else _DEFAULT_TOKENS)
    request = replace(
        old,
        sampler=_sampler(served, body, old.sampler),
        max_new_tokens=min(place.position + budget, 2**31 - 1),
        seed=old.seed if body.seed is None else body.seed,
        stop=body.stop if "stop" in body.model_fields_set else old.stop,
        ask=None,  # of the old row's client
    )
    new = continue_row(
        served.model, row, request, place.position, place.token, capacity=served.context
    )
    read = [*old.prompt, *(token.token_id for token, retracted in new.prefix if not retracted)]
    return GenerationRequest(body, [Prompt(read)], [new], request.sampler, body.logprobs)


def chat_request(served: ServedModel, body: Chat) -> GenerationRequest:
    """Returns the rows of a chat. If its last message is the assistant's, they continue it.

    Raises:
        ApiError: options exclude each other.
        UserError: the model cannot read the messages.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs requires logprobs", param="top_logprobs")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) == 0:
            raise ApiError(f"{name} must be at least 1", param=name)
    if body.entropix.begin is not None:
        message = "entropix.from: only /v1/completions continues rows"
        raise unsupported("entropix.from", message)
    tokens = served.model.tokenizer.apply_chat(
        body.messages,
        variables=body.chat_template_kwargs,
        begun=body.messages[-1]["role"] == "assistant",
        escape=body.entropix.escape_special is not False,
    )
    budget = body.max_completion_tokens or body.max_tokens or served.context
    _check_prompt(served, tokens, budget)
    top = (body.top_logprobs or 0) if body.logprobs else None
    return _new_rows(served, body, [Prompt(tokens)], budget, top, messages=body.messages)


def _new_rows(
    served: ServedModel,
    body: Generating,
    prompts: Sequence[Prompt],
    budget: int,
    top: int | None,
    *,
    echo: bool = False,
    messages: Sequence[dict[str, str]] | None = None,
) -> GenerationRequest:
    chat = messages is not None
    _check_top(served, top, "top_logprobs" if chat else "logprobs")
    if body.entropix.id is not None and body.rows != 1:
        raise ApiError("entropix.id requires a request of one row", param="entropix")
    common = Request(
        (),
        _sampler(served, body),
        max_new_tokens=max(min(budget, served.context), 1),
        seed=secrets.randbits(31) if body.seed is None else body.seed,
        eos_ids=() if body.ignore_eos else served.model.end_ids(chat=chat),
        stop=body.stop,
        lookup=served.lookup,
        messages=messages,
        clarify=messages is not None and body.entropix.method is None and may_ask(messages),
    )
    requests: list[Request] = []
    # Ids count a prompt's choices, so equal prompts of a request draw differently, and a prompt's
    # choices do not depend on its place in the list.
    seen: Counter[tuple[int, ...]] = Counter()
    for prompt in prompts:
        for choice in range(body.n if budget else 0):
            row_id = body.entropix.id or str(seen[tuple(prompt.tokens)])
            seen[tuple(prompt.tokens)] += 1
            own = replace(common, prompt=prompt.tokens, row_id=row_id, number=choice)
            requests.append(own)
    for one in requests[:: body.n]:
        check_request(served.model, one, served.context)
    return GenerationRequest(body, prompts, requests, common.sampler, top, chat, echo)


def _check_top(served: ServedModel, top: int | None, name: str) -> None:
    if (top or 0) > served.top:
        limit = f"at most {served.top} alternatives of a token"
        raise ApiError(f"this server gives {limit} (--top-logprobs)", param=name)


def _check_prompt(served: ServedModel, tokens: Sequence[int], budget: int) -> None:
    """Raises ApiError for a prompt that is empty, leaves no room for a token if there is a budget,
    or holds a number that is not a token id."""
    if not tokens:
        raise ApiError("the prompt is empty", param="prompt")
    if len(tokens) + min(budget, 1) > served.context:
        message = f"the prompt has {len(tokens)} tokens, a row has room for {served.context}"
        raise ApiError(message, code="context_length_exceeded")
    served.check_tokens(tokens, "the prompt", "prompt")


def _sampler(
    served: ServedModel, body: Generating, base: CalibratedSampler | None = None
) -> CalibratedSampler:
    """Returns a request's sampler. `base` is the one of the row that it continues."""
    choice, given = body.entropix.sampler, body.model_fields_set
    changes = {key: getattr(body, name) for name, key in _SETTINGS.items() if name in given}
    if changes.get("base.top_k") == -1:  # disables it, as 0 does
        changes["base.top_k"] = 0
    if "top_p" in given:
        changes["base.top_p"] = max(changes["base.top_p"], _MIN_TOP_P)
    if "logit_bias" in given:
        changes |= _biases(served, body.logit_bias)
    if choice is None and base is None and _SHAPES & given:
        # Only the API's keys: a plain draw, at temperature 1 by default.
        choice = GREEDY if body.temperature == 0 else PLAIN
        changes = {"base.temperature": 1.0} | changes
    return served.choose_sampler(choice, changes, base)


def _biases(served: ServedModel, bias: Mapping[str, float]) -> dict[str, Any]:
    """Returns the settings of biases by token id, which replace all biases of the sampler."""
    for token in bias:
        # "05" is refused: "5" could name the same token twice.
        if not re.fullmatch("0|[1-9][0-9]{0,9}", token):
            raise ApiError("logit_bias: keys must be token ids", param="logit_bias")
    served.check_tokens([*map(int, bias)], "logit_bias", "logit_bias")
    bans = sorted(int(token) for token, value in bias.items() if value == _BAN)
    others = sorted([int(token), value] for token, value in bias.items() if value != _BAN)
    for count, limit, values in (
        (len(bans), MAX_BANS, f"{_BAN:g}, which bans them"),
        (len(others), MAX_BIASES, f"a bias other than {_BAN:g}"),
    ):
        if count > limit:
            message = f"logit_bias: at most {limit} tokens may have {values}"
            raise ApiError(message, param="logit_bias")
    return {"draw.bans": bans, "draw.bias": others}
