"""The live page in a browser, on a server with the engine, and with a recorded stream."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from entropix_jax.names import MEANINGS, REGIMES
from entropix_jax.report.page import regime_rule
from tests.support.browser import Watched, check_accessibility, each, frames
from tests.support.reports import SAMPLER
from tests.support.samplers import CALIBRATION
from tests.support.servers import Running
from tests.support.traces import read_trace

READY, IDLE, FRESH = "html[data-ready]", "html[data-state=idle]", "body.fresh"
OWN = {"backspace.max_prob": 1, "branch.min_p": 0.005}
HELD = "#text-0 .token.pinned"


@pytest.fixture(scope="module")
def shown(running: Running, browser: Any) -> Iterator[Watched]:
    one = Watched(browser, viewport={"width": 1440, "height": 900})
    yield one
    assert one.messages == []
    assert {url.split("/")[2] for url in one.requests if not url.startswith("blob:")} == {
        running.url.removeprefix("http://")
    }
    one.context.close()


@pytest.fixture
def page(shown: Watched, running: Running) -> Any:
    """The page with a finished text."""
    open_page(shown, running)
    generate(shown.page)
    return shown.page


def open_page(one: Watched, running: Running) -> Any:
    """Opens the page with a new session."""
    if one.page.url.startswith(running.url):
        one.page.evaluate("sessionStorage.clear()")
    one.page.goto(running.url)
    return opened(one.page)


def opened(page: Any) -> Any:
    page.wait_for_selector(READY, state="attached")
    page.click("#options summary")
    return page


@pytest.fixture
def fresh(watched: Callable[..., Watched]) -> Watched:
    return watched()


def generate(page: Any, prompt: str = "Guests:", **changes: Any) -> None:
    page.fill("#prompt", prompt)
    page.fill("#own", " ".join(f"{key}={value}" for key, value in (OWN | changes).items()))
    page.fill("#tokens", "60")
    page.fill("#seed", "3")
    page.keyboard.press("Control+Enter")
    settled(page, 1)


def settled(page: Any, texts: int) -> None:
    """Waits until the tree has a number of texts, and all have ended."""
    page.wait_for_selector(f"#tree-list li:nth-child({texts})")
    page.wait_for_selector(IDLE, state="attached")
    page.wait_for_selector("#save-trace:enabled")
    page.wait_for_selector("#settings:not([hidden])")


def ask(page: Any, prompt: str, texts: int) -> None:
    page.fill("#prompt", prompt)
    page.click("#go")
    settled(page, texts)


def pick(page: Any, at: int, texts: int) -> str:
    """Continues with the best alternative of a token, whose text it returns."""
    page.click(f"#text-0 .token:not(.retracted) >> nth={at}")
    other = page.locator("#details-body .choice[data-token]:enabled").first
    text = str(other.text_content()).strip("“”")
    other.click()
    settled(page, texts)
    return text


def change(page: Any, setting: str, value: str) -> None:
    page.fill("#setting", setting)
    page.fill("#value", value)
    page.press("#value", "Enter")


def tokens(page: Any, number: int = 0, box: str = "text") -> list[str]:
    text = "[...node.childNodes].filter((c) => c.className !== 'sign').map((c) => c.data).join('')"
    return [*each(page, f"#{box}-{number} .token:not(.retracted)", text)]


def complete(running: Running, **changes: Any) -> list[dict[str, Any]]:
    """Returns the tokens of the same text, requested without the page."""
    body = {"model": "tiny", "prompt": "Guests:", "max_tokens": 60, "seed": 3}
    own = {"tokens": True, "details": True, "sampler": OWN | changes}
    asked = httpx.post(f"{running.url}/v1/completions", json=body | {"entropix": own}, timeout=60)
    found: list[dict[str, Any]] = asked.json()["choices"][0]["entropix"]["tokens"]
    return found


def texts_of(records: list[dict[str, Any]]) -> list[str]:
    names = [{number: name for number, name, _ in one["top"]} for one in records]
    return [
        one["text"] or name.get(one["token_id"], f"⟨{one['token_id']}⟩")
        for one, name in zip(records, names, strict=True)
    ]


def test_the_text_equals_the_servers_and_tokens_have_details(page: Any, running: Running) -> None:
    expected = complete(running)
    assert tokens(page) == texts_of(expected)
    lines = "[node.textContent, node.getClientRects().length]"
    words = [one for one in each(page, "#text-0 .token", lines) if one[0][0] == " "]
    assert [text for text, count in words if count > 1 and "\n" not in text] == []
    assert each(page, "#text-0 .token:not(.retracted)", "node.dataset.regime") == [
        one["regime"] for one in expected
    ]
    page.hover("#text-0 .token >> nth=5")
    row = "[Number(node.querySelector('button').dataset.token),"
    row += " Number(node.querySelector('data').value)]"
    top = each(page, ".alternatives tr", row)
    assert top == [[number, share] for number, _, share in expected[5]["top"]]
    assert page.locator("#details-body canvas").count() == 2
    assert ". Entropy " in page.locator("#why").text_content()
    assert page.locator("#share-mid").text_content().endswith("%")
    legend = each(page, "#legend li", "node.firstChild.textContent")
    assert legend == [f"{name} ({regime.upper()})" for regime, name in MEANINGS.items()]
    marks = each(page, "#work .marks li", "[node.children[0].classList[1], node.checkVisibility()]")
    assert marks == [[name, page.locator(f"#text-0 .{name}").count() > 0] for name, _ in marks]
    cost = page.locator("#main .about").text_content()
    assert f" · {expected[-1]['forwards'] / len(expected):.2f} forward passes per token · " in cost
    assert cost.endswith(" tokens/s")


def test_a_recorded_example_is_shown_until_a_text_is(fresh: Watched, running: Running) -> None:
    """Its tokens can be selected and recoloured before the server answers."""
    page = fresh.page
    page.route("**/v1/**", lambda route: route.abort())
    page.goto(running.url)
    page.click("#text-0 .token >> nth=5")
    assert "a favourite and rivals. The sampler " in page.locator("#legend").text_content()
    assert page.locator(".alternatives tr").count() == 5
    assert page.locator("#details-body .choice").count() == 0
    before = each(page, "#text-0 .token", "node.dataset.regime")
    assert {*before} == {*REGIMES}
    page.locator("#knob-h2 + input").fill("0.5")
    page.locator("#knob-h2 + input").blur()
    page.wait_for_selector("#first:has-text('only its colours change')")
    assert each(page, "#text-0 .token", "node.dataset.regime") != before
    fresh.messages.clear()
    page.unroute("**/v1/**")
    example = page.locator("#examples button").last.text_content()
    page.locator("#examples button").last.click()
    assert page.locator(FRESH).count() == 1, "a text began before the form was sent"
    page.click("#go")
    settled(page, 1)
    assert page.locator("#asked").text_content() == page.input_value("#prompt") == example


def claim(page: Any, later: int = 0, **changes: Any) -> None:
    """Changes what the server says about itself. `later`: seconds added to its start."""

    def answer(route: Any) -> None:
        found = route.fetch().json()
        found["data"][0]["entropix"] |= changes
        found["data"][0]["created"] += later
        route.fulfill(json=found)

    page.route("**/v1/models", answer)


def test_an_alternative_is_continued_and_undone(page: Any) -> None:
    before = tokens(page)
    for at in (5, 8):  # the token of the text is no choice
        page.click(f"#text-0 .token:not(.retracted) >> nth={at}")
        disabled = page.locator("#details-body .choice:disabled").all_text_contents()
        assert disabled in ([], [f"“{before[at]}”"])
        page.click(HELD)
    page.fill("#tokens", "9")
    with page.expect_request("**/v1/completions") as asking:
        chosen = pick(page, 5, 2)
    assert asking.value.post_data_json["max_tokens"] == 9
    after = tokens(page)
    assert after[:6] == [*before[:5], chosen]
    assert tokens(page, 1) == before
    assert page.locator("#text-0 .token.chosen").count() == 1
    assert each(page, ".text .parts", "Number(node.dataset.index)") == [5, 5]
    page.fill("#name", "mine")
    page.press("#name", "Enter")
    assert page.locator("[aria-current]").text_content().startswith("mine")
    page.keyboard.press("Alt+p")
    assert tokens(page) == before
    page.click("#undo")
    assert tokens(page) == after
    page.click("#undo")  # the name
    page.click("#undo")
    assert (tokens(page), page.locator("#tree-list li").count()) == (before, 1)
    page.click("#redo")
    assert tokens(page) == after


def thresholds(page: Any) -> list[float]:
    return each(page, "#knobs input[type=number]", "Number(node.value)")  # h1, h2, u1, u2


def grab_threshold(page: Any, axis: str) -> tuple[float, float]:
    """Presses the mouse on the first threshold along an axis of the plane. Returns its pixel."""
    plane = page.locator("#plane")
    plane.scroll_into_view_if_needed()
    box = plane.bounding_box()
    x, y, width, height = (box[name] for name in ("x", "y", "width", "height"))
    along = [(x + i, y + 80) for i in range(56, int(width) - 52, 2)]
    if axis == "y":  # upwards
        along = [(x + 0.6 * width, y + height - i) for i in range(34, int(height) - 24, 2)]

    def is_near(point: tuple[float, float]) -> bool:
        page.mouse.move(*point)
        shown = page.locator("#plane canvas").last.evaluate("(node) => node.style.cursor")
        return bool(shown == {"x": "ew-resize", "y": "ns-resize"}[axis])

    near = [*takewhile(is_near, dropwhile(lambda point: not is_near(point), along))]
    line = near[len(near) // 2]
    page.mouse.move(*line)
    page.mouse.down()
    return line


def test_a_dragged_threshold_regenerates_the_text(page: Any, running: Running) -> None:
    """The text equals one generated with the new threshold."""
    before = complete(running)
    h1, *others = thresholds(page)
    x, y = grab_threshold(page, "x")
    page.mouse.move(x - 60, y)
    page.mouse.move(x - 140, y)
    page.wait_for_selector("#first:not(:empty)")
    page.mouse.up()
    settled(page, 2)
    moved = thresholds(page)[0]
    assert moved < h1
    assert thresholds(page)[1:] == others
    assert tokens(page) == texts_of(complete(running, **{"thresholds.h1": moved}))
    assert tokens(page, 1) == texts_of(before)
    assert "with the same seed" in page.locator("#first").text_content()
    at = page.locator("[aria-current] .muted").text_content().split(" from ")[1].split(" · ")[0]
    assert f"regenerated from {at}," in page.locator("#first").text_content()


def test_settings_regenerate_the_text(page: Any, running: Running) -> None:
    """A threshold that is the unit of arms changes tokens of the same regime, too."""
    changes: dict[str, Any] = {}

    def check(key: str, value: Any) -> None:
        changes[key] = value
        assert tokens(page) == texts_of(complete(running, **changes))

    page.locator("#knob-h1").focus()
    for _ in range(3):
        page.keyboard.press("PageDown")
    settled(page, 2)
    check("thresholds.h1", thresholds(page)[0])
    named = {"inject.thought": " Hm,", "thresholds.h1": "30%", "metrics.units": "thresholds"}
    for texts, (key, value) in enumerate(named.items(), 3):
        change(page, key, value)
        settled(page, texts)
        check(key, value)
    page.locator("#knob-u2 + input").fill("3.5")
    page.locator("#knob-u2 + input").blur()
    settled(page, 6)
    check("thresholds.u2", 3.5)


def test_regeneration_starts_where_a_decision_can_change(page: Any) -> None:
    """Regeneration starts before the first changed decision if the row may step back from there."""
    for back, sampler in (
        (0, {"arms.hehv": "resample"}),
        (1, {"arms.hehv": "backspace", "backspace.reach": 1}),
        (3, {"arms.hehv": "backspace", "backspace.reach": 3}),
        (8, {"arms.hehv": "resample", "phrases.banned": ["x"]}),
    ):
        found = page.evaluate(
            """async (sampler) => {
                const { firstChange } = await import("/static/decisions.js");
                const items = [...Array(20).keys()].map((i) => ({
                    position: 5 + i, index: i, type: "token", regime: i < 12 ? "lelv" : "mid" }));
                const facts = { boxes: [], thresholds: {}, sampler };
                return firstChange({ items, facts }, { "arms.mid": "argmax" });
            }""",
            {"arms.mid": "sample"} | sampler,
        )
        assert found == {"index": 12, "place": 12 - back}


def saved(page: Any, folder: Path, kind: str) -> Path:
    with page.expect_download() as saving:
        page.click(f"#save-{kind}")
    path = folder / str(saving.value.suggested_filename)
    saving.value.save_as(path)
    return path


def test_saved_files_are_opened_again(page: Any, tmp_path: Path) -> None:
    """A text of a file is continued from its words. Files of other versions and damaged ones are
    errors of one line."""
    words = tokens(page)
    trace, report = (saved(page, tmp_path, kind) for kind in ("trace", "report"))
    header, *lines = trace.read_text("utf-8").splitlines(keepends=True)
    first = json.loads(header)
    for problem, content in {
        "has trace format 9": json.dumps(first | {"format_version": 9}),
        "line 3 is invalid": f"{header}{lines[0]}{lines[1][:40]}\n{lines[2]}",
        "its header is invalid": json.dumps(first | {"sampler_parameters": {}}) + "\n" + lines[0],
        "bad.jsonl is not a trace": "hello",
        "cannot be unpacked": '<!doctype html><script type="text/plain" id="trace-0">eNq7',
    }.items():
        (bad := tmp_path / "bad.jsonl").write_text(content, "utf-8")
        page.set_input_files("#file", bad)
        page.wait_for_selector(f"#failure-text:has-text('{problem}')")
    page.set_input_files("#file", report)
    page.wait_for_selector("[aria-current]:has-text('text.html')")
    assert tokens(page) == words
    make = "made.items.add(new File([text], 'dropped.jsonl')); return made; }"
    make = f"(text) => {{ const made = new DataTransfer(); {make}"
    dropped = page.evaluate_handle(make, header + "".join(lines[:20]))
    page.dispatch_event("#work", "drop", {"dataTransfer": dropped})
    page.wait_for_selector("[aria-current]:has-text('dropped.jsonl')")
    assert "ended: interrupted" in page.locator("#main .about").text_content()
    assert page.locator("#save-trace").is_disabled()
    with page.expect_request("**/v1/completions") as asking:
        text = pick(page, 5, 4)
    assert asking.value.post_data_json["prompt"] == "".join([first["prompt"], *words[:5], text])
    assert tokens(page)[:5] == words[:5]


def test_continuations_of_a_search_are_in_the_tree(fresh: Watched, running: Running) -> None:
    """Continuations start where they diverge, and can be shown, compared and continued."""
    values = {"h1": 0.5, "h2": 1.2, "u1": 0.5, "u2": 0.5}
    own = {f"thresholds.{name}": value for name, value in values.items()}
    prompt = "Then Adam went to the market."
    asked = {"sampler": {"extends": "min-p", **own}, "method": "dts-greedy", "forks": 4}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "seed": 2}
    body["entropix"] = asked | {"details": True}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json()
    told = answer["choices"][0]["entropix"]
    assert told["chosen"] == 1
    page = open_page(fresh, running)
    page.select_option("#preset", "min-p")
    page.fill("#own", " ".join(f"{key}={value}" for key, value in own.items()))
    page.select_option("#method", "dts-greedy")
    page.fill("#forks", "4")
    page.fill("#tokens", "20")
    page.fill("#seed", "2")
    ask(page, prompt, len(told["continuations"]))
    assert tokens(page) == texts_of(told["tokens"])
    chosen = f"chosen by dts-greedy from {len(told['continuations'])} texts"
    assert chosen in page.inner_text("#main")
    texts: list[list[dict[str, Any]]] = []
    for one in told["continuations"]:
        at = one["position"] - told["tokens"][0]["position"] if "parent" in one else 0
        texts.append([*texts[one["parent"]][:at], *one["tokens"]] if at else one["tokens"])
    depth_first = each(page, "#tree-list button", "node.textContent")
    assert len(depth_first) == len(texts)
    seen = []
    for number, name in enumerate(depth_first):
        page.locator("#tree-list button").nth(number).click()
        seen.append(tokens(page))
        assert (" from position " in name) == (number > 0)
        assert all(each(page, "#text-0 .token", "Boolean(node.dataset.regime)"))
    assert sorted(seen) == sorted(map(texts_of, texts))
    pick(page, 3, len(texts) + 1)
    page.click("#undo")
    page.click("#undo")
    assert page.locator("#tree-list li").count() == 0


def test_all_turns_of_a_chat_are_shown_and_can_be_continued(page: Any, tmp_path: Path) -> None:
    """Saved files have the messages and the choices."""
    page.check("#chat")
    ask(page, "What is 1 + 1?", 2)
    first = tokens(page)
    ask(page, "And then?\n" * 6 + "And then?", 3)
    second = tokens(page)
    page.fill("#prompt", "Third")
    page.keyboard.press("Enter")
    settled(page, 4)
    asked = each(page, ".flow .asked", "node.textContent.slice(-9)")
    assert asked == ["is 1 + 1?", "And then?", "Third"]
    assert [tokens(page, turn, "turn") for turn in (0, 1)] == [first, second]
    assert all(each(page, "#turns .token", "Boolean(node.dataset.regime)"))
    hidden = "(node) => node.scrollHeight - node.clientHeight - node.scrollTop"
    assert page.locator("#main .flow").evaluate(hidden) < 1, "the end of the newest answer is shown"
    assert page.locator("[aria-current]").text_content().endswith(" next turn")
    page.click("#text-0 .token >> nth=0")
    page.click("#turn-0 .token >> nth=0")
    assert each(page, ".token.pinned", "node.id") == ["turn-0-0"]
    page.locator("#details-body .choice[data-token]:enabled").first.click()
    settled(page, 5)
    assert page.locator("#asked").text_content() == "What is 1 + 1?"
    assert page.locator("#turns .text").count() == 0
    page.click("#afresh")
    page.keyboard.type("Another\n")
    settled(page, 6)
    assert page.locator("#asked").text_content() == "Another"
    pick(page, 0, 7)
    header, picked, *_ = read_trace(saved(page, tmp_path, "trace"))
    assert picked["chosen"] is True
    assert header["messages"] == [{"role": "user", "content": "Another"}]
    assert "<html" in saved(page, tmp_path, "report").read_text("utf-8")[:1000]


def test_a_text_and_a_rejected_branch_are_continued(page: Any, running: Running) -> None:
    """The text is continued after its token limit."""
    page.fill("#tokens", "5")
    page.press("#tokens", "Control+Enter")
    settled(page, 2)
    page.fill("#tokens", "60")
    page.click("#tools .continue")
    settled(page, 3)
    assert tokens(page) == texts_of(complete(running))
    assert page.locator("#beside:visible, .continue:visible").count() == 0
    before = (
        "[...node.parentElement.children].slice(0, [...node.parentElement.children].indexOf(node))"
    )
    seams = each(page, "#text-0 .seam", f"{before}.filter((one) => one.dataset.index).length")
    assert seams == [5]
    change(page, "arms.helv", "branch")
    settled(page, 4)
    page.click("#text-0 .token.branch-start >> nth=0")
    lost = page.locator("#details-body [data-branch]").first
    text = lost.text_content().strip("“”")
    at = len(each(page, f"#text-0 .token:not(.retracted):has(~ {HELD.split()[1]})", "0"))
    lost.click()
    settled(page, 5)
    assert "".join(tokens(page)[at:]).startswith(text)
    assert page.locator("#text-0 .token.chosen").count() >= 1
    assert tokens(page, 1)[at] != tokens(page)[at]


def edit(page: Any, name: str, typed: str, texts: int) -> dict[str, Any]:
    """Presses a button below a text, types into the field in its place, and returns the request."""
    with page.expect_request("**/v1/**completions") as asking:
        page.get_by_role("button", name=name).press("Enter")
        if typed:
            page.keyboard.type(typed)
            page.keyboard.press("Control+Enter")
    settled(page, texts)
    return dict(asking.value.post_data_json)


def test_an_edited_text_continues_from_the_cursor(page: Any) -> None:
    """It can be continued from tokens before and after the edit."""
    before = tokens(page)
    page.get_by_role("button", name="Edit text").press("Enter")
    page.keyboard.press("Escape")
    assert focused(page) == "Edit text"
    page.click("#text-0 .token:not(.retracted) >> nth=6")
    asked = edit(page, "Edit text", " Zelda and", 2)
    assert asked["prompt"] == f"Guests:{''.join(before[:7])} Zelda and"
    edited = tokens(page)
    assert edited[:7] == before[:7]
    assert page.locator("#text-0 .written").text_content() == " Zelda and"
    for texts, at in ((3, 7), (4, 2)):
        pick(page, at, texts)
        assert tokens(page)[:at] == edited[:at]
        assert page.locator("#text-0 .written").count() == (at == 7)
    assert edit(page, "Edit prompt", " x", 5)["prompt"] == "Guests: x"


def test_earlier_turns_are_edited_and_repeated(page: Any) -> None:
    """A moved slider is a setting of the next turn."""
    page.check("#chat")
    page.fill("#system", "Be brief.")
    ask(page, "What is 1 + 1?", 2)
    ask(page, "And 2 + 2?", 3)
    asked = [{"role": "system", "content": "Be brief."}]
    asked.append({"role": "user", "content": "What is 1 + 1?"})
    repeated = edit(page, "Retry, answer 1", "", 4)
    assert (repeated["messages"], "seed" in repeated) == (asked, False)
    words = "".join(tokens(page)[:-1])  # without the end of the text
    answer = edit(page, "Edit answer", " Or 3.", 5)["messages"][2]
    assert answer == {"role": "assistant", "content": f"{words} Or 3."}
    asked[1]["content"] += " Go!"
    assert edit(page, "Edit message", " Go!", 6)["messages"] == asked
    page.locator("#knob-base-temperature + input").fill("1.5")
    page.locator("#knob-base-temperature + input").blur()
    settled(page, 7)
    page.fill("#prompt", "And 3 + 3?")
    with page.expect_request("**/v1/chat/completions") as asking:
        page.click("#go")
    settled(page, 8)
    own = asking.value.post_data_json["entropix"]["sampler"]
    assert own == OWN | {"base.temperature": 1.5}
    assert "base.temperature=1.5" in page.locator("#chosen").text_content()
    page.locator("#tree-list button").first.click()
    assert "temperature" not in page.locator("#chosen").text_content()


def test_texts_survive_a_reload_in_mid_stream(fresh: Watched, running: Running) -> None:
    """A second tab of a session continues a copy. Sessions are opened and deleted from a list."""
    page = open_page(fresh, running)
    play(page, running, 2000)
    page.click("#go")
    page.wait_for_selector("#text-0 .token >> nth=100")
    before = tokens(page)
    page.reload()
    opened(page)
    assert tokens(page)[: len(before)] == before
    assert "ended: interrupted" in page.locator("#main .about").text_content()
    page.click("#sessions-open")
    page.click("#sessions-new")
    page.wait_for_selector(FRESH)
    generate(opened(page))
    words = tokens(page)
    other = page.context.new_page()
    other.goto(running.url)
    other.click("#sessions-open")
    other.click("#sessions-list button:has-text('Guests:')")
    other.wait_for_selector("#failure-text:has-text('open in another tab')")
    assert tokens(opened(other)) == words
    other.locator("#save-trace:enabled").wait_for()
    other.click("#sessions-open")
    other.locator("#sessions-list button:has-text('x')").first.wait_for()
    for text in ("Delete", "Delete for good"):
        other.locator("#sessions-list li", has_text="open").get_by_text(text, exact=True).click()
    other.wait_for_selector(FRESH)
    assert tokens(page) == words


@pytest.mark.parametrize(
    "script",
    ["IDBObjectStore.prototype.put = () => { throw new Error('full'); }", "indexedDB.open = null"],
)
def test_texts_that_are_not_stored_are_told(fresh: Watched, running: Running, script: str) -> None:
    fresh.page.add_init_script(script)
    page = open_page(fresh, running)
    generate(page)
    page.wait_for_selector("#unstored:has-text('This browser stores no texts')")
    unload = "!dispatchEvent(new Event('beforeunload', { cancelable: true }))"
    assert page.evaluate(unload), "the browser asks before it leaves"


def test_page_errors_are_one_line(shown: Watched, page: Any) -> None:
    """A request that fails leaves no text. One whose programs are still compiled is repeated."""
    page.fill("#prompt", "")
    page.click("#go")
    page.wait_for_selector("#prompt:invalid")
    page.fill("#prompt", "Guests:")
    page.fill("#own", "base.nothing=1")
    page.click("#go")
    page.wait_for_selector("#failure:not([hidden])")
    assert "base.nothing" in page.locator("#failure-text").text_content()
    page.wait_for_selector(IDLE, state="attached")
    assert all("400" in told for told in shown.messages)
    shown.messages.clear()
    page.fill("#own", 'base.temperature=1 base.top_p 0.9 inject.thought="x"y')
    page.click("#go")
    words = 'key=value, not “base.top_p 0.9 inject.thought="x"y”'
    page.wait_for_selector(f"#failure-text:has-text('{words}')")
    page.fill("#own", "")
    page.fill("#prompt", "word " * 200_000)
    page.click("#go")
    page.wait_for_selector("#failure-text:has-text('a row has room for')")
    assert len(page.input_value("#prompt")) == 1_000_000
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    top = page.locator("#failure").bounding_box()["y"]
    assert 0 <= top < 100, "it stays in view"
    generate(page)
    settled(page, 2)
    assert page.locator("#failure").is_hidden()
    error = {"message": "still compiling (5 in the queue): try again later", "code": "compiling"}
    answer = {"status": 503, "headers": {"Retry-After": "1"}, "json": {"error": error}}
    page.route("**/v1/completions", lambda route: route.fulfill(**answer), times=1)
    page.click("#go")
    reason = "still compiling (5 in the queue): the page tries again in 1 s"
    page.wait_for_selector(f"#main .about:has-text('{reason}')")
    settled(page, 3)
    before, busy = tokens(page), {"error": {"message": "busy"}}
    page.route("**/v1/completions", lambda route: route.fulfill(status=429, json=busy))
    change(page, "base.temperature", "0.5")
    page.wait_for_selector("#failure:not([hidden])")
    page.wait_for_selector(IDLE, state="attached")
    assert (tokens(page), page.locator("#tree-list li").count()) == (before, 3)
    assert page.locator("#first").text_content() == ""
    page.unroute("**/v1/completions")
    page.click("#undo")  # the third text: the failed request is no step
    assert page.locator("#tree-list li").count() == 2
    shown.messages.clear()


def focused(page: Any) -> str:
    found: str = page.evaluate("document.activeElement.id || document.activeElement.textContent")
    return found


def test_names_and_focus_follow_their_texts(page: Any) -> None:
    page.click("#text-0 .token >> nth=5")
    page.locator("#details-body .choice[data-token]").nth(1).focus()
    page.keyboard.press("Enter")
    settled(page, 2)
    assert focused(page) == "details-body"
    for shortcut, name in (("Alt+n", "second"), ("Alt+ArrowUp", "first")):
        page.keyboard.press(shortcut)
        page.keyboard.press("Control+a")
        page.keyboard.type(name)
    page.keyboard.press("Tab")
    names = each(page, "#tree-list button", "node.firstChild.textContent")
    assert names == ["first", "second"]
    page.locator("#tree-list button").nth(1).focus()
    page.keyboard.press("Enter")
    assert focused(page).startswith("second")
    page.click("#prune")
    page.click("#prune")
    assert page.locator(FRESH).count() == 1
    assert focused(page) == "undo"
    page.keyboard.press("Enter")
    assert page.locator(FRESH).count() == 0


def pressed(page: Any, place: str, key: str, code: str) -> bool:
    """Presses Alt and a key in an element. Returns whether the page handles the key."""
    event = "{ key, code, altKey: true, bubbles: true, cancelable: true }"
    press = f"(node, [key, code]) => !node.dispatchEvent(new KeyboardEvent('keydown', {event}))"
    return bool(page.locator(f"#{place}").evaluate(press, [key, code]))


def test_keys_that_type_a_character_are_no_shortcuts_in_fields(page: Any) -> None:
    """Outside fields they are shortcuts, whatever character they would type."""
    for keys in ("prompt π KeyP", "prompt { KeyB", "own Dead KeyN", "preset p KeyP"):
        assert not pressed(page, *keys.split())
    assert page.locator("#tree-list li").count() == 1
    assert focused(page) != "name"
    assert pressed(page, "prompt", "n", "KeyN")
    assert focused(page) == "name"
    assert pressed(page, "text-0", "π", "KeyP")
    assert page.locator("#tree-list li").count() == 0


def test_a_text_is_stopped_or_its_connection_lost(fresh: Watched, running: Running) -> None:
    """The shortcut that stops it types ß on a Mac. A server that was started again has no rows."""
    page = open_page(fresh, running)
    play(page, running, 2000)
    page.click("#go")
    page.wait_for_selector("body:not(.fresh) #text-0 .token")
    assert not pressed(page, "prompt", "ß", "KeyS")
    assert page.locator("#stop").is_enabled()
    assert pressed(page, "text-0", "ß", "KeyS")
    page.wait_for_selector("#main .about:text('ended: stopped')")
    assert page.locator("#save-trace").is_enabled()
    claim(page, later=1)
    page.evaluate("window.lost = true")
    page.click("#go")
    page.wait_for_selector("#failure-text:text('connection to the server was lost')")
    assert page.locator("#save-trace").is_disabled()
    page.wait_for_selector("#failure-text:text('server was started again')")
    assert page.locator("#save-trace").is_disabled()
    page.evaluate("window.lost = false")
    page.click("#tools .continue")
    page.wait_for_function("window.asked?.prompt.startsWith('x')")


def test_chats_and_kept_rows_depend_on_the_server(fresh: Watched, running: Running) -> None:
    """Chat is the default for chat models. A server that keeps no rows generates."""
    assert open_page(fresh, running).is_checked("#completion")
    claim(fresh.page, chat=True)
    assert "message" in open_page(fresh, running).get_attribute("#prompt", "placeholder")
    asked: list[dict[str, Any]] = []
    claim(fresh.page, keep=0)
    page = open_page(fresh, running)
    page.on("request", lambda request: asked.append(request.post_data_json))
    assert page.locator("#keeps-none").is_visible()
    page.fill("#prompt", "Guests:")
    page.fill("#tokens", "5")
    page.click("#go")
    page.wait_for_selector("#main .about:text('5 tokens, 0 retracted, ended')")
    page.click("#text-0 .token >> nth=2")
    assert page.locator(".alternatives tr").count() > 1
    page.locator(".choice:enabled").first.click()
    page.wait_for_selector("#tree-list li:nth-child(2)")
    page.wait_for_selector(IDLE, state="attached")
    assert [body["entropix"].keys() for body in asked] == [{"details", "retractions"}] * 2


def test_the_key_dialog_repeats_until_a_key_is_accepted(fresh: Watched, running: Running) -> None:
    page = fresh.page
    given: list[str | None] = []

    def guard(route: Any) -> None:
        given.append(route.request.headers.get("authorization"))
        right = given[-1] == "Bearer right"
        route.continue_() if right else route.fulfill(status=401, json={})

    page.route("**/v1/**", guard)
    page.goto(running.url)
    page.wait_for_selector("#key-box[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#failure:not([hidden])")
    page.fill("#prompt", "Guests:")
    page.click("#go")
    for key, next_ in (("schlüssel", "ASCII"), ("wrong", "refuses"), (" right ", None)):
        page.fill("#key", key)
        page.press("#key", "Enter")
        if next_:
            page.wait_for_selector(f"#key-problem:text('{next_}')")
    settled(page, 1)
    assert list(dict.fromkeys(given)) == [None, "Bearer wrong", "Bearer right"]
    fresh.messages.clear()


@pytest.mark.parametrize("size", [(320, 640, "dark"), (1280, 800, "light")])
def test_layout(running: Running, watched: Callable[..., Watched], size: Any) -> None:
    """The text is on the first screen, on a wide one next to the plane. axe finds no violations."""
    width, height, _ = size
    page = open_page(watched(*size), running)
    generate(page)
    page.click("#options summary")
    form, *others = each(page, "#ask, #text-0, #plane", "node.getBoundingClientRect().bottom")
    assert form < (310 if width < 900 else 120)
    assert max(others[:1] if width < 900 else others) <= height
    pick(page, 5, 2)
    page.keyboard.press("Alt+h")
    check_accessibility(page)
    assert page.evaluate("document.documentElement.scrollWidth") == width


# A stream of 2,000 tokens.

PLAYED = """(events) => {
    const real = window.fetch;
    window.fetch = (path, options) => {
        if (path === "/v1/rows/R") return Promise.resolve(new Response(events.about));
        if (path !== "/v1/completions") return real(path, options);
        window.asked = JSON.parse(options.body);
        return Promise.resolve(new Response(new ReadableStream({ async start(control) {
            options.signal.addEventListener("abort", () => control.error(options.signal.reason));
            for (const event of events.stream) {
                if (options.signal.aborted) return;
                if (window.lost) return control.error(new TypeError("network error"));
                control.enqueue(new TextEncoder().encode(event));
                await new Promise((done) => setTimeout(done, 4));
            }
            control.close();
        } })));
    };
}"""


def stream(template: dict[str, Any], count: int) -> Iterator[str]:
    """Yields events of 5 tokens, every 12th a fork, every 25th after a retracted one."""
    rng = random.Random(1)
    lost = {"text": " c", "tokens": [3], "score": -2.0, "chosen": False}
    branches = [{"text": " a b", "tokens": [1, 2], "score": -1.0, "chosen": True}, lost]
    made: list[dict[str, Any]] = []
    for i in range(count):
        own = {"position": 3 + i, "regime": rng.choice(REGIMES), "action": "sample"}
        own |= {"entropy": 5 * rng.random(), "varentropy": 5 * rng.random()}
        own["text"] = rng.choice([" word", " other", ",", " some", ".", "\n"])
        made += [template | own | {"type": "retracted"}] * (i % 25 == 0)
        made.append(template | own | ({} if i % 12 else {"branches": branches, "action": "branch"}))
    while made:
        part, made = made[:5], made[5:]
        own = {"tokens": part, "row": "R", **({} if made else {"finish_reason": "length"})}
        yield f"data: {json.dumps({'choices': [{'index': 0, 'text': '', 'entropix': own}]})}\n\n"
    yield "data: [DONE]\n\n"


def about_row() -> str:
    about = {"row": "R", "prompt": "x", "seed": 1, "sampler": dict(SAMPLER.values)}
    about |= regime_rule(SAMPLER.values, "")
    own = {"percentiles": dict(SAMPLER.percentiles), "calibration": CALIBRATION.to_json()}
    return json.dumps(about | own)


def play(page: Any, running: Running, count: int) -> None:
    """Answers the page's next request with a stream of `count` tokens."""
    events = {"stream": [*stream(complete(running)[0], count)], "about": about_row()}
    page.evaluate(PLAYED, events)
    page.fill("#prompt", "x")


COUNTED = """() => {
    window.added = 0;
    const count = (changes) => {
        for (const { addedNodes } of changes) window.added += addedNodes.length;
    };
    new MutationObserver(count).observe(document.body, { childList: true, subtree: true });
}"""


def test_a_new_token_does_not_redraw_others(running: Running, watched: Any) -> None:
    """The page adds about as many nodes for a text of 1,000 tokens as for ten of 100."""
    added = []
    for count in (100, 1000):
        page = open_page(watched(), running)
        play(page, running, count)
        page.evaluate(COUNTED)
        page.click("#go")
        last = f"#text-0 .token[data-index='{count + count // 25 - 1}']"
        page.wait_for_selector(last, state="attached", timeout=60_000)
        page.wait_for_selector(IDLE, state="attached")
        added.append(page.evaluate("window.added"))
    assert 1000 < added[1] < 11 * added[0]


def test_a_slider_moved_as_a_text_ends_has_an_effect(fresh: Watched, running: Running) -> None:
    page = open_page(fresh, running)
    play(page, running, 200)
    page.evaluate(
        """async () => {
            document.getElementById("go").click();
            const frame = () => new Promise(requestAnimationFrame);
            while (!document.querySelector("body:not(.fresh) #knob-h1")) await frame();
            while (!document.querySelector("#text-0 .token")) await frame();
            const slider = document.getElementById("knob-h1");
            const fire = (kind) => slider.dispatchEvent(new Event(kind, { bubbles: true }));
            slider.value *= 0.9;
            fire("input");
            fire("change");
        }"""
    )
    page.wait_for_selector("#tree-list li:nth-child(2)")
    page.wait_for_selector(IDLE, state="attached")
    fresh.messages.clear()


def test_equal_thresholds_are_separated_by_dragging(fresh: Watched, running: Running) -> None:
    """The direction of the pointer selects the threshold. Labels show values and percentiles."""
    page = open_page(fresh, running)
    play(page, running, 40)
    page.click("#go")
    settled(page, 1)
    h1, h2, u1, u2 = thresholds(page)
    assert u1 == u2
    told = each(page, "#knobs output", "node.textContent.replace(' of the generic table', '')")
    assert told == ["30 %", "70 %", "60 %", "60 %"]
    x, y = grab_threshold(page, "y")
    page.mouse.move(x, y - 30)
    frames(page)
    higher = thresholds(page)
    assert higher[:3] == [h1, h2, u1]
    assert higher[3] > u2
    page.mouse.move(x, y + 30)  # it stops at the lower threshold
    frames(page)
    assert thresholds(page) == [h1, h2, u1, u2]
    page.mouse.up()
    x, y = grab_threshold(page, "y")
    page.mouse.move(x, y + 30)
    frames(page)
    assert thresholds(page)[2] < u1
    page.mouse.up()
    settled(page, 2)
