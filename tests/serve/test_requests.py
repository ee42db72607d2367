"""Validation of requests, and access control. No test needs an engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from entropix_jax.engine.methods import METHODS
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.keys import keys
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.serve.guard import read_keys, read_origin
from entropix_jax.serve.request import Prompt, choose_method, completion_request
from entropix_jax.serve.schema import ApiError, Completion, parse
from entropix_jax.serve.wire import MAX_BYTES
from entropix_jax.text.tokenizer import load_tokenizer
from tests.support.runs import calibrated
from tests.support.samplers import LITERAL
from tests.support.servers import CONTEXT, TOP, fake_server, serve
from tests.support.tokenizers import byte_fallback, save

Ask = Callable[..., httpx.Response]
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "Guests:"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Guests?"}]}
RESPONSE: dict[str, Any] = {"model": "tiny", "input": "Guests?"}
SCORE: dict[str, Any] = {"model": "tiny", "input": "Guests: Nina."}
ECHO: dict[str, Any] = {"echo": True, "max_tokens": 0}
IMAGE = [{"type": "image_url"}]
BANS = {str(token): -100 for token in range(17)}  # one too many
BIASES = {str(token): -99.5 for token in range(65)}
TEXT, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, SCORES = "/v1/responses", "/v1/score"
PATHS = {TEXT: COMPLETION, CHATS: CHAT, SCORES: SCORE, RESPONSES: RESPONSE}


def sampler(value: Any) -> dict[str, Any]:
    return {"entropix": {"sampler": value}}


def search(**own: Any) -> dict[str, Any]:
    return {"entropix": {"method": "dts", **own}}


def asking(model: LanguageModel, **options: Any) -> Iterator[Ask]:
    """Yields a function that sends requests to an in-process application with a fake engine."""
    with fake_server(model, queue=200, **options) as (engine, _, client), asyncio.Runner() as loop:
        engine.step(10**6)

        async def ask(method: str, path: str, **given: Any) -> httpx.Response:
            async with client() as one:
                return await asyncio.wait_for(one.request(method, path, **given), 60)

        yield lambda method, path, **given: loop.run(ask(method, path, **given))


@pytest.fixture(scope="module")
def ask(tiny: LanguageModel) -> Iterator[Ask]:
    yield from asking(tiny)


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Returns the error of an answer in the API's format."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (error,) = answer.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


# Bodies


def test_minimal_bodies_are_accepted(ask: Ask) -> None:
    """The cases below change these bodies."""
    for path, body in PATHS.items():
        answer = ask("POST", path, json=body)
        # The fake engine returns no scores, and ends no row early.
        assert answer.status_code == 200, answer.text


def cases(**bodies: str) -> list[tuple[str, str, Any]]:
    """Returns path, name and value of each key in the JSON of a kind of body."""
    paths = {"text": TEXT, "chats": CHATS, "responses": RESPONSES}
    return [(paths[kind], *case) for kind in bodies for case in json.loads(bodies[kind]).items()]


UNSUPPORTED = cases(
    text="""{"suffix": "!", "best_of": 2, "prompt_logprobs": 1, "guided_json": {},
        "grammar": "root ::= x", "response_format": {"type": "json_object"}}""",
    chats="""{"tools": [{"type": "function"}], "tool_choice": "required", "functions": [{}],
        "audio": {}, "modalities": ["audio"], "prediction": {}, "min_tokens": 3}""",
    responses="""{"tools": [{"type": "function"}], "previous_response_id": "resp_1",
        "background": true}""",
)
# Accepted: without effect on the text, or mapped to settings.
ACCEPTED = cases(
    text="""{"prompt": "", "suffix": "", "best_of": 1, "prompt_logprobs": 0,
        "stream_options": {"include_obfuscation": false}, "stop": "", "seed": -7, "logprobs": false,
        "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": true, "n": 1.0,
        "user": "me"}""",
    chats="""{"tools": [], "tool_choice": "none", "functions": [], "parallel_tool_calls": false,
        "store": true, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x",
        "prompt_cache_key": "x", "modalities": ["text"], "response_format": {"type": "text"},
        "stop": ["", "a", "b", "c", "d", "e"], "max_completion_tokens": -1, "max_tokens": 4.0,
        "chat_template_kwargs": {"enable_thinking": false}, "logprobs": false, "top_logprobs": 0,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Is it"}, {"text": " wet?"}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1"}], "refusal": null},
            {"role": "tool", "content": "yes", "tool_call_id": "1"}]}""",
    responses="""{"instructions": "Be kind.", "max_output_tokens": 3, "store": false, "tools": [],
        "text": {"format": {"type": "text"}}, "previous_response_id": null, "include": [],
        "reasoning": {},
        "input": [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user",
             "content": [{"type": "input_text", "text": "Hi"}]}]}""",
)


@pytest.mark.parametrize(("path", "name", "value"), ACCEPTED)
def test_optional_keys_are_accepted(ask: Ask, path: str, name: str, value: Any) -> None:
    answer = ask("POST", path, json=PATHS[path] | {name: value})
    assert answer.status_code == 200, answer.text
    assert "warnings" not in answer.json()


# Bodies of mikupad and SillyTavern, recorded from their sources.
CLIENTS = (
    (
        TEXT,
        """{"prompt": "Once", "stream": false, "n_predict": 2, "max_tokens": 2, "temperature": 0.7,
        "repetition_penalty": 1.1, "repeat_last_n": 256, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
        "typical_p": 1, "tfs_z": 1, "mirostat_mode": 0, "ignore_eos": false, "logprobs": 10,
        "seed": -1}""",
    ),
    (
        TEXT,
        """{"prompt": "Once", "max_new_tokens": 2, "max_tokens": 2, "temperature": 1, "top_p": 1,
        "typical_p": 1, "min_p": 0.02, "repetition_penalty": 1, "frequency_penalty": 0,
        "presence_penalty": 0, "top_k": -1, "min_tokens": 0, "length_penalty": 1,
        "add_bos_token": true, "ban_eos_token": false, "skip_special_tokens": true, "n": 1,
        "stop": ["\\nYou:", ""], "stopping_strings": ["\\nYou:"], "custom_token_bans": "",
        "guided_json": null, "grammar_string": "", "seed": -1, "include_reasoning": true}""",
    ),
    (
        CHATS,
        """{"messages": [{"role": "system", "content": "Write the next reply."},
        {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Hi"}],
        "temperature": 1, "frequency_penalty": 0, "presence_penalty": 0, "top_p": 1, "n": 1,
        "max_tokens": 2, "stream": false, "logit_bias": {}, "stop": [],
        "chat_completion_source": "custom"}""",
    ),
)


@pytest.mark.parametrize(("path", "body"), CLIENTS)
def test_requests_of_local_clients_are_accepted(ask: Ask, path: str, body: str) -> None:
    answer = ask("POST", path, json={"model": "tiny"} | json.loads(body))
    assert answer.status_code == 200, answer.text
    assert all(told.endswith("is unknown and was ignored") for told in answer.json()["warnings"])


@pytest.mark.parametrize("path", [TEXT, CHATS, RESPONSES])
def test_warnings_contain_unknown_keys(ask: Ask, path: str) -> None:
    body = PATHS[path] | {"mirostat_tau": 5, "cache_prompt": True}
    found = ask("POST", path, json=body).json()["warnings"]
    ignored = "is unknown and was ignored"
    assert found == [f"'cache_prompt' {ignored}", f"'mirostat_tau' {ignored}"]
    assert ask("POST", RESPONSES, json=PATHS[RESPONSES] | {"top_logprobs": 2}).json()["warnings"]


@pytest.mark.parametrize(("path", "name", "value"), UNSUPPORTED)
def test_errors_contain_unsupported_keys(ask: Ask, path: str, name: str, value: Any) -> None:
    error = refused(ask("POST", path, json=PATHS[path] | {name: value}))
    form = f"'{name}'( is not|: only .+ is) supported by this server"
    assert re.fullmatch(form, error["message"])
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["type"] == "invalid_request_error"
    # A null value counts as absent.
    assert ask("POST", path, json=PATHS[path] | {name: None}).status_code == 200


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (TEXT, {"prompt": []}, "the prompt is empty"),
        (TEXT, {"prompt": [[]]}, "the prompt is empty"),
        (TEXT, {"prompt": [5000]}, "the prompt holds 5000, which is not a token id"),
        (TEXT, {"prompt": [-1]}, "prompt: must be a text, a list of token ids, or"),
        (TEXT, {"prompt": ["a", [1]]}, "prompt: must be a text, a list of token ids, or"),
        (TEXT, {"prompt": [1] * CONTEXT}, f"a row has room for {CONTEXT}"),
        # Too many rows, before any of their prompts is read.
        (TEXT, {"prompt": [[5000]] * 9, "n": 128}, "1152 rows are requested"),
        (TEXT, {"prompt": [[5000]] * 999, **ECHO}, "999 rows are requested"),
        (TEXT, {"prompt": [{}] * 100_000}, "prompt"),
        (TEXT, {"prompt": None}, "prompt: Field required"),
        (TEXT, {"max_tokens": 0}, "max_tokens: 0 requires echo"),
        (TEXT, {"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
        (TEXT, {"n": 0}, "n: "),
        (TEXT, {"stop": ["a"] * 65}, "stop: List should have at most 64 items"),
        (TEXT, {"stop": 5}, "stop.0: Input should be a valid string"),
        (TEXT, {"top_k": 0.5}, "top_k: Input should be a valid integer"),
        (TEXT, {"min_p": 2}, "min_p: "),
        (TEXT, {"repetition_penalty": 0}, "repetition_penalty: "),
        (TEXT, sampler(5), "entropix.sampler: must be the name of"),
        (TEXT, {"entropix": {"from": {"row": "x", "position": 0, "token": "a"}}}, "from.token.0: "),
        (TEXT, {"temperature": 3}, "temperature: "),
        (TEXT, {"top_p": -0.1}, "top_p: "),
        (TEXT, {"presence_penalty": 2.5}, "presence_penalty: "),
        (TEXT, {"logprobs": TOP + 1}, f"at most {TOP} alternatives"),
        (TEXT, {"logprobs": True}, "logprobs: "),
        (TEXT, {"logit_bias": {"5": 100.5}}, "logit_bias.5: Input should be less"),
        (TEXT, {"logit_bias": {"5": -101}}, "logit_bias.5: Input should be greater"),
        (TEXT, {"logit_bias": {"5": True}}, "logit_bias.5: Input should be a valid"),
        (TEXT, {"logit_bias": {"5": "1"}}, "logit_bias.5: Input should be a valid"),
        (TEXT, {"logit_bias": [[5, 1]]}, "logit_bias: Input should be a valid"),
        (TEXT, {"logit_bias": BANS}, "logit_bias: at most 16 tokens may have -100"),
        (TEXT, {"logit_bias": BIASES}, "logit_bias: at most 64 tokens may"),
        (TEXT, {"logit_bias": {"05": 1}}, "logit_bias: keys must be token ids"),
        (TEXT, {"logit_bias": {"9999": 1}}, "logit_bias holds 9999, which is no"),
        (TEXT, {"logit_bias": {"9" * 5000: -100}}, "logit_bias: keys must be token ids"),
        (TEXT, {"model": None}, "model: Field required"),
        (TEXT, {"seed": 1.5}, "seed: "),
        (TEXT, {"stream": "yes"}, "stream: "),
        (TEXT, sampler("entropic"), "did you mean 'entropix'?"),
        (TEXT, sampler("../own.toml"), "no sampler preset"),
        (TEXT, sampler({"extends": 3}), "no sampler preset"),
        (TEXT, sampler({"base.heat": 1}), "no sampler key"),
        (TEXT, sampler({"base.top_p": 7}), "must be a number in"),
        (TEXT, sampler({"regimes.lelv": ["sequence_varentropy < 40%"]}), "has no percentiles"),
        (TEXT, sampler({"extends": "entropix", "thresholds.u1": 1000000}), "json: thresholds.u1"),
        (TEXT, sampler({"thresholds.h1": "101%"}), "thresholds.h1 = '101%': must be"),
        (TEXT, sampler({"extends": "entropix", "thresholds.h1": "90%"}), "is above thresholds.h2"),
        (TEXT, sampler({"regimes.lelv": ["entropy < 101%"]}), 'from "0%" to "100%"'),
        (TEXT, {"entropix": {"report": True}}, "'entropix.report' is not supported"),
        (TEXT, {"stream_options": {"x": 1}}, "'stream_options.x' is not supported"),
        (TEXT, {"response_format": "json"}, """: only {"type":"text"} or "text" is supported"""),
        (CHATS, {"messages": []}, "messages: "),
        (CHATS, {"messages": [{"role": "user"}]}, "messages: message 1 must be an object with"),
        (CHATS, {"messages": [{"role": "user", "content": IMAGE}]}, "1 has a part of"),
        (CHATS, {"messages": [{"role": "user<|eot_id|>", "content": "Hi"}]}, "1: unknown role"),
        (CHATS, {"chat_template_kwargs": {"messages": []}}, "variable 'messages' cannot be set"),
        (RESPONSES, {"input": 5}, "input: must be a text or a list of messages"),
        (RESPONSES, {"input": [{"type": "function_call"}]}, "input: item 0 of type 'func"),
        (RESPONSES, {"input": [{"role": "x", "content": ""}]}, "input: message 1: unknown role"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens: Input should be greater"),
        (RESPONSES, {"text": 1}, "text: Input should be a valid dictionary"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format: type"),
        (CHATS, {"top_logprobs": 2}, "top_logprobs requires logprobs"),
        (TEXT, {"n": 2, "entropix": {"id": "a"}}, "entropix.id requires a request of one row"),
        (TEXT, {"entropix": {"id": ""}}, "entropix.id: String should have at least"),
        (TEXT, search(method="dst"), "entropix.method: no method 'dst', did you mean 'dts'?"),
        (CHATS, search(forks=3), "entropix.forks must be at most 2, the server's --slots, not 3"),
        (TEXT, search(forks=0), "entropix.forks: Input should be greater than or equal to 1"),
        (TEXT, search(forks=33), "entropix.forks: Input should be less than or equal to 32"),
        (TEXT, {"entropix": {"forks": 2}}, "entropix.forks requires entropix.method"),
        (CHATS, {"entropix": {"vote": True}}, "entropix.vote requires entropix.method"),
        (CHATS, {"n": 2, **search()}, "entropix.method cannot be combined with n above 1"),
        (TEXT, {"prompt": ["a", "b"], **search()}, "cannot be combined with several prompts"),
        (TEXT, {"echo": True, **search()}, "cannot be combined with echo"),
        (TEXT, {"best_of": 1, **search()}, "cannot be combined with best_of"),
        (TEXT, search(**{"from": {"row": "x", "position": 0}}), "be combined with entropix.from"),
        (CHATS, {"logprobs": 2}, "logprobs: "),
        (CHATS, {"max_tokens": 0}, "max_tokens must be at least 1"),
        (CHATS, {"messages": [{"role": "user", "content": "a" * 9 * CONTEXT}]}, f"for {CONTEXT}"),
        (SCORES, {"input": "Rita sang. " * CONTEXT}, f"at most {CONTEXT} are possible"),
        (SCORES, {"input": ""}, "too short"),
        (SCORES, {"top": 21}, "top: "),
    ],
)
def test_errors_of_wrong_values(ask: Ask, path: str, change: dict[str, Any], message: str) -> None:
    assert message in refused(ask("POST", path, json=PATHS[path] | change))["message"]


def test_sampling_options_select_a_sampler(tiny: LanguageModel) -> None:
    first = tiny.tokenizer.encode_within(" Ivan")[0]
    banned, raised, lowered = tiny.tokenizer.encode_within(" Nina! ")[:3]
    bias = {str(lowered): -7.5, str(raised): 5, str(banned): -100}
    biases = {"draw.bans": [banned], "draw.bias": sorted([[raised, 5.0], [lowered, -7.5]])}
    own = {"draw.bans": [raised, first], "draw.bias": [[banned, 50]]}
    percentiles = {"thresholds.h1": "40%", "regimes.hehv": ["entropy > h2", "agreement > 12.5%"]}
    plain_p = {"base.temperature": 1.0, "base.top_p": 0.4, "repetition.presence": 1.5}
    hot = {"base.top_k": 3, "base.temperature": 0.9}
    least = {"base.temperature": 0.0, "base.top_p": keys()["base.top_p"].low}
    # Options, `entropix.sampler`, and the preset and settings that they select.
    cases: list[tuple[dict[str, Any], Any, str, dict[str, Any]]] = [
        ({"temperature": 0.5}, None, "temperature", {"base.temperature": 0.5}),
        ({"top_p": 0.4, "presence_penalty": 1.5}, None, "temperature", plain_p),
        ({"temperature": 0, "top_p": 0}, None, "greedy", least),
        ({"frequency_penalty": 2}, None, LITERAL, {"repetition.frequency": 2.0}),
        ({"logit_bias": {str(first): -100}}, None, LITERAL, {"draw.bans": [first]}),
        ({"logit_bias": bias}, None, LITERAL, biases),
        ({"logit_bias": bias}, own, "document-004", biases),
        ({"logit_bias": {}}, own, "document-004", {}),
        ({}, "min-p", "min-p", {}),
        ({"temperature": 0.9}, {"base.top_k": 3}, "top-k", hot),
        ({}, {"inject.thought": ""}, "document-004", {"inject.thought": ""}),
        ({}, percentiles, "entropix", percentiles),
    ]
    for options, choice, preset, changes in cases:
        chosen = {"extends": preset, **choice} if isinstance(choice, dict) else choice
        body = COMPLETION | options | (sampler(chosen) if chosen else {})
        (request,) = completion_request(
            serve(tiny), parse(Completion, json.dumps(body).encode())
        ).requests
        expected = calibrated(tiny, load_sampler(preset).with_values(changes))
        assert dict(request.sampler.values) == dict(expected.values), body


def test_minus_one_is_no_limit_and_tokens_may_be_integral_floats(tiny: LanguageModel) -> None:
    def first(value: Any) -> Any:
        raw = json.dumps({**COMPLETION, "prompt": [5.0, 6], "max_tokens": value}).encode()
        return completion_request(serve(tiny), parse(Completion, raw)).requests[0]

    budgets = {None: 16, 4.0: 4, -1.0: CONTEXT}
    assert {value: first(value).max_new_tokens for value in budgets} == budgets
    assert first(-1).prompt == [5, 6]


@pytest.mark.parametrize("text", ["a cat", " a", "\n", "a<|end|>", "a<|end|> b", "<|user|>é東ß"])
def test_offsets_of_an_echo_begin_after_an_added_token(tmp_path: Path, text: str) -> None:
    config = {"bos_token": "<|begin|>", "add_bos_token": True}
    tokenizer = load_tokenizer(save(tmp_path, byte_fallback(), config))
    tokens, offsets = tokenizer.encode_offsets(text)
    first, *texts = Prompt(tokens, text, offsets).texts(tokenizer)
    assert (tokens, first, "".join(texts)) == (tokenizer.encode(text, add_bos=True), "", text)
    end = tokenizer.token_id("<|end|>")
    ends = [own for token, own in zip(tokens[1:], texts, strict=True) if token == end]
    assert ends == ["<|end|>"] * text.count("<|end|>")


def test_an_echoed_prompt_needs_no_room_for_a_token(ask: Ask) -> None:
    body = COMPLETION | ECHO | {"prompt": [1] * CONTEXT}
    assert ask("POST", TEXT, json=body).status_code == 200


def test_a_server_that_keeps_no_rows(tiny: LanguageModel) -> None:
    for ask in asking(tiny, keep=0):
        answer = ask("POST", TEXT, json=COMPLETION | {"entropix": {"keep": True}})
        message = "entropix.keep: this server keeps no rows (--keep)"
        assert refused(answer)["message"] == message
        answer = ask("POST", TEXT, json=COMPLETION | search())
        message = "entropix.method: 'dts' requires a server with --keep above 0"
        assert refused(answer)["message"] == message
        body = COMPLETION | search(method="self-consistency")
        assert ask("POST", TEXT, json=body).status_code == 200


def test_a_search_that_needs_more_alternatives(tiny: LanguageModel) -> None:
    def choose(top: int, **own: Any) -> Any:
        body = parse(Completion, json.dumps(COMPLETION | search(**own)).encode())
        return choose_method(serve(tiny, top), body, slots=4, keeps=True)

    assert choose(2, forks=1)[1] == 1
    assert choose(3) == (METHODS["dts"].with_vote(False), 4)
    message = "entropix.method: 'dts' requires a server with --top-logprobs 3"
    with pytest.raises(ApiError, match=message):
        choose(2)


def test_errors_of_invalid_bodies(ask: Ask) -> None:
    def post(content: bytes, kind: str = "application/json; charset=utf-8") -> httpx.Response:
        return ask("POST", TEXT, content=content, headers={"content-type": kind})

    good = json.dumps(COMPLETION).encode()
    assert post(b"\xef\xbb\xbf" + good).status_code == 200
    message = refused(post(good[:-1] + b', "seed": 1, "seed": 1}'))["message"]
    assert message == "the body is not valid JSON: 'seed' is repeated"
    for bad in (b"", b"{", good[:-1], b"[]", b"3", b"\xff", b"[" * 10_000, b'{"n": NaN}'):
        refused(post(bad))
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert "application/json" in refused(post(good, kind), 415)["message"]
    refused(post(json.dumps(COMPLETION | {"user": "x" * MAX_BYTES}).encode()), 413)
    refused(post(b'{"model": "tiny", "prompt": "\\ud800"}'))


def test_unknown_paths_methods_and_models(ask: Ask) -> None:
    assert "/v1/images" in refused(ask("POST", "/v1/images", json={}), 404)["message"]
    refused(ask("GET", TEXT), 405)
    for path, body in PATHS.items():
        answer = ask("POST", path, json=body | {"model": "gpt"})
        assert refused(answer, 404)["code"] == "model_not_found"


# Access control


def test_api_keys(tiny: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\ufeffone\n\n two \n")
    for ask in asking(tiny, keys=read_keys(path)):
        for right in ("Bearer one", "bearer two", "Bearer  two "):
            answer = ask("GET", "/v1/models", headers={"authorization": right})
            assert answer.status_code == 200
        for wrong in ("Bearer", "Bearer on", "Bearer onee", "Basic one", "one", "Bearer \xe9"):
            headers = {"authorization": wrong.encode("latin-1")}
            error = refused(ask("GET", "/v1/models", headers=headers), 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        for path_ in ("/metrics", "/v1/models/tiny", "/nowhere", "/v1/rows/x/trace"):
            refused(ask("GET", path_), 401)
        answer = ask("POST", TEXT, json=COMPLETION)
        refused(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert ask("GET", "/health").status_code == 200


@pytest.mark.parametrize("text", ["", "\n \n", "a b", "\u00e9", "a\x07"])
def test_errors_of_key_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=str(path)):
        read_keys(path)


def test_foreign_hosts_and_origins_are_rejected(tiny: LanguageModel) -> None:
    """The checks prevent requests by scripts of other pages, and DNS rebinding."""
    own, friend = "http://localhost:8000", "https://friend.org"
    for ask in asking(tiny, origins=[friend], host="MyBox"):
        for host in "mybox:8000 localhost:1 127.0.0.1:8000 [::1]:80 10.0.0.7 friend.org".split():
            assert ask("GET", "/health", headers={"host": host}).status_code == 200
        wrong = "evil.org localhost.evil.org:8000 [::1 127.0.0.1/evil user@localhost 127.0.0.1?x"
        wrong += " 127.0.0.1#x [::1]evil localhost:evil [localhost]"
        for host in ("", *wrong.split()):
            error = refused(ask("GET", "/health", headers={"host": host}), 403)
            assert error["code"] == "foreign_host"
        for origin in (own, friend):
            answer = ask("POST", TEXT, json=COMPLETION, headers={"origin": origin})
            assert answer.status_code == 200
        allowed = "access-control-allow-origin"
        assert ask("GET", "/health", headers={"origin": friend}).headers[allowed] == friend
        for origin in "http://evil.org null http://localhost:8001 https://localhost:8000".split():
            answer = ask("POST", TEXT, json=COMPLETION, headers={"origin": origin})
            assert refused(answer, 403)["code"] == "foreign_origin"
            assert allowed not in answer.headers
        asked = {"access-control-request-method": "POST"}
        preflight = ask("OPTIONS", TEXT, headers={"origin": friend, **asked})
        assert (preflight.status_code, preflight.headers[allowed]) == (200, friend)


def test_the_page_needs_no_key(tiny: LanguageModel) -> None:
    """Only its static files are served."""
    for ask in asking(tiny, keys=["secret"]):
        document = ask("GET", "/")
        assert document.status_code == 200
        assert "default-src 'none'" in document.headers["content-security-policy"]
        files = {"live.js": "javascript", "regimes.js": "javascript", "page.css": "css"}
        for name, kind in files.items():
            part = ask("GET", f"/static/{name}")
            assert (part.status_code, kind in part.headers["content-type"]) == (200, True)
        for path in ("/static/..%2fapp.py", "/static/app.py", "/static/"):
            assert ask("GET", path).status_code == 404


def test_parts_of_the_page_are_cached(ask: Ask) -> None:
    for path in ("/", "/static/live.js"):
        answer = ask("GET", path)
        tag = answer.headers["etag"]
        again = ask("GET", path, headers={"if-none-match": tag})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert ask("GET", path, headers={"if-none-match": '"other"'}).content == answer.content


def test_no_cross_origin_requests_by_default(ask: Ask) -> None:
    headers = {"origin": "https://friend.org", "access-control-request-method": "POST"}
    answer = ask("OPTIONS", TEXT, headers=headers)
    refused(answer, 403)
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin", "* friend.org https:// https://a/b ftp://a http://a:x http://u@a".split()
)
def test_invalid_origins_are_reported(origin: str) -> None:
    with pytest.raises(UserError, match="--allow-origin"):
        read_origin(origin)


def test_origins_are_normalised() -> None:
    for same in ("https://friend.org", "http://localhost:5173", "http://example.org:443"):
        assert read_origin(same) == same
    assert read_origin("https://Example.org:443") == read_origin("https://example.org:")
    assert read_origin("HTTP://example.org:80") == "http://example.org"
    assert read_origin("https://[::1]:443") == "https://[::1]"
