"""Bodies of requests: the supported part of the OpenAI API, keys of other local servers, and the
key `entropix`.

A null counts as a missing key, because clients send keys that they do not use. Keys without effect
on the text are accepted, keys that would change its meaning are refused by name, and all other keys
are accepted with a warning.
"""

from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from entropix_jax.engine.search import MAX_FORKS
from entropix_jax.errors import UserError
from entropix_jax.host.arguments import as_integer
from entropix_jax.host.files import decode_json
from entropix_jax.text.chat_template import plain_messages

MAX_TOP = 20  # alternatives of a token
_MAX_CHOICES = 128
_MAX_GIVEN = 256  # tokens that begin a continuation
_MAX_ID = 256  # characters of a row's id
_MAX_STOPS = 64
_LARGEST = 2**31 - 1
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Keys without effect on the text: identifiers, hints for other servers, and defaults.
_HARMLESS = frozenset(
    """metadata parallel_tool_calls prompt_cache_key prompt_cache_retention safety_identifier
    service_tier store user""".split()
)
# Keys that would change the meaning of an answer, and their values without effect.
_MEANINGFUL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "functions"), ([],)),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"}, "text"),
    "suffix": ("",),
    "prompt_logprobs": (0, False),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    **dict.fromkeys(
        """audio grammar guided_choice guided_grammar guided_json guided_regex json_schema
        logits_processors prediction structured_outputs web_search_options""".split(),
        (),
    ),
}


class ApiError(UserError):
    """An error in the API's form, with its HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def to_json(self) -> dict[str, Any]:
        """Returns the body of the answer."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        other = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kinds.get(self.status, other)}
        return {"error": {**error, "param": self.param, "code": self.code}}


def try_again(reason: str, seconds: int, *, status: int = 503, code: str | None = None) -> ApiError:
    """Returns the error of a request that may succeed after some seconds."""
    headers = {"Retry-After": str(seconds)}
    return ApiError(f"{reason}: try again later", status=status, code=code, headers=headers)


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _as_tokens(value: Any) -> list[Any] | None:
    """Converts a list of token ids; None for any other value."""
    ids = [*map(as_integer, value)] if isinstance(value, list) else [None]
    return None if any(one is None or one < 0 for one in ids) else ids


def _as_integer(value: Any) -> Any:
    """Converts a value that is an integer, see `as_integer`."""
    return value if (number := as_integer(value)) is None else number


def _unless_minus_one(meaning: int | None, value: Any) -> Any:
    """Converts an integer. -1 has a meaning of its own, as in llama.cpp and vLLM."""
    return meaning if value == -1 else _as_integer(value)


def _as_list(value: Any) -> list[Any]:
    """Wraps a single value in a list."""
    return value if isinstance(value, list) else [value]


def _as_stops(value: Any) -> list[Any]:
    """Converts a text or a list of texts to a list without empty texts."""
    return [one for one in _as_list(value) if one != ""]


def _as_prompts(value: Any) -> list[Any]:
    """Converts a text, a list of token ids, or a list of either to a list of prompts."""
    given = _as_list(value if _as_tokens(value) is None else [value])
    are_texts = all(isinstance(one, str) for one in given)
    prompts = given if are_texts else [*map(_as_tokens, given)]
    if None in prompts:
        raise ValueError("must be a text, a list of token ids, or a list of either, not mixed")
    return prompts


def _as_messages(value: Any) -> Any:
    """Messages with plain contents, see `plain_messages`."""
    try:
        messages = plain_messages(value)
    except UserError as error:
        raise ValueError(str(error)) from None
    for number, message in enumerate(messages, start=1):
        if message["role"] not in _ROLES:
            known = f"unknown role {message['role']!r}, expected one of {', '.join(_ROLES)}"
            raise ValueError(f"message {number}: {known}")
    return messages


def _as_sampler(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError("must be the name of a preset or an object of settings")
    return value


Integer = Annotated[int, BeforeValidator(_as_integer)]
_Limit = Annotated[int, Field(ge=0, le=_LARGEST)] | None
Budget = Annotated[_Limit, BeforeValidator(partial(_unless_minus_one, _LARGEST))]
_OutputLimit = Annotated[int, Field(ge=1, le=_LARGEST)] | None
OutputBudget = Annotated[_OutputLimit, BeforeValidator(partial(_unless_minus_one, None))]
Seed = Annotated[int | None, BeforeValidator(partial(_unless_minus_one, None))]
Messages = Annotated[list[dict[str, Any]], BeforeValidator(_as_messages)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Token = Annotated[Integer, Field(ge=0)]


class From(_Object):
    """A place in a kept row: after its first `position` tokens. The tokens `token` come next."""

    row: str
    position: Integer = Field(ge=0, lt=2**31)
    token: Annotated[
        list[Token], Field(min_length=1, max_length=_MAX_GIVEN), BeforeValidator(_as_list)
    ] = []


class Own(_Object):
    """The key `entropix`.

    `id` names the request's only row, whose random numbers depend on it and on the seed. `details`
    are whole trace records. `keep` keeps the rows. `escape_special` makes control tokens in a
    prompt or a message ordinary text, by default only in messages. `method` is the name of a search
    method, with at most `forks` continuations and, with `vote`, a vote as its choice. With `ask`
    the client of a stream chooses between branches that tie.
    """

    sampler: Annotated[Any, BeforeValidator(_as_sampler)] = None
    id: Annotated[str, Field(min_length=1, max_length=_MAX_ID)] | None = None
    tokens: bool = False
    retractions: bool = False
    details: bool = False
    keep: bool = False
    escape_special: bool | None = None
    begin: Annotated[From | None, Field(validation_alias="from")] = None
    method: str | None = None
    forks: Annotated[Integer, Field(ge=1, le=MAX_FORKS)] | None = None
    vote: bool = False
    ask: bool = False


class StreamOptions(_Object):
    """`include_obfuscation` has no effect: nothing is padded."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Body(_Object):
    """Keys of all requests."""

    model_config = ConfigDict(extra="allow")
    harmless: ClassVar[frozenset[str]] = _HARMLESS

    model: str
    entropix: Own = Own()

    @property
    def warnings(self) -> dict[str, list[str]]:
        """`{'warnings': [...]}` with a line per unknown key, or an empty dict."""
        unknown = (self.model_extra or {}).keys() - self.harmless - _MEANINGFUL.keys()
        found = [f"'{key}' is unknown and was ignored" for key in sorted(unknown)]
        return {"warnings": found} if found else {}


class Generating(Body):
    """Keys of all completions."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Integer = Field(1, ge=1, le=_MAX_CHOICES)
    stop: Annotated[list[str], Field(max_length=_MAX_STOPS), BeforeValidator(_as_stops)] = []
    ignore_eos: bool = False
    seed: Seed = None
    max_tokens: Budget = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Integer | None = Field(None, ge=-1, le=_LARGEST)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    frequency_penalty: float = Field(0, ge=-2, le=2)
    presence_penalty: float = Field(0, ge=-2, le=2)
    logit_bias: dict[str, Bias] = {}

    @property
    def rows(self) -> int:
        """Number of requested rows."""
        return self.n


class Completion(Generating):
    """`/v1/completions`."""

    prompt: Annotated[list[Any], BeforeValidator(_as_prompts)] = []
    best_of: Integer | None = None
    echo: bool = False
    logprobs: Integer | None = Field(None, ge=0, le=MAX_TOP)

    @property
    def rows(self) -> int:
        """Number of requested rows, `n` per prompt. ApiError without prompt or `entropix.from`."""
        if not self.prompt and self.entropix.begin is None:
            raise ApiError("prompt: Field required", param="prompt")
        return max(len(self.prompt), 1) * self.n


class Chat(Generating):
    """`/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Budget = None
    logprobs: bool = False
    top_logprobs: Integer | None = Field(None, ge=0, le=MAX_TOP)
    chat_template_kwargs: dict[str, Any] = {}


class Score(Body):
    """`/v1/score`. `top` is the number of most likely tokens to return for each token."""

    input: str
    top: Integer = Field(0, ge=0, le=MAX_TOP)


class ChosenBranch(_Object):
    """`/v1/entropix/choice`: the `id` of a choice in a stream, and the index of the chosen text."""

    id: str
    index: Integer = Field(ge=0, le=1)


AnyBody = TypeVar("AnyBody", bound=_Object)


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Returns a request's body.

    Raises:
        ApiError: it is not JSON, not of this kind, or has a key or value that is not supported.
    """
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        values = from_json(raw, allow_inf_nan=False)
        decode_json(raw.decode(), "the body is ")  # which refuses repeated keys
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError("the body must be a JSON object")
    return parse_values(kind, values)


def parse_values(kind: type[AnyBody], values: dict[str, Any]) -> AnyBody:
    """Returns the body of a decoded object, see `parse`."""
    values = _without_nulls(values)
    if values.get("logprobs") is False:  # the same for both kinds of completions
        del values["logprobs"]
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # Unsupported keys first.
        first = min(errors, key=lambda e: (e["type"] != "extra_forbidden", -len(e["loc"])))
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise unsupported(where) from None
        message = first["msg"].removeprefix("Value error, ").partition(" or instance of ")[0]
        raise ApiError(f"{where}: {message}", param=str(first["loc"][0])) from None
    for key in (body.model_extra or {}).keys() & _MEANINGFUL.keys():
        if values[key] not in (allowed := _MEANINGFUL[key]):
            only = " or ".join(to_json(one).decode() for one in allowed)
            raise unsupported(key, only and f"'{key}': only {only} is supported by this server")
    return body


def unsupported(key: str, message: str = "") -> ApiError:
    """Returns the error of a key, or of a value, that is not supported."""
    message = message or f"'{key}' is not supported by this server"
    return ApiError(message, param=key.partition(".")[0], code="unsupported_parameter")


def _without_nulls(value: Any) -> Any:
    """Returns a value without the keys that are null, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
