"""Opens pages in a browser, and records their requests and messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from entropix_jax.names import REGIMES


class Watched:
    """A page, with its network requests and console messages."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(90_000)  # a first text compiles its programs
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: self.messages.append(f"dialog: {dialog.message}"))
        self.context.on("request", lambda request: self.requests.append(request.url))

    def open(self, path: Path) -> Any:
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)
        return self.page


@contextmanager
def watched_page(browser: Any, path: Path) -> Iterator[Any]:
    """Yields a page for many tests. It must send no other request and log nothing."""
    watched = Watched(browser, viewport={"width": 1440, "height": 900})
    yield watched.open(path)
    assert watched.messages == []
    assert set(watched.requests) == {path.as_uri()}
    watched.context.close()


def reloaded(page: Any) -> Any:
    """Reloads the page and returns it."""
    page.reload()
    page.wait_for_selector("html[data-ready]", timeout=60_000)
    return page


def each(page: Any, selector: str, expression: str) -> list[Any]:
    """Returns the value of a JavaScript expression of `node` for each element."""
    nodes = page.locator(selector)
    return list(nodes.evaluate_all(f"(nodes) => nodes.map((node) => {expression})"))


def plot(page: Any, name: str, expression: str) -> Any:
    """Returns the value of a JavaScript expression of a plot's `data` and `layout`."""
    return page.locator(f"#{name}").evaluate(f"({{data, layout}}) => {expression}")


def frames(page: Any) -> None:
    """Waits for the next frames to be drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 60)))")


def check_layout(page: Any, width: int) -> None:
    """Checks that there is no horizontal scrolling, panel outside the window or clipped text."""
    assert page.evaluate("document.documentElement.scrollWidth") == width
    box = "(({left, right}) => [left, right])(node.getBoundingClientRect())"
    boxes = each(page, "main > .panel:not([hidden])", box)
    assert len(boxes) > 2
    assert all(0 <= left < right <= width for left, right in boxes)
    wide = page.evaluate(
        """() => [...document.querySelectorAll(".panel *")].filter((node) => {
            const style = getComputedStyle(node);
            return style.overflowX === "visible" && node.scrollWidth > node.clientWidth + 1
                && style.display !== "inline" && node.closest(".plot") === null
                && node.clientWidth > 0;
        }).map((node) => node.outerHTML.slice(0, 120))"""
    )
    assert wide == []


def check_accessibility(page: Any) -> None:
    """Checks names, roles and contrasts with axe. The contrast of each regime is at least 4.5."""
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text("utf-8"))
    found = page.evaluate("axe.run(document)")
    problems = [(rule["id"], rule["nodes"][0]["html"]) for rule in found["violations"]]
    assert problems == [], problems
    passed = str([rule["nodes"] for rule in found["passes"] if rule["id"] == "color-contrast"])
    assert [regime for regime in REGIMES if f'data-regime="{regime}"' not in passed] == []


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns WCAG 2.2's contrast ratio of two sRGB colours."""
    colours = np.array([one, other]) / 255
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    dark, light = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return float((light + 0.05) / (dark + 0.05))
