"""What a request may hold: the supported part of the OpenAI API, and one key of our own.

A key that is null is as good as left out: clients send what they do not use. Any other key that is
not listed here is refused by its name.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

MOST_CHOICES = 128
MOST_TOP = 20  # alternatives of a token
MOST_GIVEN = 256  # tokens with which a row goes on
MOST_ID = 256  # characters of a row's id


class ApiError(Exception):
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
        super().__init__(" ".join(message.splitlines()))
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]  # one error, not one of each element
Bias = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[str, Field(min_length=1)]


class From(_Object):
    """A place within a row that was kept: after its first `position` tokens, with `token` first,
    one or several."""

    row: str
    position: int = Field(ge=0, lt=2**31)
    token: Token | Annotated[list[Token], Field(min_length=1, max_length=MOST_GIVEN)] | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens that come first."""
        return (
            []
            if self.token is None
            else [*([self.token] if isinstance(self.token, int) else self.token)]
        )


class Own(_Object):
    """The key `entropix`. `id` names the request's one row, whose draws depend on it and on the
    seed, `details` are whole records of a trace, `keep` has the rows stay."""

    sampler: str | dict[str, Any] | None = None
    id: Annotated[str, Field(min_length=1, max_length=MOST_ID)] | None = None
    tokens: bool = False
    retractions: bool = False
    details: bool = False
    keep: bool = False
    begin: Annotated[From | None, Field(validation_alias="from")] = None


class StreamOptions(_Object):
    """`include_obfuscation` plays no part: nothing is padded."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(_Object):
    """The one `response_format`."""

    type: Literal["text"]


class Body(_Object):
    """What all requests have."""

    model: str
    user: str | None = None  # plays no part
    entropix: Own = Own()


class Generating(Body):
    """What both kinds of completions have."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] = Field(default_factory=list)
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float = Field(0, ge=-2, le=2)
    presence_penalty: float = Field(0, ge=-2, le=2)
    logit_bias: dict[str, Bias] = Field(default_factory=dict)
    response_format: TextFormat | None = None

    @property
    def rows(self) -> int:
        """How many rows are asked for."""
        return self.n


class Completion(Generating):
    """`/v1/completions`."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[Tokens], Field(fail_fast=True)]
        | None
    ) = None
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or tokens. ApiError if there is none."""
        given = self.prompt
        if given is None:
            raise ApiError("prompt: Field required", param="prompt")
        if not given and isinstance(given, list):
            raise ApiError("prompt: it must not be empty", param="prompt")
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    @property
    def rows(self) -> int:
        """See `Generating`: `n` of each prompt."""
        return self.n if self.entropix.begin else len(self.prompts) * self.n


class TextPart(_Object):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Object):
    """One message of a chat. `name` plays no part."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class Chat(Generating):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)


class Score(Body):
    """`/v1/score`: a text, and how many of the likeliest tokens each of its tokens comes with."""

    input: str
    top: int = Field(0, ge=0, le=MOST_TOP)


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """A request's body. ApiError if it is no JSON, or not of this kind."""
    try:
        values = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError("the body must be a JSON object")
    try:
        return kind.model_validate(_without_nulls(values))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # What is not supported first; of the forms that a value may have, the one it is most like.
        first = min(errors, key=lambda e: (e["type"] != "extra_forbidden", -len(e["loc"])))
        param = str(first["loc"][0])
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            told = f"'{where}' is not supported by this server"
            raise ApiError(told, param=param, code="unsupported_parameter") from None
        raise ApiError(f"{where}: {first['msg']}", param=param) from None


def _without_nulls(value: Any) -> Any:
    """The value without keys that are null, in objects within objects and lists, too."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
