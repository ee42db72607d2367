"""Requests as programs that nobody here wrote send them, and their answers read as these do.

Recorded from the sources of LogitLoom (logit-loom.ts) and mikupad (mikupad.html, with full
compatibility with OpenAI).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.servers import Running

HEADERS = {"Authorization": "Bearer none", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def web(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, headers=HEADERS, timeout=None) as web:
        yield web


# LogitLoom: a tree of texts, each level asked for at once, by its words.

WIDTH, DEPTH = 3, 6


def ask_level(web: httpx.Client, words: list[str], *, chat: bool) -> list[tuple[str, list[Any]]]:
    """The tokens after these words, each with its alternatives, the likeliest first."""
    prefill, left = "".join(words), DEPTH - len(words)
    body: dict[str, Any] = {"model": "tiny", "max_tokens": left, "temperature": 0.0}
    if chat:
        messages = [{"role": "user", "content": "Question: What is 12 + 7?"}]
        messages += [{"role": "assistant", "content": prefill}] if prefill else []
        body |= {"messages": messages, "logprobs": True, "top_logprobs": WIDTH}
        answer = web.post("/v1/chat/completions", json=body).json()
        found = answer["choices"][0]["logprobs"]["content"]
        tops = [[(top["token"], top["logprob"]) for top in one["top_logprobs"]] for one in found]
        chosen = [one["token"] for one in found]
    else:
        body |= {"prompt": "Guests:" + prefill, "logprobs": WIDTH}
        found = web.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        tops = [[*one.items()] for one in found["top_logprobs"]]
        chosen = found["tokens"]
    return [
        (word, sorted(top, key=lambda pair: -pair[1]))
        for word, top in zip(chosen, tops, strict=True)
    ]


@pytest.mark.parametrize("chat", [True, False])
def test_a_tree_is_grown_as_logitloom_does(web: httpx.Client, chat: bool) -> None:
    (served,) = web.get("/v1/models").json()["data"]
    assert served["id"] == "tiny"
    trunk = ask_level(web, [], chat=chat)
    assert len(trunk) == DEPTH
    for word, top in trunk:
        assert word == top[0][0]  # at a temperature of 0
        assert len(top) == WIDTH
    # The same words again lead to the same place.
    words = [word for word, _ in trunk]
    assert [word for word, _ in ask_level(web, words[:2], chat=chat)] == words[2:]
    other = trunk[0][1][1][0]
    branch = ask_level(web, [other], chat=chat)
    assert len(branch) <= DEPTH - 1
    assert [*branch] != trunk[1:]


# mikupad: a page of text that goes on, token by token, each with what else it could have been.


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    *parts, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_goes_on_as_in_mikupad(web: httpx.Client, chat: bool) -> None:
    text = "Once upon a time"
    body: dict[str, Any] = {"model": "tiny", "seed": 5, "temperature": 0.7, "top_p": 0.95}
    body |= {"presence_penalty": 0, "frequency_penalty": 0, "max_tokens": 12, "stream": True}
    if chat:
        body |= {"messages": [{"role": "user", "content": text}], "stop": ["\n\n"]}
        answer = web.post(
            "/v1/chat/completions", json=body | {"logprobs": True, "top_logprobs": 10}
        )
    else:
        answer = web.post("/v1/completions", json=body | {"prompt": text, "logprobs": 10})
    seen = 0
    for event in events(answer):
        (choice,) = event["choices"]
        word = choice["delta"]["content"] if chat else choice["text"]
        if not word:
            continue
        if chat:
            tops = choice["logprobs"]["content"][0]["top_logprobs"]
            odds = {top["token"]: math.exp(top["logprob"]) for top in tops}
        else:
            found = choice["logprobs"]["top_logprobs"][0]
            odds = {token: math.exp(logprob) for token, logprob in found.items()}
        assert len(odds) in (10, 11)
        assert 0 < odds[word] <= 1  # a chunk is a token, so its own chance is found
        seen += 1
    assert 3 < seen <= 12


MIKUPAD = {
    "prompt": "Once",
    "stream": False,
    "n_predict": 2,
    "max_tokens": 2,
    "temperature": 0.7,
    "repetition_penalty": 1.1,
    "repeat_last_n": 256,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1,
    "tfs_z": 1,
    "mirostat_mode": 0,
    "ignore_eos": False,
    "logprobs": 10,
    "seed": -1,
}
SILLY_TAVERN_TEXT = {
    "prompt": "Once",
    "model": "tiny",
    "max_new_tokens": 2,
    "max_tokens": 2,
    "temperature": 1,
    "top_p": 1,
    "typical_p": 1,
    "min_p": 0.02,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": -1,
    "min_tokens": 0,
    "length_penalty": 1,
    "add_bos_token": True,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "stop": ["\nYou:", ""],
    "stopping_strings": ["\nYou:"],
    "custom_token_bans": "",
    "guided_json": None,
    "grammar_string": "",
    "seed": -1,
    "n": 1,
    "include_reasoning": True,
}
SILLY_TAVERN_CHAT = {
    "messages": [
        {"role": "system", "content": "Write the next reply."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Hi"},
    ],
    "model": "tiny",
    "temperature": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_p": 1,
    "max_tokens": 2,
    "stream": False,
    "logit_bias": {},
    "stop": [],
    "chat_completion_source": "custom",
    "n": 1,
}


@pytest.mark.parametrize("body", [MIKUPAD, SILLY_TAVERN_TEXT, SILLY_TAVERN_CHAT])
def test_what_pages_for_local_servers_send_is_answered(
    web: httpx.Client, body: dict[str, Any]
) -> None:
    kind = "chat/completions" if "messages" in body else "completions"
    answer = web.post(f"/v1/{kind}", json={"model": "tiny"} | body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    assert all(told.endswith("is unknown and was ignored") for told in answer.json()["warnings"])
