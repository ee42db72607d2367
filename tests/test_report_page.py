"""The page of a run in a browser: what it shows, what it answers, and what it must not do."""

from __future__ import annotations

import base64
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

from entropix_jax import main
from entropix_jax.names import QUANTITIES, REGIMES, THRESHOLDS
from entropix_jax.report import page as report_page
from entropix_jax.report.page import run_page, write_report
from entropix_jax.sampler.presets import load_sampler, parse_setting
from entropix_jax.sampler.regimes import classify
from tests.browsing import (
    Watched,
    frames,
    nothing_is_cut_off,
    opened_in_time,
    reloaded,
    texts_stand_out,
    watched_page,
)
from tests.samplers import metrics_of, params_of
from tests.test_report import NASTY, footer, header, run_of, token, write
from tests.traces import Trace, load_trace

# A run of the embedded model in which everything happens.
RUN = [
    *("--model", "tiny"),
    *("--prompt", "Guests:", "--max-new-tokens", "1000", "--seed", "3", "--ignore-eos"),
    *("--trace-top", "5", "--trace-layers", "--set", "sampler.branch.min_p=0.005"),
    "sampler.base.temperature=1.0",
]
STATIC = Path(report_page.__file__).parent / "static"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    """The page of a thousand tokens, as the command makes it, and its trace."""
    folder = tmp_path_factory.mktemp("run")
    trace, output = folder / "trace.jsonl", folder / "page.html"
    assert main.main([*RUN, "--trace", str(trace), "--report", str(output)]) == 0
    return output, load_trace(trace)


@pytest.fixture(scope="module")
def shown(browser: Any, run: tuple[Path, Trace]) -> Iterator[Any]:
    """The run's page, which tests that only look share."""
    with watched_page(browser, run[0]) as page:
        yield page


@pytest.fixture
def page(shown: Any) -> Any:
    """The same, as it was opened."""
    return reloaded(shown)


def committed(trace: Trace) -> list[dict[str, Any]]:
    return [record for record in trace.tokens if record["type"] == "token"]


def details(page: Any) -> dict[str, float]:
    """The metrics that are shown, by the trace's own names."""
    return page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("#details-body tr[data-field]")]
            .map((row) => [row.dataset.field, Number(row.querySelector("data").value)]))"""
    )


def selected(page: Any) -> int:
    return int(page.locator("#text .token.selected").get_attribute("data-index"))


# Loading.


def test_the_run_has_everything(run: tuple[Path, Trace]) -> None:
    trace = run[1]
    tokens = committed(trace)
    assert len(tokens) == 1000
    assert {record["regime"] for record in tokens} == set(REGIMES)
    assert any(len(record.get("branches", ())) > 1 for record in tokens)
    assert len(trace.tokens) > len(tokens)
    assert run[0].stat().st_size < 8e6


def test_it_loads_without_a_request_and_in_time(
    watched: Callable[..., Watched], run: tuple[Path, Trace]
) -> None:
    """Two seconds, pictures included."""
    one = opened_in_time(watched, run[0])
    assert one.requests == [run[0].as_uri()]
    assert one.page.locator("#plane .scatterlayer .trace").count() > 5


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1440])
def test_nothing_is_cut_off(
    watched: Callable[..., Watched], run: tuple[Path, Trace], width: int, scheme: str
) -> None:
    """No sideways scrolling, and no panel that overlaps another or is wider than the window."""
    page = watched(width, scheme=scheme).open(run[0])
    page.locator("#attention").scroll_into_view_if_needed()
    page.wait_for_selector("#heat .heatmaplayer image")
    nothing_is_cut_off(page, width)
    assert page.locator("main > .panel:not([hidden])").count() == 9


def test_texts_stand_out_from_what_is_behind_them(
    watched: Callable[..., Watched], run: tuple[Path, Trace]
) -> None:
    """The contrast that WCAG asks for, 4.5, of text in each regime's colours, in both schemes."""
    for scheme in ("light", "dark"):
        page = watched(scheme=scheme).open(run[0])
        texts_stand_out(page, "#legend .token, #legend .what, #run .about, #run .muted")


# What it shows.


def test_the_text_is_the_runs(page: Any, run: tuple[Path, Trace]) -> None:
    trace = run[1]
    spans = page.evaluate(
        """() => [...document.querySelectorAll("#text .token")].map((node) => {
            const copy = node.cloneNode(true);
            copy.querySelectorAll(".sign").forEach((sign) => sign.remove());
            return [copy.textContent, node.dataset.regime, [...node.classList]];
        })"""
    )
    assert len(spans) == len(trace.tokens)
    for (text, regime, classes), record in zip(spans, trace.tokens, strict=True):
        assert text == (record["text"] or f"⟨{record['token_id']}⟩")
        assert regime == record["regime"]
        assert ("retracted" in classes) == (record["type"] == "retracted")
        assert ("injected" in classes) == (record["action"] == "inject")
        assert ("branched" in classes) == (record["action"] == "branch")
        assert ("loop" in classes) == record["loop"]


def test_regimes_are_told_apart_without_colour(page: Any) -> None:
    styles = page.evaluate(
        """() => [...document.querySelectorAll("#legend .token")].map((node) => {
            const style = getComputedStyle(node);
            return `${style.textDecorationLine} ${style.textDecorationStyle}`;
        })"""
    )
    assert len(set(styles)) == len(REGIMES)
    symbols = page.evaluate("document.getElementById('plane').data.map((t) => t.marker.symbol)")
    assert len(set(symbols[:5])) == len(REGIMES)


def test_the_header(page: Any, run: tuple[Path, Trace]) -> None:
    trace = run[1]
    assert trace.footer is not None
    (row,) = trace.footer["rows"]
    words = page.locator("header").inner_text()
    for word in ("tiny", "entropix", "the token limit", *trace.header["versions"].values()):
        assert word in words
    assert page.locator("#prompt").text_content() == trace.header["prompt"]
    assert page.locator("#forwards-0").get_attribute("value") == str(row["forwards"])
    timings = trace.footer["timings"]
    speed = (row["tokens"] - 1) / (timings["total"] - timings["first_token"])
    (found,) = re.findall(r"([\d.]+) tokens/s", words)
    assert float(found) == pytest.approx(speed, abs=0.5)


def test_all_numbers_of_a_token_are_the_traces(page: Any, run: tuple[Path, Trace]) -> None:
    """Of every 50th token, and of every one with branches or that was taken back up to there."""
    records = run[1].tokens
    some = [i for i, r in enumerate(records) if i % 50 == 0 or r["type"] == "retracted"]
    for i in some:
        page.evaluate(f"document.getElementById('token-{i}').click()")
        found, record = details(page), records[i]
        assert found == {name: record[name] for name in found}
        assert len(found) == 16
        top = page.evaluate(
            """() => [...document.querySelectorAll(".alternatives data")]
                .map((node) => Number(node.value))"""
        )
        assert top == [probability for _, _, probability in record["top"]]


def test_pointing_at_a_token_shows_it(page: Any, run: tuple[Path, Trace]) -> None:
    records = run[1].tokens
    for i in (5, 9):
        page.locator("#text .token").nth(i).hover()
        assert selected(page) == i
        assert details(page)["entropy"] == records[i]["entropy"]
    page.locator("#text .token").nth(7).click()  # held
    page.locator("#text .token").nth(3).hover()
    assert selected(page) == 7
    page.locator("#text .token").nth(7).click()  # let go
    page.locator("#text .token").nth(3).hover()
    assert selected(page) == 3


def test_arrow_keys_walk_through_the_text(page: Any, run: tuple[Path, Trace]) -> None:
    box = page.locator("#text")
    box.focus()
    last = len(run[1].tokens) - 1
    for key, expected in (
        *(("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("Home", 0), ("ArrowLeft", 0)),
        *(("End", last), ("ArrowRight", last)),
    ):
        page.keyboard.press(key)
        assert selected(page) == expected
        assert box.get_attribute("aria-activedescendant") == f"token-{expected}"
    inside = page.evaluate(
        """() => { const box = document.getElementById("text").getBoundingClientRect();
            const token = document.querySelector("#text .selected").getBoundingClientRect();
            return token.top >= box.top && token.bottom <= box.bottom; }"""
    )
    assert inside
    page.keyboard.press("Home")
    tops = [page.locator("#text .token.selected").bounding_box()["y"]]
    for key in ("ArrowDown", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
        tops.append(page.locator("#text .token.selected").bounding_box()["y"])
    assert tops[0] < tops[1] < tops[2]
    assert tops[3] == pytest.approx(tops[1], abs=8)


def test_every_control_is_reached_by_the_keyboard(page: Any) -> None:
    reached = set()
    for _ in range(200):
        page.keyboard.press("Tab")
        name = page.evaluate(
            """() => { const node = document.activeElement;
                const style = getComputedStyle(node);
                return [node.id || node.dataset.regime || "", style.outlineStyle]; }"""
        )
        if name[0]:
            assert name[1] != "none", name  # the focus is seen
        reached.add(name[0])
        if name[0] == "copy-file":
            break
    assert {"save", "text", "details-body", "knob-h1", "copy-command", "copy-file"} <= reached
    assert set(REGIMES) <= reached


# Links.


def test_the_text_leads_to_the_plane(page: Any, run: tuple[Path, Trace]) -> None:
    """And to the cursor of the series."""
    for i in (4, 40):
        page.evaluate(f"document.getElementById('token-{i}').click()")
        frames(page)
        record = run[1].tokens[i]
        x, y = page.evaluate(
            "(({x, y}) => [x[0], y[0]])(document.getElementById('plane').data.at(-1))"
        )
        assert (x, y) == (record["entropy"], record["varentropy"])
        cursor = page.evaluate("document.getElementById('series').layout.shapes[0].x0")
        assert cursor == record["position"]


def on_screen(page: Any, entropy: float, varentropy: float) -> tuple[float, float]:
    """Where a point of the plane is, in pixels of the window."""
    x, y = page.evaluate(
        """([h, u]) => {
            const box = document.getElementById("plane");
            const area = box.querySelector(".nsewdrag").getBoundingClientRect();
            const [x0, x1] = box.layout.xaxis.range, [y0, y1] = box.layout.yaxis.range;
            return [area.left + area.width * (h - x0) / (x1 - x0),
                    area.bottom - area.height * (u - y0) / (y1 - y0)];
        }""",
        [entropy, varentropy],
    )
    return x, y


def test_tokens_picked_out_on_the_plane_stand_out_in_the_text(
    page: Any, run: tuple[Path, Trace]
) -> None:
    page.locator("#plane").scroll_into_view_if_needed()
    page.locator("#plane .modebar-btn[data-title='Box Select']").click()
    left, right, bottom, top = 1.5, 3.6, 3.0, 9.0
    page.mouse.move(*on_screen(page, left, bottom))
    page.mouse.down()
    page.mouse.move(*on_screen(page, right, top), steps=5)
    page.mouse.up()
    page.wait_for_selector("#text .token.faded")
    inside = [
        i
        for i, r in enumerate(run[1].tokens)
        if left < r["entropy"] < right and bottom < r["varentropy"] < top
    ]
    assert 5 < len(inside) < 500
    found = page.evaluate(
        """() => [...document.querySelectorAll("#text .token:not(.faded)")]
            .map((node) => Number(node.dataset.index))"""
    )
    assert found == inside


def test_the_plane_leads_to_the_text(page: Any, run: tuple[Path, Trace]) -> None:
    """The one token in HEHV that lies farthest from all others is pointed at, then clicked."""
    records = run[1].tokens
    points = np.array([[r["entropy"], r["varentropy"]] for r in records])
    scale = points.max(axis=0)
    apart = np.linalg.norm((points[:, None] - points[None]) / scale, axis=-1)
    np.fill_diagonal(apart, np.inf)
    index = int(apart.min(axis=1).argmax())
    page.locator("#plane").scroll_into_view_if_needed()
    x, y = on_screen(page, *points[index].tolist())
    page.mouse.move(x - 3, y)
    page.mouse.move(x, y)
    page.wait_for_selector(f"#token-{index}.selected")
    page.mouse.click(x, y)
    page.wait_for_selector(f"#token-{index}.pinned")


def test_the_plane_holds_every_token(page: Any, run: tuple[Path, Trace]) -> None:
    trace = run[1]
    data = page.evaluate("document.getElementById('plane').data.map((t) => [t.x, t.y])")
    for (xs, ys), regime in zip(data, REGIMES, strict=False):
        found = [r for r in committed(trace) if r["regime"] == regime]
        assert xs == [r["entropy"] for r in found]
        assert ys == [r["varentropy"] for r in found]
    assert len(data[5][0]) == len(trace.tokens) - len(committed(trace))


def test_the_series_and_the_heat_map(page: Any, run: tuple[Path, Trace]) -> None:
    tokens = committed(run[1])
    series = page.evaluate("document.getElementById('series').data.map((t) => [t.name, t.x, t.y])")
    assert [name for name, _, _ in series] == ["entropy", "varentropy", "agreement", "temperature"]
    for name, x, y in series:
        assert x == [r["position"] for r in tokens]
        assert y == [r[name] for r in tokens]
    page.locator("#attention").scroll_into_view_if_needed()
    page.wait_for_selector("#heat .heatmaplayer image")
    z = page.evaluate("document.getElementById('heat').data[0].z")
    flat = [[value for layer in r["layers"] for value in layer] for r in tokens]
    np.testing.assert_array_equal(np.array(z), np.array(flat).T)


def test_regimes_are_hidden_and_shown(page: Any, run: tuple[Path, Trace]) -> None:
    count = sum(r["regime"] == "mid" for r in run[1].tokens)
    button = page.locator("#legend button[data-regime=mid]")
    button.click()
    frames(page)
    assert button.get_attribute("aria-pressed") == "false"
    assert page.locator("#text .token.faded").count() == count
    assert page.evaluate("document.getElementById('plane').data[4].visible") is False
    button.click()
    frames(page)
    assert page.locator("#text .token.faded").count() == 0
    assert page.evaluate("document.getElementById('plane').data[4].visible") is True


# Branches and tokens that were taken back.


def test_trees(page: Any, run: tuple[Path, Trace]) -> None:
    branched = [r for r in committed(run[1]) if "branches" in r]
    forked = [r for r in branched if len(r["branches"]) > 1]
    assert page.locator("#branches-list .tree").count() == len(forked)
    trees = page.evaluate(
        """() => [...document.querySelectorAll("#branches-list .tree")].map((tree) =>
            [Number(tree.querySelector(".root data").value),
             [...tree.querySelectorAll(".leaf")].map((leaf) => [
                leaf.querySelector(".leaf-text").textContent,
                Number(leaf.querySelector("data")?.value), leaf.classList.contains("chosen")])])"""
    )
    for (position, leaves), record in zip(trees, forked, strict=True):
        assert position == record["position"]
        assert Counter(map(tuple, leaves)) == Counter(
            (quoted(b["text"], b["tokens"][0]), b["score"], b["chosen"]) for b in record["branches"]
        )
        assert [leaf[1] for leaf in leaves] == sorted((leaf[1] for leaf in leaves), reverse=True)
    page.locator("#branches-several").uncheck()
    assert page.locator("#branches-list .tree").count() == len(branched)
    page.locator("#branches-list .root").first.click()
    index = run[1].tokens.index(branched[0])
    assert selected(page) == index
    assert page.locator("#branches-list .tree.current").count() == 1


def quoted(text: str, token_id: int) -> str:
    return f"“{text}”".replace("\n", "↵") if text else f"⟨{token_id}⟩"


def test_what_was_taken_back(page: Any, run: tuple[Path, Trace]) -> None:
    records = run[1].tokens
    rows = page.evaluate(
        """() => [...document.querySelectorAll("#retractions-list tr")].map((row) =>
            [...row.cells].map((cell) => cell.textContent))"""
    )
    gone = [(i, r) for i, r in enumerate(records) if r["type"] == "retracted"]
    assert len(rows) == len(gone)
    for (_, before, after, _), (i, record) in zip(rows, gone, strict=True):
        assert before == quoted(record["text"], record["token_id"])
        instead = next(r for r in records[i:] if r["type"] == "token")
        assert instead["position"] == record["position"]
        assert after == quoted(instead["text"], instead["token_id"])


# What if.


def shares(page: Any) -> dict[str, list[int]]:
    return page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("#occupancy tr")].map((row) =>
            [row.dataset.regime, [...row.querySelectorAll("data")].map((n) => Number(n.value))]))"""
    )


def set_knob(page: Any, name: str, value: float) -> None:
    page.locator(f"#knob-{name} + input").fill(str(value))
    frames(page)


def regimes_in_python(records: list[dict[str, Any]], values: dict[str, Any]) -> list[str]:
    """What the sampler would have called them."""
    sampler = load_sampler("entropix").with_values(values)
    made = sampler.settings(num_layers=2, epsilon=2.0**-7, encode=lambda text: [1])
    metrics = [metrics_of(**{name: r[name] for name in QUANTITIES}) for r in records]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *metrics)
    found = jax.jit(jax.vmap(classify, in_axes=(0, None)))(stacked, made)
    return [
        "lehv" if r["loop"] else REGIMES[i] for r, i in zip(records, np.asarray(found), strict=True)
    ]


def test_other_bounds_sort_the_run_anew(page: Any, run: tuple[Path, Trace]) -> None:
    records = run[1].tokens
    tokens = committed(run[1])
    start = Counter(r["regime"] for r in tokens)
    assert shares(page) == {name: [start[name], start[name]] for name in REGIMES}
    assert page.locator("#what-if-reset").is_disabled()

    values = {"h1": 0.8, "h2": 2.1, "u1": 0.9, "u2": 3.5}
    for name, value in values.items():
        set_knob(page, name, value)
    settings = {f"thresholds.{name}": value for name, value in values.items()}
    expected = regimes_in_python(records, settings | {"thresholds.calibrated": False})
    now = Counter(e for e, r in zip(expected, records, strict=True) if r["type"] == "token")
    assert now != start
    assert shares(page) == {name: [start[name], now[name]] for name in REGIMES}
    assert (
        page.evaluate(
            "[...document.querySelectorAll('#text .token')].map((node) => node.dataset.regime)"
        )
        == expected
    )
    assert page.locator("#text-note").is_visible()
    boxes = page.evaluate("document.getElementById('plane').layout.shapes")
    assert boxes[0]["x1"] == float(np.float32(0.8))

    # What it says to keep them is what the command and a sampler file understand.
    words = page.locator("#what-if-command").text_content().split()
    assert words[0] == "--set"
    assert dict(map(parse_setting, words[1:])) == settings
    page.locator("#text-note-reset").click()
    frames(page)
    assert shares(page) == {name: [start[name], start[name]] for name in REGIMES}
    assert not page.locator("#text-note").is_visible()


def test_a_slider_moves_with_the_keys(page: Any) -> None:
    slider = page.locator("#knob-h2")
    slider.focus()
    before = page.evaluate("document.querySelector('#knob-h2 + input').value")
    page.keyboard.press("ArrowRight")
    frames(page)
    after = page.evaluate("document.querySelector('#knob-h2 + input').value")
    assert float(after) > float(before)
    assert f"thresholds.h2={after}" in page.locator("#what-if-command").text_content()


def test_a_sampler_file(page: Any, tmp_path: Path) -> None:
    set_knob(page, "u2", 3.25)
    path = tmp_path / "mine.toml"
    path.write_text(page.locator("#what-if-file").text_content())
    values = load_sampler(str(path)).values
    assert values["thresholds.u2"] == 3.25
    assert values["thresholds.h1"] == 0.334
    assert values["thresholds.calibrated"] is False


def test_a_sampler_file_is_the_runs_own(watched: Callable[..., Watched], tmp_path: Path) -> None:
    """A file of the user's, or a preset that was changed, is not named but written whole."""
    changes = {
        "base.temperature": 0.3,
        "inject.thought": [NASTY, '\\ \x7f\t"'],
        "metrics.layers": [1e-7, 1.0, 0.0, 1e6],
        "draw.bans": [2, 3],
    }
    values = dict(load_sampler("entropix").with_values(changes).values)
    start = header(sampler="mine", sampler_parameters=values)
    records = run_of()
    path = write(tmp_path / "trace.jsonl", start, *records)
    output = tmp_path / "page.html"
    write_report(path, output)
    page = watched().open(output)
    file = tmp_path / "mine.toml"
    file.write_text(page.locator("#what-if-file").text_content(), encoding="utf-8")
    assert load_sampler(str(file)).values == values | {"thresholds.calibrated": False}


def test_bounds_that_a_sampler_refuses(page: Any) -> None:
    set_knob(page, "h1", 4.5)
    assert "h1 is above h2" in page.locator("#what-if-problem").text_content()
    assert page.locator("#copy-command").is_disabled()
    set_knob(page, "h1", 0.5)
    assert page.locator("#what-if-problem").text_content() == ""
    assert not page.locator("#copy-command").is_disabled()


def test_bounds_without_names(watched: Callable[..., Watched], tmp_path: Path) -> None:
    """A preset that writes numbers: each has a slider, and what keeps them says so."""
    values = dict(load_sampler("document-001").values)
    records = [token(3 + i, entropy=0.3 * i, varentropy=0.05) for i in range(20)]
    start = header(sampler="document-001", sampler_parameters=values)
    path = write(tmp_path / "trace.jsonl", start, *records, footer(records))
    output = tmp_path / "page.html"
    write_report(path, output)
    page = watched().open(output)
    set_knob(page, "entropy-0-1", 1.0)
    words = shlex.split(page.locator("#what-if-command").text_content())
    expected = {f"regimes.{box}": values[f"regimes.{box}"] for box in REGIMES[:-1]}
    expected["regimes.lelv"] = ["entropy < 1", "varentropy < 0.1"]
    found = dict(map(parse_setting, words[1:]))
    without_zeros = {k: [text.replace(".0", "") for text in v] for k, v in expected.items()}
    assert found == without_zeros
    assert shares(page)["lelv"][1] == 4  # 0, 0.3, 0.6, 0.9
    file = tmp_path / "mine.toml"
    file.write_text(page.locator("#what-if-file").text_content())
    kept = load_sampler(str(file)).values
    assert {key: kept[key] for key in found} == found


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
                "regimes.hehv": ["varentropy > u2", "agreement < 0.7", "agreement > 0.1"],
            },
        ),
        ("document-004", {"thresholds.h1": 1.0, "thresholds.u2": 1.3}),
    ],
)
def test_the_page_sorts_as_the_sampler_does(
    browser: Any, preset: str, changes: dict[str, Any]
) -> None:
    """Thousands of points, many of them on a bound or next to one, in float32's own steps."""
    sampler = load_sampler(preset).with_values(changes)
    boxes = report_page._boxes(dict(sampler.values), Path("trace"))
    thresholds = {n: sampler.values.get(f"thresholds.{n}") for n in THRESHOLDS}
    draw = np.random.default_rng(0)
    count = 6000
    points = draw.uniform(0, [7, 7, 1, 1], (count, 4)).astype(np.float32)
    limits = np.array([v for v in thresholds.values() if v] + [0.1, 3, 5, 1, 0.4, 0.6, 0.7])
    near = draw.random((count, 4)) < 0.5
    exact = draw.choice(limits, (count, 4)).astype(np.float32)
    side = np.nextafter(exact, draw.choice([-np.inf, np.inf], (count, 4)).astype(np.float32))
    points = np.where(near, np.where(draw.random((count, 4)) < 0.5, exact, side), points)
    names = ("entropy", "varentropy", "attn_entropy_norm", "agreement")
    assert names == QUANTITIES
    # As the trace writes them: the shortest decimals that mean the float32.
    tokens = [
        {**{n: float(str(v)) for n, v in zip(names, p, strict=True)}, "loop": False} for p in points
    ]
    tokens += [{**one, "loop": True} for one in tokens[:10]]
    module = base64.b64encode((STATIC / "regimes.js").read_bytes()).decode()
    blank = browser.new_page()
    found = blank.evaluate(
        """async ([module, boxes, thresholds, tokens]) => {
            const source = `data:text/javascript;base64,${module}`;
            const {boundsOf, classify, keyOf} = await import(source);
            const values = {};
            for (const conditions of Object.values(boxes)) for (const condition of conditions)
                values[keyOf(condition)] = condition.value ?? thresholds[condition.name];
            const bounds = boundsOf(boxes, values);
            return tokens.map((token) => classify(token, bounds));
        }""",
        [module, boxes, thresholds, tokens],
    )
    blank.close()
    made = params_of(preset, changes)
    metrics = jax.tree.map(lambda x: jnp.broadcast_to(x, (count,)), metrics_of())
    metrics = metrics.replace(**{n: jnp.asarray(points[:, i]) for i, n in enumerate(names)})
    expected = jax.jit(jax.vmap(classify, in_axes=(0, None)))(metrics, made)
    assert found[:count] == [REGIMES[i] for i in np.asarray(expected)]
    assert found[count:] == ["lehv"] * 10
    assert len(set(found)) == 5


# Other traces.


def test_texts_run_nothing(watched: Callable[..., Watched], tmp_path: Path) -> None:
    """Wherever a text stands, it stands as it is."""
    records = run_of()
    words = [NASTY, f"<img src=x onerror=alert(2)>{NASTY}"]
    for record, word in zip(records, words * len(records), strict=False):
        record |= {"text": word, "top": [[1, word, 0.5]]}
        for branch in record.get("branches", ()):
            branch["text"] = word
    names: dict[str, Any] = {"prompt": NASTY, "model": NASTY, "sampler": NASTY, "backend": NASTY}
    rows = footer(records)["rows"]
    rows[0] |= {"finish_reason": NASTY, "error": NASTY}
    path = write(tmp_path / "trace.jsonl", header(**names), *records, footer(records, rows=rows))
    output = tmp_path / "page.html"
    write_report(path, output)
    one = watched()
    page = one.open(output)
    page.locator("#text").focus()
    for _ in records:
        page.keyboard.press("ArrowRight")
    frames(page)
    assert one.requests == [output.as_uri()]
    assert page.locator("img, svg image[href^=http], b > script, #text script").count() == 0
    assert page.locator("#prompt").text_content() == NASTY
    assert NASTY.split("\n")[0][:28] in page.locator("#details-word").text_content()


def test_nothing_but_the_pages_own_script_runs(browser: Any, tmp_path: Path) -> None:
    """Were a script to get into a page all the same, the policy would stop it."""
    path = write(tmp_path / "trace.jsonl", header(), *run_of())
    output = tmp_path / "page.html"
    intruder = (
        "<script>document.title = 'intruded'</script><img src=x onerror=\"document.title='i'\">"
    )
    output.write_text(run_page(path).replace("<main", f"{intruder}<main"), encoding="utf-8")
    one = Watched(browser)
    page = one.open(output)
    assert page.title() == "entropix: Once"
    assert any("Content Security Policy" in message for message in one.messages)
    one.context.close()


def test_several_texts(watched: Callable[..., Watched], tmp_path: Path) -> None:
    rows = {0: run_of(12, 0), 3: run_of(8, 3)}
    records = [r for row in rows.values() for r in row]
    path = write(tmp_path / "trace.jsonl", header(), *records, footer(records))
    output = tmp_path / "page.html"
    write_report(path, output)
    page = watched().open(output)
    assert page.locator("#text .token").count() == 13
    page.locator("#row").select_option("3")
    frames(page)
    assert page.locator("#text .token").count() == 9
    assert "nothing: the run ended here" in page.locator("#retractions-list").inner_text()
    assert page.locator("[data-of-row='0']").first.is_hidden()
    assert page.locator("[data-of-row='3']").first.is_visible()
    assert details(page)["entropy"] == rows[3][0]["entropy"]
    assert page.evaluate("document.getElementById('series').data[0].y") == [
        r["entropy"] for r in rows[3] if r["type"] == "token"
    ]


def test_the_trace_is_saved_as_it_was(
    watched: Callable[..., Watched], run: tuple[Path, Trace], tmp_path: Path
) -> None:
    page = watched().open(run[0])
    with page.expect_download() as download:
        page.locator("#save").click()
    download.value.save_as(tmp_path / "saved.jsonl")
    assert (tmp_path / "saved.jsonl").read_bytes() == (run[0].parent / "trace.jsonl").read_bytes()


@pytest.mark.parametrize("count", [0, 1])
def test_an_interrupted_run(watched: Callable[..., Watched], tmp_path: Path, count: int) -> None:
    """Bare tokens, without what was not asked for; or none at all."""
    bare = [token(3 + i, top=None, layers=None) for i in range(count)]
    path = write(tmp_path / "trace.jsonl", header(), *bare)
    output = tmp_path / "page.html"
    write_report(path, output)
    page = watched().open(output)
    assert "This run was interrupted" in page.locator("body").inner_text()
    assert page.locator("#nothing").is_visible() == (count == 0)
    assert page.locator("#run").is_visible() == (count == 1)
    if count:
        assert details(page)["entropy"] == bare[0]["entropy"]
        for name in ("branches", "retractions", "attention"):
            assert page.locator(f"#{name}").is_hidden()
