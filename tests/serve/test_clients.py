"""Requests of mikupad and SillyTavern, recorded from their sources."""

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


@pytest.mark.parametrize("chat", [False, True])
def test_mikupad_continues_a_text(web: httpx.Client, chat: bool) -> None:
    text = "Once upon a time"
    body: dict[str, Any] = {"model": "tiny", "seed": 5, "temperature": 0.7, "top_p": 0.95}
    body |= {"presence_penalty": 0, "frequency_penalty": 0, "max_tokens": 12, "stream": True}
    if chat:
        body |= {"messages": [{"role": "user", "content": text}], "stop": ["\n\n"]}
        body |= {"logprobs": True, "top_logprobs": 10}
    else:
        body |= {"prompt": text, "logprobs": 10}
    answer = web.post(f"/v1/{'chat/' if chat else ''}completions", json=body)
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    seen = 0
    for event in (one for one in events if not one.startswith(":")):  # a comment
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
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
        assert 0 < odds[word] <= 1  # a chunk is a token, so its own probability is included
        seen += 1
    assert 3 < seen <= 12


MIKUPAD = """{
    "prompt": "Once", "stream": false, "n_predict": 2, "max_tokens": 2, "temperature": 0.7,
    "repetition_penalty": 1.1, "repeat_last_n": 256, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
    "typical_p": 1, "tfs_z": 1, "mirostat_mode": 0, "ignore_eos": false, "logprobs": 10, "seed": -1
}"""
SILLY_TAVERN_TEXT = """{
    "prompt": "Once", "model": "tiny", "max_new_tokens": 2, "max_tokens": 2, "temperature": 1,
    "top_p": 1, "typical_p": 1, "min_p": 0.02, "repetition_penalty": 1, "frequency_penalty": 0,
    "presence_penalty": 0, "top_k": -1, "min_tokens": 0, "length_penalty": 1,
    "add_bos_token": true, "ban_eos_token": false, "skip_special_tokens": true,
    "stop": ["\\nYou:", ""], "stopping_strings": ["\\nYou:"], "custom_token_bans": "",
    "guided_json": null, "grammar_string": "", "seed": -1, "n": 1, "include_reasoning": true
}"""
SILLY_TAVERN_CHAT = """{
    "messages": [
        {"role": "system", "content": "Write the next reply."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Hi"}
    ],
    "model": "tiny", "temperature": 1, "frequency_penalty": 0, "presence_penalty": 0, "top_p": 1,
    "max_tokens": 2, "stream": false, "logit_bias": {}, "stop": [],
    "chat_completion_source": "custom", "n": 1
}"""


@pytest.mark.parametrize("body", [MIKUPAD, SILLY_TAVERN_TEXT, SILLY_TAVERN_CHAT])
def test_requests_of_local_clients_are_answered(web: httpx.Client, body: str) -> None:
    kind = "chat/completions" if "messages" in body else "completions"
    answer = web.post(f"/v1/{kind}", json={"model": "tiny"} | json.loads(body))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    assert all(told.endswith("is unknown and was ignored") for told in answer.json()["warnings"])
