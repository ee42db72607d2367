"""From the body of a request to rows for the engine."""

import functools
import json
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from entropix_jax.engine.preparation import (
    CalibratedSampler,
    calibrate_sampler,
    describe_token,
)
from entropix_jax.engine.results import Request, Row
from entropix_jax.errors import UserError, nearest
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.presets import is_preset, load_sampler, preset_names
from entropix_jax.sampler.sampler import Sampler, scalars
from entropix_jax.sampler.settings import MAX_BANS, MAX_BIASES
from entropix_jax.serve.kept import Begun, KeptRow, go_on
from entropix_jax.serve.schema import ApiError, Body, Chat, Completion, Generating, Own
from entropix_jax.text.tokenizer import Tokenizer

_SAMPLERS = 256  # that are kept
_LONGEST = 2**16  # characters of the settings of one
_USUAL_TOKENS = 16  # of a completion, where nothing is said, as in the API
_BAN = -100.0  # the bias that bans a token
_PLAIN, _GREEDY = "temperature", "greedy"  # presets
_ROLES = {"developer": "system"}
_LEAST_TOP_P = scalars()["base.top_p"]["low"]
_CHANGES = {
    "temperature": "base.temperature",
    "top_p": "base.top_p",
    "frequency_penalty": "repetition.frequency",
    "presence_penalty": "repetition.presence",
    # Not the API's, but those of vLLM and llama.cpp.
    "top_k": "base.top_k",
    "min_p": "base.min_p",
    "repetition_penalty": "repetition.penalty",
}
_SHAPES = {"temperature", "top_p", "top_k", "min_p"}  # of the distribution


@dataclass(frozen=True)
class Served:
    """The model as it is served.

    Attributes:
        name: what clients call it.
        sampler: of requests that say nothing of sampling.
        context: cache positions of a row.
        top: how many alternatives of a token a request may ask for.
    """

    name: str
    model: LanguageModel
    sampler: Sampler
    context: int
    top: int

    @functools.cached_property
    def _calibrated(self) -> Any:
        return functools.lru_cache(_SAMPLERS)(self._load)

    def choose_sampler(self, own: Own, changes: dict[str, Any]) -> CalibratedSampler:
        """The sampler that a request asks for, changed. ApiError if there is none, or a setting is
        wrong."""
        try:
            chosen: CalibratedSampler = self._calibrated(_key(own.sampler, changes))
        except UserError as error:
            raise ApiError(str(error), param="entropix.sampler") from None
        return chosen

    def change_sampler(
        self, sampler: CalibratedSampler, changes: dict[str, Any]
    ) -> CalibratedSampler:
        """A row's sampler with other settings; its thresholds stay. ApiError if a setting is
        wrong."""
        if not changes:
            return sampler
        try:
            return self.settle_sampler(sampler.sampler.with_values(changes))
        except UserError as error:
            raise ApiError(str(error), param="entropix.sampler") from None

    @functools.cached_property
    def _settled(self) -> Any:
        return functools.lru_cache(_SAMPLERS)(self._settle)

    def settle_sampler(self, sampler: Sampler) -> CalibratedSampler:
        """Returns a sampler with its values as written; equal ones take memory once.

        Raises:
            UserError: the model cannot have its texts.
        """
        settled: CalibratedSampler = self._settled(_key(sampler.name, dict(sampler.written)))
        return settled

    def _settle(self, key: str) -> CalibratedSampler:
        name, values = json.loads(key)
        sampler = Sampler(name, "", values, mechanisms=self.sampler.mechanisms)
        return calibrate_sampler(sampler, self.model)

    def _load(self, key: str) -> CalibratedSampler:
        asked, changes = json.loads(key)
        if isinstance(asked, dict):
            changes = {k: v for k, v in asked.items() if k != "extends"} | changes
            asked = asked.get("extends")
        # A name alone: files are the server's.
        if asked is not None and not is_preset(asked):
            raise UserError(f"no sampler preset {asked!r}{nearest(str(asked), preset_names())}")
        mechanisms = self.sampler.mechanisms[len(MECHANISMS) :]
        sampler = self.sampler if asked is None else load_sampler(asked, mechanisms)
        return calibrate_sampler(sampler.with_values(changes), self.model)


def _key(*parts: Any) -> str:
    """What a sampler is kept by. UserError if its settings are too long."""
    key = json.dumps(parts, sort_keys=True)
    if len(key) > _LONGEST:
        raise UserError(f"the sampler's settings take more than {_LONGEST} characters")
    return key


@dataclass(frozen=True)
class Prompt:
    """A prompt, and its text where the answer repeats it."""

    tokens: Sequence[int]
    text: str = ""

    def texts(self, tokenizer: Tokenizer) -> list[str]:
        """Returns what each token adds to the text. A token that begins every text adds nothing,
        unless the text names it."""
        stream = tokenizer.stream(skip_special=False)
        texts = [stream.push(token) for token in self.tokens]
        if self.tokens[0] == tokenizer.bos_id and not self.text.startswith(texts[0]):
            texts[0] = ""
        return texts


@dataclass(frozen=True)
class Wanted:
    """What a request asks for: `choices` rows of each prompt.

    Attributes:
        request: of each row, but for its prompt and id.
        top: alternatives of each token; None: no log-probabilities.
        echo: whether the prompt is part of the answer.
        rows: whether anything is generated.
        begun: the one row, where it goes on from a kept one.
    """

    prompts: Sequence[Prompt]
    choices: int
    request: Request
    top: int | None
    echo: bool
    rows: bool
    own: Own
    begun: Begun | None = None

    def new_rows(self) -> list[Row]:
        """Returns the rows, prompt by prompt. A prompt's choices are the same wherever it stands in
        the list: their ids count its choices so far, so that equal prompts draw differently."""
        if self.begun is not None:
            return [self.begun.row]
        seen: Counter[tuple[int, ...]] = Counter()
        rows = []
        for prompt in self.prompts:
            for choice in range(self.choices if self.rows else 0):
                row_id = self.own.id or str(seen[tuple(prompt.tokens)])
                seen[tuple(prompt.tokens)] += 1
                request = replace(self.request, prompt=prompt.tokens, row_id=row_id)
                rows.append(Row(request, number=choice))
        return rows


def want_completion(served: Served, body: Completion) -> Wanted:
    """ApiError if something does not go together, UserError if the model cannot take a prompt."""
    _check_best(body)
    most = _USUAL_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0 and not body.echo:
        raise ApiError("max_tokens: 0 requires echo", param="max_tokens")
    escape = bool(body.entropix.escape_special)
    prompts = [_prompt(served, one, most, escape=escape) for one in body.prompts]
    return _want(served, body, prompts, most, body.logprobs, echo=body.echo)


def want_more(served: Served, body: Completion, kept: KeptRow) -> Wanted:
    """A row that goes on from a kept one: what the request leaves out is the kept row's.
    ApiError if something does not go together, UserError if the row cannot go on there."""
    own, old = body.entropix, kept.row.request
    assert own.begin is not None
    _check_best(body)
    if own.id is not None:
        raise ApiError("entropix.id cannot be combined with entropix.from", param="entropix")
    for name, usual in (("prompt", None), ("echo", False), ("n", 1)):
        if getattr(body, name) != usual:
            raise ApiError(f"{name} cannot be combined with entropix.from", param=name)
    if body.max_tokens == 0:
        raise ApiError("max_tokens must be at least 1", param="max_tokens")
    _check_top(served, body.logprobs, "logprobs")
    place, given = own.begin, body.model_fields_set
    for token in place.tokens:
        if token >= served.model.config.vocab_size:
            raise ApiError(
                f"entropix.from holds {token}, which is not a token id", param="entropix"
            )
    left = old.max_new_tokens - place.position
    most = body.max_tokens or (left if left > 0 else _USUAL_TOKENS)
    request = replace(
        old,
        sampler=_sampler_of_more(served, body, old.sampler),
        max_new_tokens=min(place.position + most, 2**31 - 1),
        seed=old.seed if body.seed is None else body.seed,
        stop=body.stop if "stop" in given else old.stop,
    )
    begun = go_on(
        served.model, kept.row, request, place.position, place.tokens, capacity=served.context
    )
    read = [*old.prompt, *(token.token_id for token in kept.row.tokens[: place.position])]
    return Wanted([Prompt(read)], 1, request, body.logprobs, False, True, own, begun)


def _sampler_of_more(served: Served, body: Completion, old: CalibratedSampler) -> CalibratedSampler:
    own, changes = body.entropix, _changes(served, body)
    if own.sampler is None:
        return served.change_sampler(old, changes)
    if isinstance(own.sampler, dict) and "extends" not in own.sampler:
        return served.change_sampler(old, own.sampler | changes)
    return served.choose_sampler(own, changes)


def _check_best(body: Completion) -> None:
    if body.best_of not in (None, body.n):
        raise ApiError(
            "'best_of' is not supported by this server",
            param="best_of",
            code="unsupported_parameter",
        )


def want_chat(served: Served, body: Chat) -> Wanted:
    """The same for a chat. One that ends with the assistant's words is to go on within them."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs requires logprobs", param="top_logprobs")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) == 0:
            raise ApiError(f"{name} must be at least 1", param=name)
    if body.entropix.begin is not None:
        told = "entropix.from: only /v1/completions continues rows"
        raise ApiError(told, param="entropix", code="unsupported_parameter")
    tokenizer, variables = served.model.tokenizer, body.chat_template_kwargs
    messages = [{**m, "role": _ROLES.get(m["role"], m["role"])} for m in body.messages]
    begun = messages[-1]["role"] == "assistant"
    escape = body.entropix.escape_special is not False
    tokens = tokenizer.apply_chat(messages, variables=variables, begun=begun, escape=escape)
    most = body.max_completion_tokens or body.max_tokens or served.context
    tokens = _tokens(served, tokens, most)
    top = (body.top_logprobs or 0) if body.logprobs else None
    return _want(served, body, [Prompt(tokens)], most, top, messages=messages)


def _want(
    served: Served,
    body: Generating,
    prompts: Sequence[Prompt],
    most: int,
    top: int | None,
    *,
    echo: bool = False,
    messages: Sequence[dict[str, str]] | None = None,
) -> Wanted:
    chat = messages is not None
    _check_top(served, top, "top_logprobs" if chat else "logprobs")
    if body.entropix.id is not None and body.rows != 1:
        raise ApiError("entropix.id requires a request of one row", param="entropix")
    request = Request(
        (),
        served.choose_sampler(*_sampling(served, body)),
        max_new_tokens=max(most, 1),
        seed=secrets.randbits(31) if body.seed is None else body.seed,
        eos_ids=() if body.ignore_eos else served.model.end_ids(chat=chat),
        stop=body.stop,
        messages=messages,
    )
    return Wanted(prompts, body.n, request, top, echo, most > 0, body.entropix)


def _check_top(served: Served, top: int | None, name: str) -> None:
    if (top or 0) > served.top:
        told = f"this server gives at most {served.top} alternatives of a token (--top-logprobs)"
        raise ApiError(told, param=name)


def _sampling(served: Served, body: Generating) -> tuple[Own, dict[str, Any]]:
    """What is asked of sampling, and the settings that the API's own keys mean."""
    own, given, changes = body.entropix, body.model_fields_set, _changes(served, body)
    # With the API's keys alone, what its users expect: a plain draw, at temperature 1 unless said.
    if own.sampler is None and _SHAPES & given:
        plain = _GREEDY if body.temperature == 0 else _PLAIN
        own = own.model_copy(update={"sampler": plain})
        changes = {"base.temperature": 1.0} | changes
    return own, changes


def _changes(served: Served, body: Generating) -> dict[str, Any]:
    """The settings that the API's keys mean. ApiError if a bias is of no token."""
    given = body.model_fields_set
    changes = {key: getattr(body, name) for name, key in _CHANGES.items() if name in given}
    if changes.get("base.top_k") == -1:  # off, as 0 is
        changes["base.top_k"] = 0
    if "top_p" in given:
        changes["base.top_p"] = max(changes["base.top_p"], _LEAST_TOP_P)
    if "logit_bias" in given:
        changes |= _biases(served, body.logit_bias)
    return changes


def _biases(served: Served, bias: dict[str, float]) -> dict[str, Any]:
    """The settings that biases by token mean. They replace all that the sampler has of them."""
    for token in bias:
        # "05" is refused: "5" could name the same token twice.
        if not re.fullmatch("0|[1-9][0-9]{0,9}", token):
            raise ApiError("logit_bias: keys must be token ids", param="logit_bias")
        if int(token) >= served.model.config.vocab_size:
            raise ApiError(f"logit_bias holds {token}, which is not a token id", param="logit_bias")
    bans = sorted(int(token) for token, value in bias.items() if value == _BAN)
    others = sorted([int(token), value] for token, value in bias.items() if value != _BAN)
    if len(bans) > MAX_BANS:
        told = f"logit_bias: at most {MAX_BANS} tokens may have {_BAN:g}, which bans them"
        raise ApiError(told, param="logit_bias")
    if len(others) > MAX_BIASES:
        told = f"logit_bias: at most {MAX_BIASES} tokens may have a bias other than {_BAN:g}"
        raise ApiError(told, param="logit_bias")
    return {"draw.bans": bans, "draw.bias": others}


def _prompt(served: Served, given: Any, most: int, *, escape: bool) -> Prompt:
    tokenizer = served.model.tokenizer
    if isinstance(given, str):
        encode = tokenizer.encode_plain if escape else tokenizer.encode
        return Prompt(_tokens(served, encode(given, add_bos=True), most), given)
    return Prompt(_tokens(served, given, most), tokenizer.decode(given, skip_special=False))


def _tokens(served: Served, tokens: list[int], most: int) -> list[int]:
    """The tokens of a prompt that fits, with room for one more unless `most` is 0. ApiError for an
    empty one, or one with another id."""
    if not tokens:
        raise ApiError("the prompt is empty", param="prompt")
    if len(tokens) + min(most, 1) > served.context:
        told = f"the prompt has {len(tokens)} tokens, a row has room for {served.context}"
        raise ApiError(told, code="context_length_exceeded")
    if (largest := max(tokens)) >= served.model.config.vocab_size:
        told = f"the prompt holds {describe_token(served.model, largest)}"
        raise ApiError(told, param="prompt")
    return tokens


def check_model(served: Served, body: Body) -> None:
    """ApiError for another model than the one that is served."""
    if body.model != served.name:
        told = f"no model {body.model!r}: this server has {served.name!r}"
        raise ApiError(told, status=404, param="model", code="model_not_found")
