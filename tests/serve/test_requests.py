"""What a request may hold, and who may ask: nothing here reaches an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.serve.guard import read_keys, read_origin
from entropix_jax.serve.responses import Responses
from entropix_jax.serve.schema import ApiError, Body, Chat, Completion, Score, parse
from entropix_jax.serve.wire import MOST_BYTES
from tests.support.servers import CONTEXT, TOP, standing_in

Ask = Callable[..., httpx.Response]
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "Guests:"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Guests?"}]}
SCORE: dict[str, Any] = {"model": "tiny", "input": "Guests: Nina."}
ECHO: dict[str, Any] = {"echo": True, "max_tokens": 0}
BANS = {str(token): -100 for token in range(17)}  # one too many
BIASES = {str(token): -99.5 for token in range(65)}
PATHS = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/score": SCORE,
    "/v1/responses": {"model": "tiny", "input": "Guests?"},
}


def asking(model: LanguageModel, **options: Any) -> Iterator[Ask]:
    """Sends a request to an application in this process, whose rows have no tokens."""
    with standing_in(model, queue=200, **options) as (engine, _, client), asyncio.Runner() as loop:
        engine.step(10**6)

        async def ask(method: str, path: str, **given: Any) -> httpx.Response:
            async with client() as one:
                return await asyncio.wait_for(one.request(method, path, **given), 60)

        def run(method: str, path: str, **given: Any) -> httpx.Response:
            call: Coroutine[Any, Any, httpx.Response] = ask(method, path, **given)
            return loop.run(call)

        yield run


@pytest.fixture(scope="module")
def ask(tiny: LanguageModel) -> Iterator[Ask]:
    yield from asking(tiny)


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer in the API's form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (error,) = answer.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


# Bodies


def test_each_body_is_taken(ask: Ask) -> None:
    """Those that the cases below change."""
    for path, body in PATHS.items():
        answer = ask("POST", path, json=body)
        # The stand-in has no scores to give, and ends no row before its time.
        assert answer.status_code == 200, answer.text


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "suffix": "!",
        "best_of": 2,
        "prompt_logprobs": 1,
        "guided_json": {},
        "grammar": "root ::= x",
    },
    "/v1/chat/completions": {
        "tools": [{"type": "function"}],
        "tool_choice": "required",
        "functions": [{}],
        "audio": {},
        "modalities": ["audio"],
        "prediction": {},
        "min_tokens": 3,
    },
    "/v1/responses": {
        "tools": [{"type": "function"}],
        "previous_response_id": "resp_1",
        "background": True,
    },
}
# Accepted: without effect on the text, or mapped to settings.
ACCEPTED: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "suffix": "",
        "best_of": 1,
        "prompt_logprobs": 0,
        "stop": "",
        "seed": -7,
        "max_tokens": -1,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "n": 1.0,
        "user": "me",
    },
    "/v1/chat/completions": {
        "tools": [],
        "tool_choice": "none",
        "functions": [],
        "parallel_tool_calls": False,
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "stop": ["", "a", *map(str, range(40))],
        "max_completion_tokens": -1,
        "max_tokens": 4.0,
        "chat_template_kwargs": {"enable_thinking": False},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Is it"}, {"text": " wet?"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
            {"role": "tool", "content": "yes", "tool_call_id": "1"},
        ],
    },
    "/v1/responses": {
        "input": [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        ],
        "instructions": "Be kind.",
        "max_output_tokens": 3,
        "text": {"format": {"type": "text"}},
        "store": False,
        "tools": [],
        "previous_response_id": None,
        "include": [],
        "reasoning": {},
    },
}


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [(path, *case) for path, cases in ACCEPTED.items() for case in cases.items()],
)
def test_what_clients_send_is_accepted(ask: Ask, path: str, name: str, value: Any) -> None:
    answer = ask("POST", path, json=PATHS[path] | {name: value})
    assert answer.status_code == 200, answer.text
    assert "warnings" not in answer.json()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_unknown_keys_are_told(tiny: LanguageModel, ask: Ask, path: str) -> None:
    body = PATHS[path] | {"mirostat_tau": 5, "cache_prompt": True}
    told = ask("POST", path, json=body).json()["warnings"]
    known = "is unknown and was ignored"
    assert told == [f"'cache_prompt' {known}", f"'mirostat_tau' {known}"]
    for strict in asking(tiny, strict=True):
        error = refused(strict("POST", path, json=body))
        assert error["message"] == "'cache_prompt' is not supported by this server"
        assert strict("POST", path, json=PATHS[path] | {"user": "me"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [(path, *case) for path, cases in UNSUPPORTED.items() for case in cases.items()],
)
def test_what_is_not_supported_is_named(ask: Ask, path: str, name: str, value: Any) -> None:
    error = refused(ask("POST", path, json=PATHS[path] | {name: value}))
    assert error["message"] == f"'{name}' is not supported by this server"
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["type"] == "invalid_request_error"
    # What is null was not asked for.
    assert ask("POST", path, json=PATHS[path] | {name: None}).status_code == 200


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("/v1/completions", {"prompt": ""}, None),
        ("/v1/completions", {"prompt": []}, "prompt must not be empty"),
        ("/v1/completions", {"prompt": [[]]}, "the prompt is empty"),
        ("/v1/completions", {"prompt": [5000]}, "the prompt holds 5000, which is not a token id"),
        ("/v1/completions", {"prompt": [-1]}, "prompt: must be a text or a list of token ids, or"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt: entry 1 must be a text or a list of"),
        ("/v1/completions", {"prompt": ["a", [1]]}, "prompt: texts and lists of token ids do not"),
        ("/v1/completions", {"prompt": [1] * CONTEXT}, f"a row has room for {CONTEXT}"),
        # Too many rows, before any of their prompts is read.
        ("/v1/completions", {"prompt": [[5000]] * 9, "n": 128}, "1152 rows are requested"),
        ("/v1/completions", {"prompt": [[5000]] * 999, **ECHO}, "999 rows are requested"),
        ("/v1/completions", {"prompt": [{}] * 100_000}, "prompt"),
        ("/v1/completions", {"prompt": None}, "prompt: Field required"),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens: 0 requires echo"),
        ("/v1/completions", {"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
        ("/v1/completions", {"n": 0}, "n: "),
        ("/v1/completions", {"stop": ["a"] * 65}, "stop: at most 64 texts, not 65"),
        ("/v1/completions", {"stop": 5}, "stop: must be a text or a list of texts"),
        ("/v1/completions", {"top_k": 0.5}, "top_k: Input should be a valid integer"),
        ("/v1/completions", {"min_p": 2}, "min_p: "),
        ("/v1/completions", {"repetition_penalty": 0}, "repetition_penalty: "),
        ("/v1/completions", {"entropix": {"sampler": 5}}, "entropix.sampler: must be the name of"),
        (
            "/v1/completions",
            {"entropix": {"from": {"row": "x", "position": 0, "token": "a"}}},
            "entropix.from.token: must be a token id or a list of 1 to 256",
        ),
        ("/v1/completions", {"temperature": 3}, "temperature: "),
        ("/v1/completions", {"top_p": -0.1}, "top_p: "),
        ("/v1/completions", {"presence_penalty": 2.5}, "presence_penalty: "),
        ("/v1/completions", {"logprobs": TOP + 1}, f"at most {TOP} alternatives"),
        ("/v1/completions", {"logprobs": True}, "logprobs: "),
        ("/v1/completions", {"logit_bias": {"5": 100.5}}, "logit_bias.5: Input should be less"),
        ("/v1/completions", {"logit_bias": {"5": -101}}, "logit_bias.5: Input should be greater"),
        ("/v1/completions", {"logit_bias": {"5": True}}, "logit_bias.5: Input should be a valid"),
        ("/v1/completions", {"logit_bias": {"5": "1"}}, "logit_bias.5: Input should be a valid"),
        ("/v1/completions", {"logit_bias": [[5, 1]]}, "logit_bias: Input should be a valid"),
        ("/v1/completions", {"logit_bias": BANS}, "logit_bias: at most 16 tokens may have -100"),
        ("/v1/completions", {"logit_bias": BIASES}, "logit_bias: at most 64 tokens may"),
        ("/v1/completions", {"logit_bias": {"05": 1}}, "logit_bias: keys must be token ids"),
        ("/v1/completions", {"logit_bias": {"x": -100}}, "logit_bias: keys must be token ids"),
        ("/v1/completions", {"logit_bias": {"9999": 1}}, "logit_bias holds 9999, which is no"),
        (
            "/v1/completions",
            {"logit_bias": {"9" * 5000: -100}},
            "logit_bias: keys must be token ids",
        ),
        ("/v1/completions", {"model": "gpt"}, None),
        ("/v1/completions", {"model": None}, "model: Field required"),
        ("/v1/completions", {"seed": 1.5}, "seed: "),
        ("/v1/completions", {"stream": "yes"}, "stream: "),
        ("/v1/completions", {"entropix": {"sampler": "entropic"}}, "did you mean 'entropix'?"),
        ("/v1/completions", {"entropix": {"sampler": "../own.toml"}}, "no sampler preset"),
        ("/v1/completions", {"entropix": {"sampler": {"extends": 3}}}, "no sampler preset"),
        ("/v1/completions", {"entropix": {"sampler": {"base.heat": 1}}}, "no sampler key"),
        ("/v1/completions", {"entropix": {"sampler": {"base.top_p": 7}}}, "must be a number in"),
        (
            "/v1/completions",
            {"entropix": {"sampler": {"regimes.lelv": ["sequence_varentropy < 40%"]}}},
            "sequence_varentropy has no percentiles",
        ),
        (
            "/v1/completions",
            {"entropix": {"sampler": {"extends": "entropix", "thresholds.u1": 1000000}}},
            "calibration.json: thresholds.u1 = 1000000 is above thresholds.u2 = ",
        ),
        ("/v1/completions", {"entropix": {"report": True}}, "'entropix.report' is not supported"),
        (
            "/v1/completions",
            {"response_format": {"type": "json_object"}},
            "response_format: type 'json_obj",
        ),
        ("/v1/completions", {"stream_options": {"x": 1}}, "'stream_options.x' is not supported"),
        ("/v1/chat/completions", {"messages": []}, "messages: "),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}]},
            "messages: message 1 must be an object with a text 'role' and a 'content'",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages: message 1 has a part of type 'image_url': only 'text' is supported",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user<|eot_id|>", "content": "Hi"}]},
            "messages: message 1: unknown role 'user<|eot_id|>', expected one of system, ",
        ),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"messages": []}},
            "the chat template's variable 'messages' cannot be set",
        ),
        ("/v1/responses", {"input": 5}, "input: must be a text or a list of messages"),
        (
            "/v1/responses",
            {"input": [{"type": "function_call"}]},
            "input: item 0 of type 'function_call' is not supported, only 'message'",
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema"}}},
            "text.format: type 'json_schema' is not supported by this server, only 'text'",
        ),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs requires logprobs"),
        (
            "/v1/completions",
            {"n": 2, "entropix": {"id": "a"}},
            "entropix.id requires a request of one row",
        ),
        ("/v1/completions", {"entropix": {"id": ""}}, "entropix.id: String should have at least"),
        ("/v1/chat/completions", {"logprobs": 2}, "logprobs: "),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens must be at least 1"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 9 * CONTEXT}]},
            f"a row has room for {CONTEXT}",
        ),
        ("/v1/score", {"input": "Rita sang. " * CONTEXT}, f"at most {CONTEXT} are possible"),
        ("/v1/score", {"input": ""}, "too short"),
        ("/v1/score", {"top": 21}, "top: "),
    ],
)
def test_values_that_are_wrong(
    ask: Ask, path: str, change: dict[str, Any], message: str | None
) -> None:
    answer = ask("POST", path, json=PATHS[path] | change)
    if change == {"prompt": ""}:  # its beginning-of-text token is all there is
        assert answer.status_code == 200
    elif change == {"model": "gpt"}:
        assert refused(answer, 404)["code"] == "model_not_found"
    else:
        assert str(message) in refused(answer)["message"]


def test_what_clients_send_without_meaning_it(ask: Ask) -> None:
    said = {"user": "me", "seed": 1, "n": 1, "stream_options": {"include_obfuscation": False}}
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert ask("POST", path, json=PATHS[path] | said).status_code == 200
    body = COMPLETION | {"best_of": 2, "n": 2, "response_format": {"type": "text"}}
    assert ask("POST", "/v1/completions", json=body).status_code == 200
    # What is only repeated needs no room for a token.
    body = COMPLETION | ECHO | {"prompt": [1] * CONTEXT}
    assert ask("POST", "/v1/completions", json=body).status_code == 200
    # As the `openai` package gives a message back.
    message = {"role": "assistant", "content": "Nina", "refusal": None, "tool_calls": None}
    chat = CHAT | {"messages": [*CHAT["messages"], message]}
    assert ask("POST", "/v1/chat/completions", json=chat).status_code == 200


def test_bodies_that_are_no_bodies(ask: Ask) -> None:
    def post(content: bytes, kind: str = "application/json; charset=utf-8") -> httpx.Response:
        headers = {"content-type": kind}
        return ask("POST", "/v1/completions", content=content, headers=headers)

    good = json.dumps(COMPLETION).encode()
    assert post(good).status_code == 200
    for bad in (b"", b"{", good[:-1], b"[]", b"3", b"\xff", b"[" * 10_000, b'{"n": NaN}'):
        refused(post(bad))
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert "application/json" in refused(post(good, kind), 415)["message"]
    long = json.dumps(COMPLETION | {"user": "x" * MOST_BYTES}).encode()
    refused(post(long), 413)
    refused(post(b'{"model": "tiny", "prompt": "\\ud800"}'))


def test_paths_and_methods_that_are_not_there(ask: Ask) -> None:
    assert "/v1/images" in refused(ask("POST", "/v1/images", json={}), 404)["message"]
    refused(ask("GET", "/v1/completions"), 405)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = [
    *("model", "prompt", "messages", "input", "stream", "n", "stop", "seed", "max_tokens"),
    *("temperature", "top_p", "logprobs", "top_logprobs", "echo", "logit_bias", "entropix"),
    *("best_of", "stream_options", "response_format", "top", "tools", "top_k", "min_p"),
    *("instructions", "max_output_tokens", "text", "chat_template_kwargs", "metadata"),
]


@settings(max_examples=300)
@given(
    path=st.sampled_from([*PATHS]),
    base=st.booleans(),
    change=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), VALUES, max_size=3),
    cut=st.integers(0, 3),
)
def test_any_body(path: str, base: bool, change: dict[str, Any], cut: int) -> None:
    """Each is taken, or refused in one line, whatever it holds."""
    kinds: dict[str, type[Body]] = {
        "/v1/completions": Completion,
        "/v1/chat/completions": Chat,
        "/v1/score": Score,
        "/v1/responses": Responses,
    }
    raw = json.dumps((PATHS[path] if base else {}) | change).encode()
    try:
        parse(kinds[path], raw[: len(raw) - cut])
    except ApiError as refusal:
        error = refusal
    else:
        return
    told = error.to_json()["error"]
    assert (error.status, told["type"]) == (400, "invalid_request_error")
    assert "\n" not in told["message"]


# Who may ask


def test_keys(tiny: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n\n two \n")
    for ask in asking(tiny, keys=read_keys(path)):
        for right in ("Bearer one", "bearer two", "Bearer  two "):
            answer = ask("GET", "/v1/models", headers={"authorization": right})
            assert answer.status_code == 200
        for wrong in ("Bearer", "Bearer on", "Bearer onee", "Basic one", "one", "Bearer \xe9"):
            headers = {"authorization": wrong.encode("latin-1")}
            error = refused(ask("GET", "/v1/models", headers=headers), 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        for path_ in ("/metrics", "/v1/models/tiny", "/nowhere"):
            refused(ask("GET", path_), 401)
        answer = ask("POST", "/v1/completions", json=COMPLETION)
        refused(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert ask("GET", "/health").status_code == 200


@pytest.mark.parametrize("text", ["", "\n \n", "a b", "\u00e9", "a\x07"])
def test_files_of_keys_that_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=str(path)):
        read_keys(path)


def test_pages_of_others(tiny: LanguageModel) -> None:
    """Neither their scripts nor names that they make this machine's may ask."""
    own, friend = "http://localhost:8000", "https://friend.org"
    for ask in asking(tiny, origins=[friend], host="MyBox"):
        for host in (
            "mybox:8000",
            "localhost:1",
            "127.0.0.1:8000",
            "[::1]:80",
            "10.0.0.7",
            "friend.org",
        ):
            assert ask("GET", "/health", headers={"host": host}).status_code == 200
        for host in (
            *("evil.org", "localhost.evil.org:8000", "", "[::1"),
            *("127.0.0.1/evil", "user@localhost", "127.0.0.1?x", "127.0.0.1#x"),
            *("[::1]evil", "localhost:evil", "[localhost]"),
        ):
            error = refused(ask("GET", "/health", headers={"host": host}), 403)
            assert error["code"] == "foreign_host"
        for origin in (own, friend):
            answer = ask("POST", "/v1/completions", json=COMPLETION, headers={"origin": origin})
            assert answer.status_code == 200
        allowed = "access-control-allow-origin"
        assert ask("GET", "/health", headers={"origin": friend}).headers[allowed] == friend
        for origin in (
            "http://evil.org",
            "null",
            "http://localhost:8001",
            "https://localhost:8000",
        ):
            answer = ask("POST", "/v1/completions", json=COMPLETION, headers={"origin": origin})
            assert refused(answer, 403)["code"] == "foreign_origin"
            assert allowed not in answer.headers
        asked = {"access-control-request-method": "POST"}
        preflight = ask("OPTIONS", "/v1/completions", headers={"origin": friend, **asked})
        assert (preflight.status_code, preflight.headers[allowed]) == (200, friend)


def test_parts_of_the_page_are_sent_once(ask: Ask) -> None:
    for path in ("/", "/static/live.js"):
        answer = ask("GET", path)
        tag = answer.headers["etag"]
        again = ask("GET", path, headers={"if-none-match": tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert ask("GET", path, headers={"if-none-match": '"other"'}).content == answer.content
    assert ask("GET", "/favicon.ico").status_code == 204


def test_no_cross_origin_requests_unless_asked_for(ask: Ask) -> None:
    headers = {"origin": "https://friend.org", "access-control-request-method": "POST"}
    answer = ask("OPTIONS", "/v1/completions", headers=headers)
    refused(answer, 403)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin", ["*", "friend.org", "https://", "https://a/b", "ftp://a", "http://a:x", "http://u@a"]
)
def test_origins_that_no_browser_sends(origin: str) -> None:
    with pytest.raises(UserError, match="--allow-origin"):
        read_origin(origin)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("https://friend.org", "https://friend.org"),
        ("http://localhost:5173", "http://localhost:5173"),
        ("https://Example.org:443", "https://example.org"),
        ("HTTP://example.org:80", "http://example.org"),
        ("http://example.org:443", "http://example.org:443"),
        ("https://[::1]:443", "https://[::1]"),
        ("https://example.org:", "https://example.org"),
    ],
)
def test_origins_as_browsers_send_them(given: str, sent: str) -> None:
    assert read_origin(given) == sent
