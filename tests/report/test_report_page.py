"""The page of a run in a browser."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.__main__ import main
from entropix_jax.names import MEANINGS, QUANTITIES, REGIMES
from entropix_jax.report.page import run_page, write_report
from entropix_jax.report.tokens import MARKS, name_of
from entropix_jax.sampler.calibration import PERCENTS, Calibration
from entropix_jax.sampler.files import parse_setting
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.regimes import classify
from tests.support.browser import (
    Watched,
    check_accessibility,
    check_layout,
    each,
    frames,
    plot,
    reloaded,
    watched_page,
)
from tests.support.reports import (
    NASTY,
    SAMPLER,
    SERIES,
    STATIC,
    Parsed,
    branching,
    committed,
    footer,
    header,
    run_of,
    token,
    write,
)
from tests.support.samplers import CALIBRATION, metrics_of, params_of
from tests.support.traces import Trace, load_trace

# A run of the embedded model with all regimes, branches and retractions.
RUN = [
    *("--model", "tiny", "--sampler", "entropix"),
    *("--prompt", "Guests:", "--max-new-tokens", "250", "--seed", "3", "--ignore-eos"),
    *("--trace-top", "5", "--trace-layers", "--set", "sampler.branch.min_p=0.005"),
    *("sampler.base.temperature=1.0", "sampler.backspace.max_prob=1"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    """The command's page of 250 tokens, and its trace."""
    folder = tmp_path_factory.mktemp("run")
    path, output = folder / "trace.jsonl", folder / "page.html"
    assert main(["generate", *RUN, "--trace", str(path), "--report", str(output)]) == 0
    trace = load_trace(path)
    tokens = committed(trace)
    assert (len(tokens), {record["regime"] for record in tokens}) == (250, set(REGIMES))
    assert any(len(record.get("branches", ())) > 1 for record in tokens)
    assert len(trace.tokens) > len(tokens)
    assert output.stat().st_size < 8e6
    return output, trace


@pytest.fixture(scope="module")
def shown(browser: Any, run: tuple[Path, Trace]) -> Iterator[Any]:
    with watched_page(browser, run[0]) as page:
        yield page


@pytest.fixture
def page(shown: Any) -> Any:
    return reloaded(shown)


@pytest.fixture
def opened(watched: Callable[..., Watched], tmp_path: Path) -> Callable[..., Any]:
    """Returns a function that opens the page of a trace with given lines."""

    def opened(*lines: dict[str, Any]) -> Any:
        write_report(write(tmp_path / "trace.jsonl", *lines), tmp_path / "page.html")
        return watched().open(tmp_path / "page.html")

    return opened


def details(page: Any) -> dict[str, float]:
    """Returns the metrics of the selected token, by their names in the trace."""
    value = "[node.dataset.field, Number(node.querySelector('data').value)]"
    return dict(each(page, "#details-body tr[data-field]", value))


def selected(page: Any) -> int:
    return int(page.locator("#text-0 .token.selected").get_attribute("data-index"))


def quoted(record: dict[str, Any]) -> str:
    text = record["text"]
    return f"“{text}”".replace("\n", "↵") if text else name_of(record)


# Contents.


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1440, "light")])
def test_layout_and_contrast(
    watched: Callable[..., Watched], run: tuple[Path, Trace], width: int, scheme: str
) -> None:
    """Nothing is clipped, text has enough contrast, and the page sends no request."""
    one = watched(width, scheme=scheme)
    page = one.open(run[0])
    assert page.locator("#plane .scatterlayer .trace").count() > 5
    page.locator("#attention").scroll_into_view_if_needed()
    page.wait_for_selector("#heat .heatmaplayer image")
    check_layout(page, width)
    check_accessibility(page)
    assert page.locator("main > .panel:not([hidden])").count() == 9
    assert one.requests == [run[0].as_uri()]


def test_the_text_equals_the_trace(shown: Any, run: tuple[Path, Trace]) -> None:
    text = "[...node.childNodes].filter((c) => c.className !== 'sign').map((c) => c.data).join('')"
    spans = each(shown, "#text-0 .token", f"[{text}, node.dataset.regime, [...node.classList]]")
    forked = False
    for (word, regime, classes), record in zip(spans, run[1].tokens, strict=True):
        assert word == (record["text"] or name_of(record))
        assert regime == record["regime"]
        assert ("retracted" in classes) == (record["type"] == "retracted")
        chosen = record.get("chosen", False)
        assert ("chosen" in classes) == chosen
        assert ("injected" in classes) == (record["action"] == "inject" and not chosen)
        if record.get("branches") or record["action"] != "branch":  # else it follows in a branch
            forked = len(record.get("branches") or ()) > 1
        assert ("branched" in classes) == forked
        assert ("branch-start" in classes) == (len(record.get("branches", ())) > 1)
        assert ("loop" in classes) == record["loop"]
    drawn = {name for _, _, classes in spans for name in classes}
    legend = set(each(shown, ".marks .token", "node.classList[1]"))
    assert {"branched", "retracted"} <= legend == drawn & MARKS.keys()


def test_details_of_a_token_equal_the_trace(shown: Any, run: tuple[Path, Trace]) -> None:
    checked = [*enumerate(run[1].tokens)][::20]
    assert {record["type"] for _, record in checked} == {"token", "retracted"}
    for i, record in checked:
        shown.evaluate(f"document.getElementById('text-0-{i}').click()")
        found = details(shown)
        assert found == {name: record[name] for name in found}
        assert len(found) == 19
        assert each(shown, "#details-body", "node.scrollHeight <= node.clientHeight") == [True]
        top = each(shown, ".alternatives data", "Number(node.value)")
        assert top == [probability for _, _, probability in record["top"]]


def percentiles(trace: Trace, quantity: str, values: Any) -> Any:
    """Returns the percentiles of values in the trace's own table."""
    return np.interp(values, trace.header["calibration"]["quantiles"][quantity], PERCENTS)


def test_the_plots_contain_every_token(shown: Any, run: tuple[Path, Trace]) -> None:
    """The axes of the plane are percentiles."""
    tokens = committed(run[1])
    points = plot(shown, "plane", "data.map((trace) => [trace.customdata, trace.x, trace.y])")
    for (bits, xs, ys), regime in zip(points, REGIMES, strict=False):
        assert bits == [[r["entropy"], r["varentropy"]] for r in tokens if r["regime"] == regime]
        entropies, varentropies = zip(*bits, strict=True)
        np.testing.assert_allclose(xs, percentiles(run[1], "entropy", entropies))
        np.testing.assert_allclose(ys, percentiles(run[1], "varentropy", varentropies))
    assert len(points[5][0]) == len(run[1].tokens) - len(tokens)
    lines = plot(shown, "series", "data.map((trace) => [trace.name, trace.x, trace.y])")
    positions = [r["position"] for r in tokens]
    assert lines == [[name, positions, [r[name] for r in tokens]] for name in SERIES]
    shown.locator("#attention").scroll_into_view_if_needed()
    shown.wait_for_selector("#heat .heatmaplayer image")
    flat = [[value for layer in r["layers"] for value in layer] for r in tokens]
    np.testing.assert_array_equal(np.array(plot(shown, "heat", "data[0].z")), np.array(flat).T)


def test_branches_and_retracted_tokens(page: Any, run: tuple[Path, Trace]) -> None:
    records = run[1].tokens
    rows = each(page, "#retractions-list tr", "[...node.cells].map((cell) => cell.textContent)")
    retracted = [(i, r) for i, r in enumerate(records) if r["type"] == "retracted"]
    for (_, before, after, _), (i, record) in zip(rows, retracted, strict=True):
        instead = next(r for r in records[i:] if r["type"] == "token")
        assert (before, after) == (quoted(record), quoted(instead))
    branched = [r for r in committed(run[1]) if "branches" in r]
    forked = [r for r in branched if len(r["branches"]) > 1]
    leaf = "[leaf.querySelector('.leaf-text').textContent, Number(leaf.querySelector('data').value)"
    leaves = f"[...node.querySelectorAll('.leaf')].map((leaf) => {leaf}, leaf.matches('.chosen')])"
    position = "Number(node.querySelector('.root data').value)"
    trees = each(page, "#branches-list .tree", f"[{position}, {leaves}]")
    for (place, found), record in zip(trees, forked, strict=True):
        assert place == record["position"]
        assert Counter(map(tuple, found)) == Counter(
            (quoted({**b, "token_id": b["tokens"][0]}), b["score"], b["chosen"])
            for b in record["branches"]
        )
        assert [score for _, score, _ in found] == sorted((s for _, s, _ in found), reverse=True)
    page.locator("#branches-several").uncheck()
    assert page.locator("#branches-list .tree").count() == len(branched)
    page.locator("#branches-list .root").first.click()
    assert selected(page) == run[1].tokens.index(branched[0])
    assert page.locator("#branches-list .tree.current").count() == 1


# Selecting.


def test_selecting_a_token(page: Any, run: tuple[Path, Trace]) -> None:
    spans = page.locator("#text-0 .token")
    for i in (5, 9):
        spans.nth(i).hover()
        assert selected(page) == i
        frames(page)
        record = run[1].tokens[i]
        assert details(page)["entropy"] == record["entropy"]
        ring = plot(page, "plane", "data.at(-1).customdata[0]")
        assert ring == [record["entropy"], record["varentropy"]]
        assert plot(page, "series", "layout.shapes[0].x0") == record["position"]
    spans.nth(7).click()  # pins it
    spans.nth(3).hover()
    assert selected(page) == 7
    spans.nth(7).click()  # unpins it
    spans.nth(3).hover()
    assert selected(page) == 3
    box, last = page.locator("#text-0"), len(run[1].tokens) - 1
    box.focus()
    for key, expected in (
        *(("Home", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowLeft", 0)),
        *(("End", last), ("ArrowRight", last)),
    ):
        page.keyboard.press(key)
        assert selected(page) == expected
        assert box.get_attribute("aria-activedescendant") == f"text-0-{expected}"
    outer, inner = (one.bounding_box() for one in (box, page.locator("#text-0 .token.selected")))
    assert outer["y"] <= inner["y"] <= outer["y"] + outer["height"] - inner["height"]


# The plane.


def test_quadrants_and_thresholds_are_labelled(shown: Any) -> None:
    """Names precede acronyms. Labels of equal thresholds are on both sides of the line."""
    labels = plot(shown, "plane", "layout.shapes.map((one) => one.label?.text).filter(Boolean)")
    words = [re.sub(r"<[^>]*>", "", label) for label in labels]
    assert sorted(words) == sorted(f"{name} {one.upper()}" for one, name in MEANINGS.items())
    lines = plot(shown, "plane", "layout.annotations.map((one) => [one.text, one.yanchor])")
    found = [(re.sub(r"<br>", " ", re.sub(r"</?b>", "", text)), side) for text, side in lines]
    assert found[:2] == [("h1 30 %", "bottom"), ("h2 70 %", "bottom")]
    assert found[2:] == [("u1 60 %", "top"), ("u2 60 %", "bottom")]
    assert plot(shown, "plane", "layout.shapes.filter((one) => one.line.dash).length") == 4


# Other thresholds.


def shown_percentiles(page: Any) -> list[str]:
    return each(page, "#knobs output", "node.textContent")


def shares(page: Any) -> dict[str, list[int]]:
    counts = "[...node.querySelectorAll('data')].map((one) => Number(one.value))"
    return dict(each(page, "#occupancy tr", f"[node.dataset.regime, {counts}]"))


def set_knob(page: Any, name: str, value: float) -> None:
    page.locator(f"#knob-{name} + input").fill(str(value))
    frames(page)


def settings_of(page: Any) -> dict[str, Any]:
    """Returns the settings of the command on the page."""
    option, *words = shlex.split(page.locator("#what-if-command").text_content())
    assert option == "--set"
    return dict(map(parse_setting, words))


def sampler_of(page: Any, folder: Path) -> dict[str, Any]:
    """Returns the values of the sampler file on the page."""
    file = folder / "mine.toml"
    file.write_text(page.locator("#what-if-file").text_content(), encoding="utf-8")
    return dict(load_sampler(str(file)).values)


def test_other_thresholds_reclassify_the_run(
    page: Any, run: tuple[Path, Trace], tmp_path: Path
) -> None:
    """Texts, shares and plots change. The classification itself is tested below."""
    records = run[1].tokens
    start = Counter(r["regime"] for r in committed(run[1]))
    before = {name: [start[name], start[name]] for name in REGIMES}
    assert shares(page) == before
    assert page.locator("#what-if .what-if-reset").is_disabled()
    answers = "of this model's answers"
    assert shown_percentiles(page) == [f"{p} % {answers}" for p in (30, 70, 60, 60)]
    page.locator("#knob-h2").fill("85")  # a percentile, on the slider
    frames(page)
    assert shown_percentiles(page)[1] == f"85 % {answers}"
    quantiles = run[1].header["calibration"]["quantiles"]
    assert float(page.locator("#knob-h2 + input").input_value()) == quantiles["entropy"][85]

    values = {"h1": 0.8, "h2": 2.1, "u1": 0.9, "u2": 3.5}
    for name, value in values.items():
        set_knob(page, name, value)
    rank = float(percentiles(run[1], "entropy", 0.8))
    assert shown_percentiles(page)[0] == f"{round(rank, 1):g} % {answers}"
    settings = {f"thresholds.{name}": value for name, value in values.items()}
    found = zip(each(page, "#text-0 .token", "node.dataset.regime"), records, strict=True)
    now = Counter(regime for regime, record in found if record["type"] == "token")
    assert now != start
    assert shares(page) == {name: [start[name], now[name]] for name in REGIMES}
    edge = percentiles(run[1], "entropy", float(np.float32(0.8)))
    assert plot(page, "plane", "layout.shapes[0].x1") == pytest.approx(edge)

    # The command and a sampler file accept the text of the page.
    assert settings_of(page) == settings
    assert settings.items() <= sampler_of(page, tmp_path).items()
    page.locator("#what-if-note .what-if-reset").click()
    frames(page)
    assert shares(page) == before
    assert page.locator("#what-if-note").is_hidden()


def test_sampler_files_and_commands_of_the_page(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Percentiles that are not changed are kept in the file and in the command."""
    # The file is valid TOML for any settings.
    changes = {"inject.thought": [NASTY, '\\ \x7f\t"'], "metrics.layers": [1e-7, 1.0, 0.0, 1e6]}
    sampler = SAMPLER.with_values(changes)
    page = opened(header(sampler="mine", sampler_parameters=dict(sampler.values)), *run_of())
    assert sampler_of(page, tmp_path) == sampler.written

    sampler = load_sampler("document-002").resolve(CALIBRATION)
    own = {"sampler_parameters": dict(sampler.values), "percentiles": dict(sampler.percentiles)}
    page = opened(header(**own), *run_of())
    set_knob(page, "attn_entropy_norm-0-44", 0.3)
    set_knob(page, "u2", 4.5)
    moved = ["entropy < h2", "varentropy < u2", "attn_entropy_norm < 0.3", "agreement > 50%"]
    expected = {**sampler.written, "regimes.lelv": moved, "thresholds.u2": 4.5}
    assert sampler_of(page, tmp_path) == expected
    found = settings_of(page)
    assert found == {key: expected[key] for key in found}
    assert found.keys() >= {"thresholds.h2", "regimes.hehv", "regimes.lelv", "thresholds.u2"}

    # A preset with numbers in its conditions, no named thresholds.
    values = dict(load_sampler("document-001").resolve(CALIBRATION).values)
    records = [token(3 + i, entropy=0.3 * i, varentropy=0.05) for i in range(20)]
    page = opened(header(sampler_parameters=values), *records, footer(records))
    set_knob(page, "entropy-0-1", 1.0)
    assert settings_of(page)["regimes.lelv"] == ["entropy < 1", "varentropy < 0.1"]
    assert shares(page)["lelv"][1] == 4  # 0, 0.3, 0.6, 0.9
    assert settings_of(page).items() <= sampler_of(page, tmp_path).items()


def run_module(browser: Any, name: str, function: str, argument: Any) -> Any:
    """Returns the result of a JavaScript function of a module without imports and an argument."""
    module = base64.b64encode((STATIC / name).read_bytes()).decode()
    blank = browser.new_page()
    found = blank.evaluate(
        f"""async ([module, argument]) => {{
            const found = await import(`data:text/javascript;base64,${{module}}`);
            return ({function})(found, argument);
        }}""",
        [module, argument],
    )
    blank.close()
    return found


def test_percentiles_of_the_page_equal_the_samplers(browser: Any) -> None:
    """Converts to values and back, in tables with plateaus, and beyond their ends."""
    draw = np.random.default_rng(0)
    for _ in range(5):
        table = np.sort(draw.uniform(0, 10, 101)).round(draw.integers(0, 4))
        own = Calibration({"entropy": table}, "", 0, {})
        percents = [*draw.uniform(0, 100, 50), 0, 30, 100]
        values = [*draw.uniform(-1, 11, 50), *table]
        found = run_module(
            browser,
            "quadrants.js",
            """({valueAt, percentileOf}, [table, percents, values]) => [
                percents.map((percent) => valueAt(table, percent)),
                values.map((value) => percentileOf(table, value))]""",
            [table.tolist(), percents, [*map(float, values)]],
        )
        assert found[0] == pytest.approx([own.value("entropy", p) for p in percents], rel=2e-5)
        assert found[1] == pytest.approx([own.rank("entropy", v) for v in values])


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("entropix", {}),
        ("document-001", {}),
        (
            "entropix",
            {
                "regimes.lelv": ["entropy < h1", "agreement > 0.4", "attn_entropy_norm < 0.6"],
                "regimes.helv": ["entropy > 1", "entropy > h2", "varentropy < u1"],
                "regimes.lehv": ["varentropy > u2", "sequence_varentropy < 5"],
                "regimes.hehv": ["varentropy > u2", "agreement < 0.7", "agreement > 0.1"],
            },
        ),
    ],
)
def test_the_page_classifies_like_the_sampler(
    browser: Any, tmp_path: Path, preset: str, changes: dict[str, Any]
) -> None:
    """Tests thousands of points, many on a bound or one float32 step next to it."""
    sampler = load_sampler(preset).with_values(changes).resolve(CALIBRATION)
    start = header(sampler_parameters=dict(sampler.values))
    text = run_page(write(tmp_path / "trace.jsonl", start))
    facts = json.loads(Parsed(text).scripts["facts"])
    draw = np.random.default_rng(0)
    count = 6000
    points = draw.uniform(0, [7, 7, 1, 1, 7], (count, 5)).astype(np.float32)
    bounds = [value for value in facts["thresholds"].values() if value]
    limits = np.array([*bounds, 0.1, 3, 5, 1, 0.4, 0.6, 0.7])
    near = draw.random((count, 5)) < 0.5
    exact = draw.choice(limits, (count, 5)).astype(np.float32)
    side = np.nextafter(exact, draw.choice([-np.inf, np.inf], (count, 5)).astype(np.float32))
    points = np.where(near, np.where(draw.random((count, 5)) < 0.5, exact, side), points)
    *names, spread, _ = QUANTITIES
    # The shortest decimals of the float32, as in a trace.
    tokens = [
        {**{n: float(str(v)) for n, v in zip(QUANTITIES[:-1], p, strict=True)}, "loop": False}
        for p in points
    ]
    tokens += [{**one, "loop": True} for one in tokens[:10]]
    found = run_module(
        browser,
        "regimes.js",
        """({boundsOf, classify, valuesOf}, [facts, tokens]) => {
            const bounds = boundsOf(facts.boxes, valuesOf(facts));
            return tokens.map((token) => classify(token, bounds));
        }""",
        [facts, tokens],
    )
    made = params_of(preset, changes)
    metrics = jax.tree.map(lambda x: jnp.broadcast_to(x, (count,)), metrics_of())
    metrics = metrics.replace(**{n: jnp.asarray(points[:, i]) for i, n in enumerate(names)})
    spreads = points[:, QUANTITIES.index(spread)]
    expected = jax.jit(jax.vmap(classify, in_axes=(0, None, 0)))(metrics, made, spreads)
    assert found[:count] == [REGIMES[i] for i in np.asarray(expected)]
    assert found[count:] == found[:10]
    assert len(set(found)) == 5


def test_sentences_about_a_token(opened: Callable[..., Any]) -> None:
    """They say why a token is in its regime, and what the sampler did."""
    high = "Entropy 4.1 bits is above h2 = 3.7"
    low = "varentropy 2.0 bits² is below u1 = 5.0"
    wide = "Entropy 3.69 bits is below h2 = 3.70, varentropy 9.0 bits² is above u2 = 5.0"
    several = branching(3)["branches"]
    fork = {"action": "branch"}
    cases: list[tuple[str, tuple[float, float], dict[str, Any], str, str]] = [
        ("helv", (4.1, 2), {"action": "argmax"}, f"{high}, {low}", "as for the first 1 tokens"),
        ("helv", (4.1, 2), {"temperature": 0.9}, high, ": sampled once, at temperature 0.90."),
        (
            "hehv",
            (4.1, 9),
            {"action": "adaptive", "max_prob": 0.94},
            f": one likely token (94.0 %). {high}",
            ": no token before it was in doubt",
        ),
        ("mid", (1.2, 2), {"action": "adaptive"}, "above h1 = 0.80 and below h2", ": drew 16"),
        ("lehv", (3.69, 9), fork | {"branches": several}, wide, ": forked: continued 2 "),
        ("lehv", (3.69, 9), fork | {"branches": several[:1]}, wide, ": no fork: no second token"),
        ("lehv", (3.69, 9), fork, wide, ": continues the token before it."),
        (
            "lelv",
            (4.1, 9),
            {"action": "mine"},
            "no clear favourite (the first has 0 %)",
            ": a custom arm.",
        ),
        ("lehv", (3.69, 9), {"action": "lookup"}, wide, "lookup: looked something up"),
    ]
    bounds = {"h1": 0.8, "h2": 3.7, "u1": 5.02, "u2": 5.02}
    values = dict(SAMPLER.values) | {f"thresholds.{name}": bounds[name] for name in bounds}
    records = [
        token(3 + i, regime=regime, entropy=entropy, varentropy=varentropy, **changes)
        for i, (regime, (entropy, varentropy), changes, _, _) in enumerate(cases)
    ]
    page = opened(header(sampler_parameters=values | {"start.tokens": 1}), *records)
    for i, (*_, reason, deed) in enumerate(cases):
        page.evaluate(f"document.getElementById('text-0-{i}').click()")
        why, did = page.locator("#details-body p").all_text_contents()[1:3]
        assert reason in why
        assert deed in did
    assert page.locator("#details-body table.columns").is_hidden()


# Other traces.


def test_hostile_texts_are_escaped(watched: Callable[..., Watched], tmp_path: Path) -> None:
    records = run_of()
    words = [NASTY, f"<img src=x onerror=alert(2)>{NASTY}"]
    for record, word in zip(records, words * len(records), strict=False):
        record |= {"text": word, "top": [[1, word, 0.5]]}
        for branch in record.get("branches", ()):
            branch["text"] = word
    names = dict.fromkeys(("prompt", "model", "sampler", "backend"), NASTY)
    rows = footer(records)["rows"]
    rows[0] |= {"finish_reason": NASTY, "error": NASTY}
    path = write(tmp_path / "trace.jsonl", header(**names), *records, footer(records, rows=rows))
    output = tmp_path / "page.html"
    write_report(path, output)
    one = watched()
    page = one.open(output)
    page.locator("#text-0").focus()
    for _ in records:
        page.keyboard.press("ArrowRight")
    frames(page)
    assert one.requests == [output.as_uri()]
    assert page.locator("img, svg image[href^=http], b > script, #text-0 script").count() == 0
    assert page.locator("#prompt").text_content() == NASTY
    assert NASTY.split("\n")[0][:28] in page.locator("#details-word").text_content()


def test_a_chat_shows_its_messages_and_hides_the_prompt(opened: Callable[..., Any]) -> None:
    messages = [{"role": "user", "content": NASTY}, {"role": "assistant", "content": "Yes"}]
    page = opened(header(messages=messages, prompt="<|user|>"), *run_of())
    shown = page.locator("#messages p").all_text_contents()
    assert shown == [f"user: {NASTY}", "assistant: Yes"]
    assert page.title().endswith(": Yes")
    assert page.locator("#text-0").bounding_box()["y"] < 400, "the page begins with both"
    assert page.locator("#prompt").is_hidden()
    page.click("footer summary")
    assert page.locator("#prompt").text_content() == "<|user|>"


def test_several_texts(opened: Callable[..., Any]) -> None:
    rows = {0: run_of(12, 0), 3: run_of(8, 3)}
    records = [r for row in rows.values() for r in row]
    page = opened(header(), *records, footer(records))
    page.locator("#sides button").nth(1).click()
    frames(page)
    assert page.locator("#text-0").is_hidden()
    assert page.locator("#text-1 .token").count() == 9
    assert details(page)["entropy"] == rows[3][0]["entropy"]
    entropies = [r["entropy"] for r in rows[3] if r["type"] == "token"]
    assert plot(page, "series", "data[0].y") == entropies


def test_the_trace_is_saved_unchanged(shown: Any, run: tuple[Path, Trace], tmp_path: Path) -> None:
    with shown.expect_download() as download:
        shown.locator("#save").click()
    download.value.save_as(tmp_path / "saved.jsonl")
    assert (tmp_path / "saved.jsonl").read_bytes() == (run[0].parent / "trace.jsonl").read_bytes()


def test_pages_of_interrupted_runs(opened: Callable[..., Any]) -> None:
    """Tests a run without tokens, and a token without optional fields."""
    assert opened(header()).locator("main").count() == 0
    bare = token(3, top=None, layers=None)
    page = opened(header(), bare)
    assert details(page)["entropy"] == bare["entropy"]
    for name in ("branches", "retractions", "attention"):
        assert page.locator(f"#{name}").is_hidden()


def test_wrong_lookups_and_attention_are_shown(opened: Callable[..., Any]) -> None:
    """P(wrong) is a line under the text. A token of a lookup or a question shows all of it."""
    actions = ["sample", "lookup", "lookup", "sample", "clarify", "sample"]
    records = [
        token(3 + i, action=action, layers_varentropy=[[0.5, 0.1], [0.0, 1.0]])
        | {"p_wrong": round(0.1 + i / 10, 1)}
        for i, action in enumerate(actions)
    ]
    looks = [(3, " word3", 0.75), (4, NASTY, 0.2), (1, "x", 1e-4)]
    records[5]["attention"] = [{"layer": 1, "head": 0, "to": looks}]
    page = opened(header(), *records)
    marked = each(page, "#text-0 .token", "[...node.classList].slice(1).join(' ')")
    assert [*map(str.split, marked)][1:] == [
        ["lookup", "lookup-start"], ["lookup"], [], ["clarify", "clarify-start"], []
    ]  # fmt: skip
    assert each(page, ".marks .token", "node.classList[1]") == ["lookup", "clarify"]
    for at, note in ((2, "Looked up: “word4 word5”"), (4, "Asked: “word7 word8”"), (3, None)):
        page.evaluate(f"document.getElementById('text-0-{at}').click()")
        assert each(page, "#details-body .note", "node.textContent") == ([note] if note else [])
    page.locator("#wrong svg").click(position={"x": 1, "y": 1})
    assert selected(page) == 0
    assert "at most 60.0 %, 10.0 % at the selected" in page.locator("#wrong").text_content()
    page.keyboard.press("End")
    page.evaluate("document.getElementById('text-0-5').click()")
    assert details(page)["p_wrong"] == 0.6
    assert page.locator("#details-body canvas").count() == 2
    (cell,) = page.locator(".looks td").all_text_contents()
    assert cell.startswith("“ word3” 75.0 %, “<script>")
    assert "“x”" not in cell
