"""Rows that are kept: going on from any of their tokens, as traces and pages, and out of files."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from entropix_jax.cli import generate
from entropix_jax.engine.results import Row
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.model.loading import LanguageModel
from entropix_jax.report.page import run_page
from entropix_jax.sampler.state import MAX_REACH
from entropix_jax.serve.kept import ROW_TOKENS, Kept, KeptRow
from entropix_jax.serve.schema import ApiError, Own
from tests.support.runs import unrun
from tests.support.samplers import EVERYTHING
from tests.support.servers import Running, serve, standing_in

# Changes to the server's sampler, with settings that count over the row.
FULL: dict[str, Any] = {
    **EVERYTHING,
    "inject.thought": " More precisely,",
    "branch.min_p": 0.1,
    "dry.multiplier": 0.5,
    "truncation.rule": "mirostat",
    "mirostat.target": 9.0,
}
BODY: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "seed": 29, "max_tokens": 40}
# The first one compiles what all of them use.
SAMPLERS: dict[str, Any] = {"full": FULL, "mirostat": "mirostat", "entropix": "entropix"}


@pytest.fixture(scope="module")
def ask(running: Running) -> Iterator[Any]:
    with httpx.Client(base_url=running.url, timeout=None) as client:

        def ask(body: dict[str, Any], status: int = 200, **own: Any) -> Any:
            own = {"details": True, "keep": True, **own}
            answer = client.post("/v1/completions", json={**body, "entropix": own})
            assert answer.status_code == status, answer.text
            found = answer.json()
            return found["choices"][0] if status == 200 else found["error"]

        ask.client = client  # type: ignore[attr-defined]
        yield ask


def goes_on(ask: Any, row: str, position: int, token: Any = None, **options: Any) -> Any:
    place = {"row": row, "position": position} | ({} if token is None else {"token": token})
    own = options.pop("own", {})
    return ask({"model": "tiny", **options}, **{"from": place}, **own)


def tokens(choice: Any) -> list[Any]:
    found: list[Any] = choice["entropix"]["tokens"]
    return found


def ids(choice: Any) -> list[int]:
    return [token["token_id"] for token in tokens(choice)]


@pytest.fixture(scope="module", params=SAMPLERS)
def whole(request: pytest.FixtureRequest, ask: Any) -> Any:
    return ask(BODY, sampler=SAMPLERS[request.param])


def test_it_goes_on_as_it_did(ask: Any, whole: Any) -> None:
    """From each of its tokens, within thoughts and branches, too."""
    row, told = whole["entropix"]["row"], tokens(whole)
    every = 1 if any("branches" in token for token in told) else 5
    for position in range(0, len(told), every):
        again = goes_on(ask, row, position)
        assert ids(again) == ids(whole)[position:], position
        assert again["text"] == "".join(token["text"] for token in told[position:])
        assert again["entropix"]["finish_reason"] == whole["entropix"]["finish_reason"]
        for here, there in zip(tokens(again), told[position:], strict=True):
            assert (here["position"], here["row"]) == (there["position"], there["row"])
            np.testing.assert_allclose(here["entropy"], there["entropy"], atol=1e-3)
        assert again["entropix"]["row"] != row


def test_the_actions_are_there(ask: Any) -> None:
    """What the rows above go on within."""
    told = tokens(ask(BODY, sampler=FULL))
    assert {"inject", "branch", "backspace"} <= {token["action"] for token in told}
    assert any(t["action"] == "branch" and "branches" not in t for t in told)


def test_a_token_comes_first(ask: Any, whole: Any, tiny: LanguageModel) -> None:
    row, told = whole["entropix"]["row"], tokens(whole)
    for position in (0, 7, 20, len(told) - 1):
        others = (token for token, *_ in told[position]["top"][1:])
        other = next(token for token in others if token not in tiny.end_ids(chat=True))
        again = goes_on(ask, row, position, other, max_tokens=6)
        assert ids(again)[0] == other
        assert len(tokens(again)) == 6 or again["entropix"]["finish_reason"] == "eos"
        # And from that row once more: what was forced is a part of it.
        twice = goes_on(ask, again["entropix"]["row"], position + 1, max_tokens=5)
        assert ids(twice) == ids(again)[1:]


def test_several_tokens_come_first(ask: Any, whole: Any) -> None:
    row, told = whole["entropix"]["row"], tokens(whole)
    others = [told[3]["top"][2][0], told[0]["token_id"], told[5]["top"][1][0]]
    again = goes_on(ask, row, 3, others, max_tokens=6)
    assert ids(again)[:3] == others
    one = goes_on(ask, row, 3, others[0], max_tokens=1)
    two = goes_on(ask, one["entropix"]["row"], 4, others[1], max_tokens=1)
    three = goes_on(ask, two["entropix"]["row"], 5, others[2], max_tokens=4)
    assert ids(three) == ids(again)[2:]


def test_what_a_row_is(ask: Any, whole: Any) -> None:
    row = whole["entropix"]["row"]
    first, about = trace_of(ask, row)[0], ask.client.get(f"/v1/rows/{row}").json()
    assert about["sampler"] == first["sampler_parameters"]
    assert (about["prompt"], about["seed"]) == (first["prompt"], first["seed"])
    assert [box["regime"] for box in about["boxes"]] == ["lelv", "helv", "lehv", "hehv"]
    for name, value in about["thresholds"].items():
        assert value == first["sampler_parameters"].get(f"thresholds.{name}")
    assert (about["percentiles"], about["calibration"]) == (
        first["percentiles"],
        first["calibration"],
    )
    assert ask.client.get("/v1/rows/nothing").status_code == 404


def test_a_changed_threshold(ask: Any) -> None:
    """From the first decision that it changes on, the text is that of the whole row anew."""
    log = tokens(ask(BODY, sampler=FULL, retractions=True))
    whole = ask(BODY, sampler=FULL)
    row = whole["entropix"]["row"]
    first_position = log[0]["position"]
    differing = 0
    for changes in ({"thresholds.h2": 1.2}, {"thresholds.h1": 0.5}, {"thresholds.h1": 0.01}):
        values = {**FULL, **changes}
        rerun = ask(BODY, sampler=values)

        def box(entropy: float, values: dict[str, Any]) -> tuple[bool, ...]:
            bounds = (values["thresholds.h1"], values["thresholds.h2"], 2.0)
            return (*(entropy > bound for bound in bounds), entropy < bounds[0])

        # Retracted tokens were decided about, too; from then on the row may have gone back farther.
        at = next(
            i for i, t in enumerate(log) if box(t["entropy"], values) != box(t["entropy"], FULL)
        )
        back = [token["position"] for token in log[at:] if token["type"] == "retracted"]
        first = min([log[at]["position"], *back]) - first_position
        # Nor does a row go back beyond the place where it goes on.
        first = max(first - MAX_REACH, 0)
        again = goes_on(ask, row, first, own={"sampler": changes})
        assert ids(whole)[:first] + ids(again) == ids(rerun)
        differing += ids(rerun) != ids(whole)
    assert differing > 1


def test_what_a_request_may_change(ask: Any) -> None:
    whole = ask({**BODY, "stop": ["zzz"]}, sampler="min-p")
    row = whole["entropix"]["row"]
    other = goes_on(ask, row, 5, seed=8)
    assert ids(other) != ids(whole)[5:]
    assert other["entropix"]["seed"] == 8
    greedy = goes_on(ask, row, 5, own={"sampler": {"extends": "greedy"}}, max_tokens=4)
    assert {token["action"] for token in tokens(greedy)} == {"argmax"}
    assert len(tokens(greedy)) == 4
    stop = whole["text"][len("".join(t["text"] for t in tokens(whole)[:6])) :][4:8]
    stopped = goes_on(ask, row, 5, stop=stop)
    assert stopped["entropix"]["finish_reason"] == "stop"
    assert stop not in stopped["text"]
    cold = goes_on(ask, row, 5, temperature=0.01)
    assert {token["temperature"] for token in tokens(cold)} == {0.01}


def test_the_choice_keeps_its_number(ask: Any) -> None:
    """And with it its random numbers."""
    own = {"details": True, "keep": True}
    body = {**BODY, "n": 2, "max_tokens": 12, "entropix": own}
    second = ask.client.post("/v1/completions", json=body).json()["choices"][1]
    again = goes_on(ask, second["entropix"]["row"], 4)
    assert ids(again) == ids(second)[4:]
    assert {token["row"] for token in tokens(again)} == {1}


def test_streams_tell_the_row_first_and_last(ask: Any) -> None:
    for path, body in (
        ("completions", BODY),
        ("chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}),
    ):
        body = {**body, "max_tokens": 5, "stream": True, "entropix": {"keep": True}}
        answer = ask.client.post(f"/v1/{path}", json=body).text.strip().split("\n\n")
        parts = [json.loads(part.removeprefix("data: "))["choices"][0] for part in answer[:-1]]
        told = [part.get("entropix", {}).get("row") for part in parts]
        assert told[0] == told[-1] is not None
        assert goes_on(ask, told[0], 1, max_tokens=2)


def test_a_row_whose_client_left(ask: Any, running: Running) -> None:
    """It is kept with what it has."""
    body = {**BODY, "max_tokens": 200, "stream": True}
    body["logit_bias"] = {str(end): -100 for end in running.served.model.end_ids(chat=False)}
    body["entropix"] = {"keep": True}
    with ask.client.stream("POST", "/v1/completions", json=body) as answer:
        line = next(line for line in answer.iter_lines() if line)
    row = json.loads(line.removeprefix("data: "))["choices"][0]["entropix"]["row"]
    assert len(tokens(goes_on(ask, row, 1, max_tokens=3))) == 3


def test_biases_go_on(ask: Any) -> None:
    """Unless there are others, which replace all of them."""
    first = ask({**BODY, "max_tokens": 8, "logit_bias": {"5": -100, "6": 4}}, sampler="min-p")
    row = first["entropix"]["row"]
    for changes, bans, bias in (
        ({}, [5], [[6, 4.0]]),
        ({"logit_bias": {"7": 2.5}}, [], [[7, 2.5]]),
        ({"logit_bias": {}}, [], []),
    ):
        again = goes_on(ask, row, 4, **changes)
        values = trace_of(ask, again["entropix"]["row"])[0]["sampler_parameters"]
        assert (values["draw.bans"], values["draw.bias"]) == (bans, bias)
        assert changes or ids(again) == ids(first)[4:]


# Traces and pages


def trace_of(ask: Any, row: str) -> list[dict[str, Any]]:
    answer = ask.client.get(f"/v1/rows/{row}/trace")
    assert answer.status_code == 200
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_trace_is_as_the_command_writes_it(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask({**BODY, "max_tokens": 8}, sampler="min-p")
    found = trace_of(ask, whole["entropix"]["row"])
    path = tmp_path / "row.jsonl"
    arguments = "--model tiny --sampler min-p --max-new-tokens 8 --trace-top 10".split()
    arguments += ["--seed", str(BODY["seed"])]
    prompt = ["--prompt", BODY["prompt"], "--trace", str(path), "--trace-layers", "--no-chat"]
    assert generate.main([*arguments, *prompt]) == 0
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
    report = ask.client.get(f"/v1/rows/{whole['entropix']['row']}/report")
    assert report.headers["content-type"].startswith("text/html")
    path = tmp_path / "again" / "row.jsonl"
    path.parent.mkdir()
    path.write_bytes(ask.client.get(f"/v1/rows/{whole['entropix']['row']}/trace").content)
    assert report.text == run_page(path)


@pytest.mark.parametrize("kind", ["trace", "report"])
def test_files_go_on(ask: Any, kind: str) -> None:
    """They are kept as they were written; where no states are known the row is forced up to a
    place, and from there on it draws with its own random numbers."""
    whole = ask(BODY, sampler="min-p")
    row = whole["entropix"]["row"]
    content = ask.client.get(f"/v1/rows/{row}/{kind}").content
    (told,) = ask.client.post("/v1/rows", content=content).json()["rows"]
    assert told["row"] != row
    assert (told["prompt"], told["text"]) == (trace_of(ask, row)[0]["prompt"], whole["text"])
    assert told["tokens"] == tokens(whole)
    assert told["sampler"]["truncation.rule"]
    opened = told["row"]
    again, before = trace_of(ask, opened), trace_of(ask, row)
    assert before[0]["percentiles"]
    assert again[:-1] == before[:-1]
    assert again[-1]["rows"] == before[-1]["rows"]
    for position in (0, 9):
        rest = goes_on(ask, opened, position)
        assert ids(rest) == ids(whole)[position:]
    other = tokens(whole)[9]["top"][2][0]
    forced = goes_on(ask, opened, 9, other, max_tokens=4)
    assert ids(forced)[0] == other
    # The row that went on has the first tokens as they were told, and now has states.
    assert trace_of(ask, forced["entropix"]["row"])[1:10] == tokens(whole)[:9]
    once_more = goes_on(ask, forced["entropix"]["row"], 10, max_tokens=3)
    assert ids(once_more) == ids(forced)[1:]


def test_files_of_all_actions_go_on(ask: Any) -> None:
    whole = ask(BODY, sampler=FULL)
    content = ask.client.get(f"/v1/rows/{whole['entropix']['row']}/trace").content
    (told,) = ask.client.post("/v1/rows", content=content).json()["rows"]
    for position in (3, 17, len(tokens(whole)) - 1):
        rest = goes_on(ask, told["row"], position, max_tokens=5)
        assert len(tokens(rest)) == 5 or rest["entropix"]["finish_reason"] == "eos"
        again = goes_on(ask, rest["entropix"]["row"], position, max_tokens=5)
        assert ids(again) == ids(rest)


def test_files_that_are_refused(ask: Any) -> None:
    whole = ask({**BODY, "max_tokens": 3}, sampler="min-p")
    lines = trace_of(ask, whole["entropix"]["row"])

    def refused(content: bytes, status: int = 400) -> str:
        answer = ask.client.post("/v1/rows", content=content)
        assert answer.status_code == status, answer.text
        message: str = answer.json()["error"]["message"]
        assert "/tmp" not in message
        return message

    def changed(number: int, **values: Any) -> bytes:
        new = [dict(line) for line in lines]
        new[number] |= values
        return b"\n".join(json.dumps(line).encode() for line in new) + b"\n"

    assert "empty" in refused(b"")
    assert "not JSON" in refused(b"nothing")
    assert "without a trace" in refused(b"<!DOCTYPE html><p>")
    page = b'<script type="text/plain" id="trace-0">%s</script>'
    assert "damaged" in refused(page % b"AAAA")
    config = {**lines[0]["model_config"], "vocab_size": 7}
    assert "another model" in refused(changed(0, model_config=config))
    assert "another vocabulary" in refused(changed(0, prompt="Twice"))
    assert "not tokens" in refused(changed(0, prompt_tokens=[10**9]))
    values = lines[0]["sampler_parameters"]
    odd = {**values, "base.top_k": "x"}
    assert "base.top_k" in refused(changed(0, sampler_parameters=odd))
    assert "no sampler key" in refused(changed(0, sampler_parameters={**values, "odd": 1}))
    assert "is missing" in refused(changed(0, sampler_parameters={}))
    older = {key: value for key, value in values.items() if key != "draw.bias"}
    older_trace = ask.client.post("/v1/rows", content=changed(0, sampler_parameters=older))
    assert older_trace.status_code == 200
    assert "not tokens" in refused(changed(1, token_id=10**9))
    for odd in ({"forwards": 2**31}, {"action": "odd"}, {"top_k": -1}, {"chosen": False}):
        assert "has invalid values" in refused(changed(1, **odd))
    first, _, *rest = changed(1).split(b"\n")
    assert "has invalid values" in refused(b"\n".join([first, *rest[:-2]]))
    assert "not Unicode" in refused(changed(1, text="\ud800"))
    assert "older version" in refused(changed(1, self_certainty=None))
    assert "layers" in refused(changed(1, layers=[[1.0]]))
    layers = [[*heads] for heads in lines[1]["layers"]]
    layers[0][0] = 1e300
    odd_numbers: dict[str, Any] = {"token_confidence": 10**400, "temperature": 1e39}
    odd_numbers |= {"layers": layers, "top": [[1, "x", 10**400]]}
    for name, value in odd_numbers.items():
        assert "single precision" in refused(changed(1, **{name: value})), name
    branch = {"tokens": [1], "text": "x", "chosen": True, "score": None}
    assert "not tokens" in refused(changed(1, branches=[{**branch, "tokens": [None]}]))
    assert "not tokens" in refused(changed(1, top=[[10**9, "x", 0.5]]))
    assert "not tokens" in refused(changed(0, prompt_tokens=[None]))
    for odd in (
        {"text": "x" * 5000},
        {"branches": [branch] * 9},
        {"branches": [{**branch, "tokens": [1] * 33}]},
        {"ambiguous": ["x" * 5000]},
    ):
        assert "has invalid values" in refused(changed(1, **odd))
    (end,) = lines[-1]["rows"]
    for odd in ({"finish_reason": "x" * 5000}, {"error": "x" * 5000}):
        assert "invalid finish reason" in refused(changed(-1, rows=[{**end, **odd}]))
    assert "too long" in refused(changed(0, sampler="x" * 5000))
    assert "messages" in refused(changed(0, messages=[{"role": "user"}]))
    long_message = {"role": "user", "content": "x" * 10**6}
    assert "this server keeps" in refused(changed(0, messages=[long_message]), 413)
    long = {**values, "regimes.lelv": ["entropy < 1"] * 10000}
    assert "characters" in refused(changed(0, sampler_parameters=long))
    assert ask.client.post("/v1/completions", json=BODY).status_code == 200


def test_texts_of_a_file_are_its_tokens(ask: Any) -> None:
    """What a file says of them takes no memory."""
    whole = ask({**BODY, "stop": ["e"]}, sampler="min-p")
    assert whole["entropix"]["finish_reason"] == "stop"
    lines = trace_of(ask, whole["entropix"]["row"])
    top = [[i, "x" * 9000, p] for i, _, p in lines[1]["top"]]
    branches = [{"tokens": ids(whole)[:2], "text": "x" * 9000, "chosen": True, "score": None}]
    (end,) = lines[-1]["rows"]

    def opened(text: str, **token: Any) -> Any:
        footer = {**lines[-1], "rows": [{**end, "text": text}]}
        new = [lines[0], {**lines[1], **token}, *lines[2:-1], footer]
        content = b"\n".join(json.dumps(line).encode() for line in new) + b"\n"
        (told,) = ask.client.post("/v1/rows", content=content).json()["rows"]
        return told

    assert opened(end["text"])["text"] == whole["text"]
    told = opened("y" * 9000, top=top * 9, branches=branches)
    assert told["text"] == "".join(token["text"] for token in tokens(whole))
    assert told["tokens"][0]["top"] == (lines[1]["top"] * 9)[:20]
    assert len(told["tokens"][0]["branches"][0]["text"]) < 100


def test_counts_of_a_file_play_no_part(ask: Any, running: Running) -> None:
    """A row that goes on counts what it spends itself."""
    whole = ask({**BODY, "max_tokens": 5}, sampler="min-p")
    lines = trace_of(ask, whole["entropix"]["row"])
    for line in lines[1:-1]:
        line["forwards"] = 2**31 - 1
    content = b"\n".join(json.dumps(line).encode() for line in lines) + b"\n"
    (told,) = ask.client.post("/v1/rows", content=content).json()["rows"]
    row = told["row"]
    for position in (3, 4, 5):
        again = goes_on(ask, row, position, max_tokens=3)
        assert max(token["forwards"] for token in tokens(again)) < 100
        row = again["entropix"]["row"]
    assert max(line["forwards"] for line in trace_of(ask, row)[1:-1]) < 100
    assert running.worker.failures == 0


def test_usage_counts_what_is_new(ask: Any) -> None:
    whole = ask(BODY, sampler="min-p")
    place = {"row": whole["entropix"]["row"], "position": 5}
    for stream in (False, True):
        body = {"model": "tiny", "max_tokens": 6, "entropix": {"from": place}, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
            answer = ask.client.post("/v1/completions", json=body).text.strip().split("\n\n")
            usage = json.loads(answer[-2].removeprefix("data: "))["usage"]
        else:
            usage = ask.client.post("/v1/completions", json=body).json()["usage"]
        told = tokens(whole)
        assert usage["forwards"] == told[10]["forwards"] - told[4]["forwards"] > 0


def test_retracted_tokens_before_the_place_stay(ask: Any) -> None:
    """In a row that goes on, from its states or from a file."""
    whole = ask(BODY, sampler=FULL)
    row = whole["entropix"]["row"]
    content = ask.client.get(f"/v1/rows/{row}/trace").content
    (told,) = ask.client.post("/v1/rows", content=content).json()["rows"]
    log = trace_of(ask, row)[1:-1]
    committed = [i for i, line in enumerate(log) if line["type"] == "token"]
    position = len(committed) - 3
    before = log[: committed[position - 1] + 1]
    assert len(before) > position

    def plain(lines: Any) -> Any:
        return [{k: v for k, v in line.items() if k != "forwards"} for line in lines]

    for source in (row, told["row"]):
        again = goes_on(ask, source, position, max_tokens=2)
        lines = trace_of(ask, again["entropix"]["row"])
        assert plain(lines[1 : len(before) + 1]) == plain(before)
        assert lines[-1]["rows"][0]["retracted"] >= len(before) - position
        assert len([line for line in lines if line["type"] == "token"]) <= position + 2


def test_slow_files_hold_nobody_up(ask: Any, running: Running) -> None:
    host, _, port = running.url.removeprefix("http://").rpartition(":")
    head = f"POST /v1/rows HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 9\r\n\r\nx"
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(head.encode())
        time.sleep(0.2)
        answer = httpx.post(f"{running.url}/v1/rows", content=b"", timeout=10)
        assert "empty" in answer.json()["error"]["message"]


# What is refused, and what goes


def test_places_that_are_refused(ask: Any) -> None:
    whole = ask({**BODY, "max_tokens": 6}, sampler="min-p")
    row = whole["entropix"]["row"]

    def refused(status: int = 400, path: str = "completions", **body: Any) -> str:
        answer = ask.client.post(f"/v1/{path}", json={"model": "tiny", **body})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        return str(error["code"] or error["message"])

    def at(position: Any, **place: Any) -> dict[str, Any]:
        return {"entropix": {"from": {"row": row, "position": position, **place}}}

    assert refused(404, **at(1, row="none")) == "row_not_found"
    assert "the row has 6 tokens" in refused(**at(7))
    assert "position" in refused(**at(-1))
    assert "not a token id" in refused(**at(1, token=10**8))
    assert "prompt cannot be combined" in refused(**at(1), prompt="x")
    assert "n cannot be combined" in refused(**at(1), n=2)
    assert "echo cannot be combined" in refused(**at(1), echo=True)
    assert "max_tokens" in refused(**at(1), max_tokens=0)
    place = {"row": row, "position": 1}
    odd = {"from": place, "sampler": {"base.odd": 1}}
    assert "no sampler key" in refused(entropix=odd)
    odd = {"from": place, "sampler": {"thresholds.h1": 9.0, "thresholds.h2": 1.0}}
    assert "is above" in refused(entropix=odd)
    talk = [{"role": "user", "content": "Hi"}]
    assert refused(path="chat/completions", messages=talk, **at(1)) == "unsupported_parameter"
    for path in ("trace", "report"):
        assert ask.client.get(f"/v1/rows/none/{path}").status_code == 404
    assert ask.client.delete(f"/v1/rows/{row}").status_code == 204
    assert ask.client.delete(f"/v1/rows/{row}").status_code == 404
    assert refused(404, **at(1)) == "row_not_found"


def kept_row(tokens: int) -> KeptRow:
    log: list[Any] = [(object(), False)] * (tokens - 1 - ROW_TOKENS)
    return KeptRow(Row(unrun([1]), log=log))


def test_memory_is_bounded() -> None:
    kept = Kept(100)
    first = kept.put(kept_row(40))
    second = kept.put(kept_row(40))
    assert kept.size == 80
    kept.get(first)  # used: the other one goes first
    third = kept.put(kept_row(30))
    assert kept.size == 70
    assert kept.get(first).size == 40
    with pytest.raises(ApiError, match="no such row"):
        kept.get(second)
    # A row that runs counts with what it has, and with all of it once it has ended.
    running = kept_row(1 + ROW_TOKENS)
    number = kept.put(running)
    with pytest.raises(ApiError, match="has not ended"):
        kept.get(number, ended=True)
    running.row.log += [(token, False) for token in [_plain_token()] * 60]
    kept.settle(number)
    assert kept.size <= 100
    assert kept.get(number, ended=True) is running
    for _ in range(300):
        kept.put(kept_row(27))
        assert kept.size <= 100
    too_large = kept.put(kept_row(101))
    assert kept.size == 81  # the others stay
    with pytest.raises(ApiError):
        kept.get(too_large)
    kept.settle(too_large)
    numbers = {kept.put(kept_row(20)) for _ in range(50)}
    assert len(numbers) == 50
    assert min(map(len, numbers)) >= 22  # 16 random bytes
    del third


def test_rows_that_are_kept_take_no_time() -> None:
    """However many there are."""
    kept, rows = Kept(2**31), [kept_row(20) for _ in range(20000)]
    began = time.thread_time()
    numbers = [kept.put(row) for row in rows]
    assert time.thread_time() - began < 1
    assert kept.size == 20 * len(rows)
    for number in numbers[::2]:
        kept.drop(number)
    assert kept.size == 10 * len(rows)


def test_equal_samplers_take_memory_once(tiny: LanguageModel) -> None:
    served = serve(tiny)
    own = served.choose_sampler(Own(), {})
    first, second, other = (
        served.change_sampler(own, {"base.temperature": one}) for one in (0.5, 0.5, 0.7)
    )
    assert first is second is not other
    assert dict(first.values) == {**own.values, "base.temperature": 0.5}
    with pytest.raises(ApiError, match="is above"):
        served.change_sampler(first, {"thresholds.h1": 9.0, "thresholds.h2": 1.0})
    for long in ({"regimes.lelv": ["entropy < 1"] * 10000}, {"extends": "x" * 2**17}):
        with pytest.raises(ApiError, match="characters"):
            served.choose_sampler(Own(sampler=long), {})
    with pytest.raises(ApiError, match="characters"):
        served.change_sampler(own, {"regimes.lelv": ["entropy < 1"] * 10000})


def _plain_token() -> TokenRecord:
    values: dict[str, Any] = dict.fromkeys(TokenRecord.__slots__, 0)
    return TokenRecord(**{**values, "layers": None})


def test_keys_and_origins_are_asked_for(tiny: LanguageModel) -> None:
    async def check(client: Any) -> None:
        async with client() as one:
            for method, path in (
                ("GET", "/v1/rows/x/trace"),
                ("GET", "/v1/rows/x/report"),
                ("DELETE", "/v1/rows/x"),
                ("POST", "/v1/rows"),
            ):
                assert (await one.request(method, path)).status_code == 401
                key = {"Authorization": "Bearer secret"}
                foreign = {**key, "Origin": "https://other.org"}
                assert (await one.request(method, path, headers=foreign)).status_code == 403
                assert (await one.request(method, path, headers=key)).status_code in (400, 404)
            body = {**BODY, "entropix": {"keep": True}}
            answer = await one.post("/v1/completions", json=body, headers=key)
            told = answer.json()["error"]["message"]
            assert told == "entropix.keep: this server keeps no rows (--keep)"
            large = b" " * (32 * 2**20 + 1)
            assert (await one.post("/v1/rows", content=large, headers=key)).status_code == 413

    with standing_in(tiny, keys=["secret"], keep=0) as (_, _, client):
        asyncio.run(check(client))
