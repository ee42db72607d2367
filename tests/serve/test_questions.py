"""Questions to the user in streams: clarifications, and choices between branches that tie."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import REGIMES
from entropix_jax.serve import choices
from tests.support.browser import Watched, check_accessibility, each
from tests.support.servers import Running, listening

# Both samplers have the same arms, so that they share programs.
CLARIFY: dict[str, Any] = {
    **{f"arms.{regime}": "clarify" for regime in REGIMES},
    "extends": "min-p",
    "arms.loop": "branch",
    "base.min_p": 0.0,
    "clarify.temperature": 3.0,
    "clarify.least": 0.0,
    "clarify.most": 9.0,
    "clarify.length": 5,
}
TIE: dict[str, Any] = {
    **{f"arms.{regime}": "branch" for regime in REGIMES},
    "extends": "min-p",
    "arms.loop": "clarify",
    "base.min_p": 0.0,
    "branch.margin": 1e6,
    "branch.until": "depth",
    "branch.depth": 3,
    "branch.min_p": 0.0,
    "branch.top_p": 1.0,
    "branch.per_row": 2,
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Where does she live?"}]}
PROMPT: dict[str, Any] = {"prompt": "Mia met Nora. Later", "max_tokens": 12}


@pytest.fixture(scope="module")
def server(tiny: LanguageModel) -> Iterator[Running]:
    with listening(tiny) as running:
        yield running


@pytest.fixture(scope="module")
def asking(tiny: LanguageModel) -> dict[str, Any]:
    """A sampler whose rows ask, and do not end before."""
    return CLARIFY | {"draw.bans": [*tiny.end_ids(chat=True)]}


@pytest.fixture(scope="module")
def tie(tiny: LanguageModel) -> dict[str, Any]:
    """A sampler whose branches tie, and do not end."""
    return TIE | {"draw.bans": [*tiny.end_ids(chat=True)]}


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=None)


def stream(
    server: Running,
    path: str,
    body: dict[str, Any],
    choose: Callable[[dict[str, Any]], None] = lambda choice: None,
    **own: Any,
) -> list[dict[str, Any]]:
    """Returns the choices of a stream's chunks. Calls `choose` while a row waits."""
    parts: list[dict[str, Any]] = []
    asked = {"model": "tiny", "seed": 3, **body, "stream": True, "entropix": own}
    with httpx.stream("POST", f"{server.url}/v1/{path}", json=asked, timeout=None) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                parts += json.loads(line.removeprefix("data: "))["choices"]
                if (choice := parts[-1].get("entropix", {}).get("choice")) is not None:
                    choose(choice)
    return parts


def text_of(parts: list[dict[str, Any]]) -> str:
    return "".join(part.get("text", "") for part in parts)


def test_an_answer_ends_with_a_question(server: Running, asking: dict[str, Any]) -> None:
    parts = stream(server, "chat/completions", CHAT, sampler=asking, tokens=True)
    text = "".join(part["delta"]["content"] for part in parts)
    assert text.startswith(" One question:")
    assert parts[-1]["finish_reason"] == "stop"
    assert parts[-1]["entropix"]["finish_reason"] == "question"
    first = next(part for part in parts if part.get("entropix", {}).get("tokens"))
    assert first["entropix"]["tokens"][0]["intents"] > 0
    # A user who has replied is not asked again, and a completion has no user to ask.
    asked = [*CHAT["messages"], {"role": "assistant", "content": "Who?"}, *CHAT["messages"]]
    body = {"messages": asked, "max_tokens": 60}
    parts = stream(server, "chat/completions", body, sampler=asking)
    assert parts[-1]["entropix"]["finish_reason"] == "length"
    assert not "".join(part["delta"]["content"] for part in parts).startswith(" One question:")
    parts = stream(server, "completions", PROMPT, sampler=asking)
    assert parts[-1]["entropix"]["finish_reason"] == "length"


@pytest.fixture(scope="module")
def better(server: Running, tie: dict[str, Any]) -> str:
    """The text without a person."""
    return text_of(stream(server, "completions", PROMPT, sampler=tie))


@pytest.mark.parametrize("index", [0, 1])
def test_a_client_chooses_between_branches(
    index: int, better: str, tie: dict[str, Any], server: Running
) -> None:
    """The row waits after the text so far, while other rows continue."""
    offered: list[str] = []

    def choose(choice: dict[str, Any]) -> None:
        assert len(choice["texts"]) == 2
        body = {"model": "tiny", **PROMPT, "entropix": {"sampler": tie, "id": "other"}}
        other = post(server, "completions", body)
        assert other.json()["usage"]["completion_tokens"] == 12
        body = {"id": choice["id"], "index": index}
        assert post(server, "entropix/choice", body).status_code == 204
        assert post(server, "entropix/choice", body).status_code == 404
        offered.append(choice["texts"][index])

    parts = stream(server, "completions", PROMPT, choose, sampler=tie, ask=True)
    at = [i for i, part in enumerate(parts) if "choice" in part.get("entropix", {})]
    assert len(at) == len(offered) == 2
    for i, text in zip(at, offered, strict=True):
        assert text_of(parts).startswith(text_of(parts[:i]) + text)
    assert (text_of(parts) == better) == (index == 0)


def test_the_better_branch_is_the_default(
    better: str, tie: dict[str, Any], server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "SECONDS", 0.1)
    parts = stream(server, "completions", PROMPT, sampler=tie, ask=True)
    assert sum("choice" in part.get("entropix", {}) for part in parts) == 2
    assert text_of(parts) == better


def test_bad_requests(server: Running) -> None:
    whole = {"model": "tiny", **PROMPT, "entropix": {"ask": True}}
    chat = {"model": "tiny", "input": "Hello", "stream": True, "entropix": {"ask": True}}
    search = {**whole, "stream": True, "entropix": {"ask": True, "method": "best-of-n"}}
    for path, body, message in (
        ("completions", whole, "entropix.ask requires a streamed completion or chat"),
        ("responses", chat, "entropix.ask requires a streamed completion or chat"),
        ("completions", search, "entropix.method cannot be combined with entropix.ask"),
        ("entropix/choice", {"id": "x", "index": 2}, "index: Input should be less than"),
        ("entropix/choice", {"id": "x"}, "index: Field required"),
        ("entropix/choice", {"id": "x", "index": 0, "y": 1}, "'y' is not supported"),
    ):
        answer = post(server, path, body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith(message)
    answer = post(server, "entropix/choice", {"id": "x", "index": 0})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "choice_not_found")


def settings_of(sampler: dict[str, Any]) -> str:
    """Returns a sampler as the page's form has it."""
    own = {key: value for key, value in sampler.items() if key != "extends"}
    return " ".join(f"{key}={value}" for key, value in own.items()).replace(", ", ",")


@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_offers_choices_and_marks_questions(
    width: int,
    better: str,
    asking: dict[str, Any],
    tie: dict[str, Any],
    server: Running,
    watched: Callable[..., Watched],
) -> None:
    page = watched(width).page
    page.goto(server.url)
    page.wait_for_selector("html[data-ready]", state="attached")
    page.click("#options summary")
    page.select_option("#preset", "min-p")
    page.fill("#own", settings_of(tie))
    page.fill("#tokens", str(PROMPT["max_tokens"]))
    page.fill("#seed", "3")
    page.check("#completion")
    page.check("#asks")
    page.fill("#prompt", PROMPT["prompt"])
    page.click("#go")
    page.wait_for_selector("#tie-texts button")
    check_accessibility(page)
    for _ in range(2):
        with page.expect_response("**/v1/entropix/choice") as answer:
            page.click("#tie-texts button >> nth=0")
        assert answer.value.status == 204
    page.wait_for_selector("html[data-state=idle]", state="attached")
    assert page.locator("#tie").is_hidden()
    texts = each(page, "#text-0 .token", "node.lastChild.data")
    assert "".join(texts) == better
    page.check("#chat")
    page.fill("#own", settings_of(asking))
    page.fill("#tokens", "60")
    page.fill("#prompt", "Where does she live?")
    page.click("#go")
    page.wait_for_selector("#text-0 .token.question")
    page.wait_for_selector("html[data-state=idle]", state="attached")
    assert "ended: question to you" in page.locator("#main .about").text_content()
