"""Kept rows: continuing from any of their tokens, and their traces and reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from entropix_jax.__main__ import main
from entropix_jax.engine.results import Row
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.model.loading import LanguageModel
from entropix_jax.report.page import run_page
from entropix_jax.sampler.state import MAX_REACH
from entropix_jax.serve.kept import ROW_TOKENS, RowStore, continue_row
from entropix_jax.serve.schema import ApiError
from tests.support.runs import unrun
from tests.support.samplers import EVERYTHING
from tests.support.servers import Running, serve

# Changes to the server's sampler, with settings whose state depends on the whole row.
FULL: dict[str, Any] = {**EVERYTHING, "inject.thought": " More precisely,", "branch.min_p": 0.1}
FULL |= {"dry.multiplier": 0.5, "truncation.rule": "mirostat", "mirostat.target": 9.0}
BODY: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "seed": 29, "max_tokens": 40}
SAMPLERS: dict[str, Any] = {"full": FULL, "min-p": "min-p"}


@pytest.fixture(scope="module")
def ask(running: Running) -> Iterator[Any]:
    with httpx.Client(base_url=running.url, timeout=None) as client:

        def ask(body: dict[str, Any], **own: Any) -> Any:
            own = {"details": True, "keep": True, **own}
            answer = client.post("/v1/completions", json={**body, "entropix": own})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        ask.client = client  # type: ignore[attr-defined]
        yield ask


def continued(ask: Any, row: str, position: int, token: Any = None, **options: Any) -> Any:
    place = {"row": row, "position": position} | ({} if token is None else {"token": token})
    own = options.pop("own", {})
    return ask({"model": "tiny", "best_of": 1, **options}, **{"from": place}, **own)


def tokens(choice: Any) -> list[Any]:
    found: list[Any] = choice["entropix"]["tokens"]
    return found


def ids(choice: Any) -> list[int]:
    return [token["token_id"] for token in tokens(choice)]


def row_of(choice: Any) -> str:
    return str(choice["entropix"]["row"])


def trace_of(ask: Any, row: str) -> list[dict[str, Any]]:
    answer = ask.client.get(f"/v1/rows/{row}/trace")
    assert answer.status_code == 200
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture(scope="module", params=SAMPLERS)
def whole(request: pytest.FixtureRequest, ask: Any) -> Any:
    return ask(BODY, sampler=SAMPLERS[request.param])


def test_a_continuation_repeats_the_row(ask: Any, whole: Any) -> None:
    """Continues from many tokens of the row, also within thoughts and branches."""
    row, own = row_of(whole), tokens(whole)
    every = 2 if any("branches" in token for token in own) else 10
    for position in range(0, len(own), every):
        again = continued(ask, row, position)
        assert ids(again) == ids(whole)[position:], position
        assert again["text"] == "".join(token["text"] for token in own[position:])
        assert again["entropix"]["finish_reason"] == whole["entropix"]["finish_reason"]
        for here, there in zip(tokens(again), own[position:], strict=True):
            assert (here["position"], here["row"]) == (there["position"], there["row"])
            np.testing.assert_allclose(here["entropy"], there["entropy"], atol=1e-3)
        assert row_of(again) != row


def test_chosen_tokens_start_a_continuation(ask: Any, whole: Any, tiny: LanguageModel) -> None:
    """One or several tokens may be chosen, and they are part of the new row."""
    row, own = row_of(whole), tokens(whole)
    for position in (0, 7, len(own) // 2, len(own) - 1):
        likely = (token for token, *_ in own[position]["top"][1:])
        other = next(token for token in likely if token not in tiny.end_ids(chat=True))
        again = continued(ask, row, position, other, max_tokens=6)
        assert ids(again)[0] == other
        assert len(tokens(again)) == 6 or again["entropix"]["finish_reason"] == "eos"
        twice = continued(ask, row_of(again), position + 1, max_tokens=5)
        assert ids(twice) == ids(again)[1:]
    others = [own[3]["top"][2][0], own[0]["token_id"], own[5]["top"][1][0]]
    again = continued(ask, row, 3, others, max_tokens=6)
    assert ids(again)[:3] == others
    for place, other in enumerate(others, 3):
        last = continued(ask, row, place, other, max_tokens=1 if place < 5 else 4)
        row = row_of(last)
    assert ids(last) == ids(again)[2:]


def test_settings_of_a_row(ask: Any, whole: Any) -> None:
    row = row_of(whole)
    first, about = trace_of(ask, row)[0], ask.client.get(f"/v1/rows/{row}").json()
    assert about["sampler"] == first["sampler_parameters"]
    for name in ("prompt", "seed", "percentiles", "calibration"):
        assert about[name] == first[name]
    assert [box["regime"] for box in about["boxes"]] == ["lelv", "helv", "lehv", "hehv"]
    for name, value in about["thresholds"].items():
        assert value == first["sampler_parameters"].get(f"thresholds.{name}")


def test_a_changed_threshold(ask: Any) -> None:
    """A continuation from the first changed decision equals a new row with the new threshold."""
    log = tokens(ask(BODY, sampler=FULL, retractions=True))
    whole = ask(BODY, sampler=FULL)
    # `test_a_continuation_repeats_the_row` continues within these.
    assert {"inject", "branch", "backspace"} <= {token["action"] for token in tokens(whole)}
    assert any(t["action"] == "branch" and "branches" not in t for t in tokens(whole))
    differing = 0
    for changes in ({"thresholds.h2": 1.2}, {"thresholds.h1": 0.5}, {"thresholds.h1": 0.01}):
        values = {**FULL, **changes}
        rerun = ask(BODY, sampler=values)

        def box(entropy: float, values: dict[str, Any]) -> tuple[bool, ...]:
            bounds = (values["thresholds.h1"], values["thresholds.h2"], 2.0)
            return (*(entropy > bound for bound in bounds), entropy < bounds[0])

        # Retracted tokens were decisions, too. The row may have gone back farther from there.
        at = next(
            i for i, t in enumerate(log) if box(t["entropy"], values) != box(t["entropy"], FULL)
        )
        back = [token["position"] for token in log[at:] if token["type"] == "retracted"]
        first = min([log[at]["position"], *back]) - log[0]["position"]
        # A row never retracts tokens before the position where it continues.
        first = max(first - MAX_REACH, 0)
        again = continued(ask, row_of(whole), first, own={"sampler": changes})
        assert ids(whole)[:first] + ids(again) == ids(rerun)
        differing += ids(rerun) != ids(whole)
    assert differing > 1


def test_options_of_a_continuation(ask: Any) -> None:
    whole = ask({**BODY, "stop": ["zzz"]}, sampler="min-p")
    row = row_of(whole)
    other = continued(ask, row, 5, seed=8)
    assert ids(other) != ids(whole)[5:]
    assert other["entropix"]["seed"] == 8
    greedy = continued(ask, row, 5, own={"sampler": {"extends": "greedy"}}, max_tokens=4)
    assert [token["action"] for token in tokens(greedy)] == ["argmax"] * 4
    stop = whole["text"][len("".join(t["text"] for t in tokens(whole)[:6])) :][4:8]
    stopped = continued(ask, row, 5, stop=stop)
    assert stopped["entropix"]["finish_reason"] == "stop"
    assert stop not in stopped["text"]
    cold = continued(ask, row, 5, temperature=0.01)
    assert {token["temperature"] for token in tokens(cold)} == {0.01}
    # Biases replace all of the row's.
    first = ask({**BODY, "max_tokens": 8, "logit_bias": {"5": -100, "6": 4}}, sampler="min-p")
    for changes, bans, bias in (
        ({}, [5], [[6, 4.0]]),
        ({"logit_bias": {"7": 2.5}}, [], [[7, 2.5]]),
        ({"logit_bias": {}}, [], []),
    ):
        again = continued(ask, row_of(first), 4, **changes)
        values = trace_of(ask, row_of(again))[0]["sampler_parameters"]
        assert (values["draw.bans"], values["draw.bias"]) == (bans, bias)
        assert changes or ids(again) == ids(first)[4:]


def test_a_choice_keeps_its_random_numbers(ask: Any) -> None:
    body = {**BODY, "n": 2, "max_tokens": 12, "entropix": {"details": True, "keep": True}}
    second = ask.client.post("/v1/completions", json=body).json()["choices"][1]
    again = continued(ask, row_of(second), 4)
    assert ids(again) == ids(second)[4:]
    assert {token["row"] for token in tokens(again)} == {1}


def test_streams_contain_the_row_first_and_last(ask: Any) -> None:
    talk = [{"role": "user", "content": "Hi", "index": 0}]
    for path, body in (
        ("completions", BODY),
        ("chat/completions", {"model": "tiny", "messages": talk}),
    ):
        body = {**body, "max_tokens": 5, "stream": True, "entropix": {"keep": True}}
        answer = ask.client.post(f"/v1/{path}", json=body).text.strip().split("\n\n")
        parts = [json.loads(part.removeprefix("data: "))["choices"][0] for part in answer[:-1]]
        named = [part.get("entropix", {}).get("row") for part in parts]
        assert named[0] == named[-1] is not None
        assert continued(ask, named[0], 1, max_tokens=2)


def test_a_row_whose_client_left_is_kept(ask: Any, running: Running) -> None:
    body = {**BODY, "max_tokens": 200, "stream": True, "entropix": {"keep": True}}
    body["logit_bias"] = {str(end): -100 for end in running.served.model.end_ids(chat=False)}
    with ask.client.stream("POST", "/v1/completions", json=body) as answer:
        line = next(line for line in answer.iter_lines() if line)
    row = row_of(json.loads(line.removeprefix("data: "))["choices"][0])
    assert len(tokens(continued(ask, row, 1, max_tokens=3))) == 3


def test_served_files_equal_those_of_the_command(ask: Any, tmp_path: Path) -> None:
    whole = ask({**BODY, "max_tokens": 8}, sampler="min-p")
    found = trace_of(ask, row_of(whole))
    path = tmp_path / "row.jsonl"
    arguments = "--model tiny --sampler min-p --max-new-tokens 8 --trace-top 10 --trace-layers"
    prompt = ["--seed", str(BODY["seed"]), "--prompt", BODY["prompt"], "--trace", str(path)]
    assert main(["generate", *arguments.split(), "--no-chat", *prompt]) == 0
    wanted = [json.loads(line) for line in path.read_text().splitlines()]
    assert found[0] == wanted[0]
    assert len(found) == len(wanted) == 10
    for here, there in zip(found[1:-1], wanted[1:-1], strict=True):
        assert [*here] == [*there]
        assert here["token_id"] == there["token_id"]
        np.testing.assert_allclose(here["layers"], there["layers"], atol=1e-3)
        assert [i for i, *_ in here["top"]] == [i for i, *_ in there["top"]]
    (here,), (there,) = found[-1]["rows"], wanted[-1]["rows"]
    assert here.keys() == there.keys()
    assert (here["text"], here["finish_reason"]) == (there["text"], there["finish_reason"])
    assert found[-1]["timings"].keys() == wanted[-1]["timings"].keys()
    assert tokens(whole) == found[1:-1]
    report = ask.client.get(f"/v1/rows/{row_of(whole)}/report")
    assert report.headers["content-type"].startswith("text/html")
    path.write_bytes(ask.client.get(f"/v1/rows/{row_of(whole)}/trace").content)
    assert report.text == run_page(path)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_new_tokens(ask: Any, stream: bool) -> None:
    own = tokens(whole := ask(BODY, sampler="min-p"))
    place = {"row": row_of(whole), "position": 5}
    body = {"model": "tiny", "max_tokens": 6, "entropix": {"from": place}, "stream": stream}
    answer = ask.client.post(
        "/v1/completions", json={**body, "stream_options": {"include_usage": True}}
    ).text.strip()
    last = json.loads(answer.split("\n\n")[-2].removeprefix("data: ") if stream else answer)
    assert last["usage"]["forwards"] == own[10]["forwards"] - own[4]["forwards"] > 0


def test_retracted_tokens_before_the_position_are_kept(ask: Any) -> None:
    row = row_of(ask(BODY, sampler=FULL))
    log = trace_of(ask, row)[1:-1]
    committed = [i for i, line in enumerate(log) if line["type"] == "token"]
    position = len(committed) - 3
    before = log[: committed[position - 1] + 1]
    assert len(before) > position
    lines = trace_of(ask, row_of(continued(ask, row, position, max_tokens=2)))
    assert lines[1 : len(before) + 1] == before
    assert lines[-1]["rows"][0]["retracted"] >= len(before) - position
    assert len([line for line in lines if line["type"] == "token"]) <= position + 2


def test_errors_of_continuations(ask: Any) -> None:
    row = row_of(ask({**BODY, "max_tokens": 6}, sampler="min-p"))
    crossed = {"thresholds.h1": 9.0, "thresholds.h2": 1.0}

    def refused(status: int = 400, path: str = "completions", **body: Any) -> str:
        answer = ask.client.post(f"/v1/{path}", json={"model": "tiny", **body})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        return str(error["code"] or error["message"])

    def at(position: int, own: Any = None, **place: Any) -> dict[str, Any]:
        return {"entropix": {"from": {"row": row, "position": position, **place}, **(own or {})}}

    assert refused(404, **at(1, row="none")) == "row_not_found"
    assert "the row has 6 tokens" in refused(**at(7))
    assert "position" in refused(**at(-1))
    assert "not a token id" in refused(**at(1, token=10**8))
    assert "max_tokens" in refused(**at(1), max_tokens=0)
    given: dict[str, Any] = {"prompt": "x", "n": 2, "echo": True}
    for name, value in given.items():
        assert f"{name} cannot be combined" in refused(**at(1), **{name: value})
    assert "no sampler key" in refused(**at(1, {"sampler": {"base.odd": 1}}))
    assert "is above" in refused(**at(1, {"sampler": crossed}))
    talk = [{"role": "user", "content": "Hi"}]
    assert refused(path="chat/completions", messages=talk, **at(1)) == "unsupported_parameter"
    for path in ("", "/trace", "/report"):
        assert ask.client.get(f"/v1/rows/none{path}").status_code == 404
    assert ask.client.delete(f"/v1/rows/{row}").status_code == 204
    assert ask.client.delete(f"/v1/rows/{row}").status_code == 404
    assert refused(404, **at(1)) == "row_not_found"


def a_row(size: int) -> Row:
    fields: dict[str, Any] = dict.fromkeys(TokenRecord.__dataclass_fields__, 0)
    token = TokenRecord(**fields)
    return Row(unrun([1]), log=[(token, False)] * (size - 1 - ROW_TOKENS))


def test_a_running_row_is_continued_from_its_log(tiny: LanguageModel) -> None:
    """The engine adds a token to the log before it adds it to the row's tokens."""
    row = a_row(3 + ROW_TOKENS)
    row.tokens = [row.log[0][0]]
    request = replace(unrun([1], "0", 9), sampler=serve(tiny).choose_sampler())
    new = continue_row(tiny, row, request, 2, [5])
    assert (len(new.prefix), [*new.forced]) == (2, [5])


def test_kept_rows_are_bounded() -> None:
    store = RowStore(100)
    first, second = store.put(a_row(40)), store.put(a_row(40))
    assert store.size == 80
    store.get(first)  # used, so the other one is evicted first
    store.put(a_row(30))
    assert (store.size, store.get(first).size) == (70, 40)
    with pytest.raises(ApiError, match="no such row"):
        store.get(second)
    # A running row counts with its present tokens, and with all once it has ended.
    running = a_row(1 + ROW_TOKENS)
    number = store.put(running)
    with pytest.raises(ApiError, match="has not ended"):
        store.get(number, ended=True)
    running.log += a_row(80).log
    store.end(number)
    assert store.size <= 100
    assert store.get(number, ended=True).row is running
    for _ in range(300):
        store.put(a_row(27))
        assert store.size <= 100
    too_large = store.put(a_row(101))
    assert store.size == 81  # the others stay
    with pytest.raises(ApiError):
        store.get(too_large)
    store.end(too_large)
    numbers = {store.put(a_row(20)) for _ in range(50)}
    assert len(numbers) == 50
    assert min(map(len, numbers)) >= 22  # 16 random bytes


def test_equal_samplers_share_memory(tiny: LanguageModel) -> None:
    served = serve(tiny)
    own = served.choose_sampler()
    first, second, other = (
        served.choose_sampler({"base.temperature": one}, base=own) for one in (0.5, 0.5, 0.7)
    )
    assert first is second is not other
    assert dict(first.values) == {**own.values, "base.temperature": 0.5}
    long = {"regimes.lelv": ["entropy < 1"] * 10000}
    for choice, base in ((long, None), ({"extends": "x" * 2**17}, None), (long, own)):
        with pytest.raises(ApiError, match="characters"):
            served.choose_sampler(choice, base=base)
