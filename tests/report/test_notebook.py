"""Results in a notebook, and the traces and reports saved from them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

import entropix_jax
from entropix_jax.engine.results import Row, Rows
from entropix_jax.engine.trace import BranchRecord, TokenRecord
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import REGIMES
from entropix_jax.report.notebook import MAX_TOKENS
from entropix_jax.report.page import run_page
from entropix_jax.report.tokens import style
from tests.support.browser import contrast
from tests.support.runs import unrun
from tests.support.samplers import LITERAL
from tests.support.traces import read_trace, token


class Page:
    """The tokens, cells and texts of a cell's HTML, which is also well-formed XML."""

    def __init__(self, text: str) -> None:
        # XML would change line ends in attributes to spaces.
        root = ElementTree.fromstring(text.replace("<wbr>", "").replace("\n", "&#10;"))
        for sheet in root.iter("style"):
            sheet.text = ""
        self.tags = {node.tag for node in root.iter()}
        self.names = {name for node in root.iter() for name in node.attrib}
        self.plain = "".join(root.itertext())
        self.cells = ["".join(n.itertext()) for n in root.iter() if n.tag in ("td", "th")]
        self.tokens = [
            {**node.attrib, "text": "".join([node.text or "", *(sign.tail or "" for sign in node)])}
            for node in root.iter("span")
            if {"title", "data-regime"} <= {*node.attrib}
        ]


def row_of(*tokens: TokenRecord, retracted: Sequence[TokenRecord] = (), **fields: Any) -> Row:
    """Returns a row of these tokens. Retracted tokens precede those of the same position."""
    text = "".join(one.text for one in tokens)
    log = [(one, True) for one in retracted] + [(one, False) for one in tokens]
    log.sort(key=lambda pair: pair[0].position)
    request = unrun([1], "0", 9)
    return Row(request, list(tokens), text, retracted_tokens=[*retracted], log=log, **fields)


def word(text: str, regime: str = "mid", action: str = "sample", **changes: Any) -> TokenRecord:
    return replace(token(regime, action), text=text, **changes)


EVIL = "<script>alert('&amp;\"')</script>"


def test_tokens_have_their_regime_marks_and_a_tooltip() -> None:
    futures = [
        BranchRecord([1], EVIL * 9, -0.51, chosen=True),
        BranchRecord([2], "\n", None, chosen=False),
    ]
    row = row_of(
        word(" b\n\nc", "helv", entropy=3.214, varentropy=10.52, logprob=-0.693147, position=0),
        word(" Wait", "helv", "inject", position=1),
        word("...\x1b[2J\x00", "lelv", "inject", position=2),
        word(" x", "lehv", "branch", position=3, branches=futures),
        word(" y", "lelv", "branch", position=4),
        word(" z", "mid", "backspace", position=5),
        word("", "mid", position=6, token_id=77, loop=True),
        retracted=[word(" q", "hehv", position=5), word(" r", "hehv", position=5)],
        finish_reason="eos",
    )
    page = Page(row._repr_html_())
    assert [
        (one["text"], one["data-regime"], *one["class"].split()[1:]) for one in page.tokens
    ] == [
        (" b\n\nc", "helv"),
        (" Wait", "helv", "injected", "inject-start"),
        ("...\ufffd[2J\ufffd", "lelv", "injected"),
        (" x", "lehv", "branched", "branch-start"),
        (" y", "lelv", "branched"),
        (" q", "hehv", "retracted"),
        (" r", "hehv", "retracted"),
        (" z", "mid"),
        ("⟨77⟩", "mid", "loop", "empty"),
    ]
    assert "7 tokens · eos · 2 retracted" in page.plain
    lines = page.tokens[0]["title"].split("\n")
    assert lines[:2] == [
        r" b\n\nc · undecided (HELV) · sample",
        "entropy 3.21 bits, varentropy 10.52 bits²",
    ]
    assert "p 0.500," in lines[3]
    hint = page.tokens[3]["title"].split("\n")
    assert hint[-3] == "position 3"
    assert hint[-2].startswith("→ -0.51 <script>")
    assert len(hint[-2]) < 80
    assert hint[-1] == r"   no score \n"
    assert page.tokens[5]["title"].startswith(" q · scattered (HEHV) · sample · retracted\n")
    for meaning in ("injected by the sampler", "the best of several", "part of a repetition"):
        assert meaning in page.plain
    assert "part of a repetition" not in Page(row_of(word("a"))._repr_html_()).plain


def test_markup_is_escaped() -> None:
    """Tokens, prompt, error and tooltips are plain text."""
    failed = row_of(word(EVIL), error=f"row 0: {EVIL}", finish_reason="error")
    rows = Rows([failed, failed], {"prompt": EVIL})
    page = Page(rows._repr_html_())
    assert {"script", "img", "a", "link", "iframe"}.isdisjoint(page.tags)
    assert page.names == {"class", "title", "data-regime"}
    assert page.plain.count(EVIL) == 6, "token, error and prompt of each"
    assert "url(" not in style("rows")
    assert "@import" not in style("rows")
    # MathJax 3 and 2 skip elements of these classes, so that dollars are not formulas.
    (classes,) = re.findall(r'^<div class="([^"]*)">', rows._repr_html_())
    assert {"mathjax_ignore", "tex2jax_ignore"} <= set(classes.split())


def test_the_table_of_shares_and_the_text_of_a_row() -> None:
    row = row_of(
        *[word("a", "lelv", entropy=0.5, varentropy=1.0)] * 3, word("b", "mid", entropy=2.0)
    )
    cells = Page(row._repr_html_()).cells
    assert repr(row) == "<Row 0: 4 tokens, running: 'aaab'>"
    assert repr(row_of(word("a"), finish_reason="eos")) == "<Row 0: 1 token, eos: 'a'>"
    assert cells[5:10] == ["certain (LELV)", "3", "75%", "0.50 bits", "1.00 bits²"]
    assert cells[10:15] == ["undecided (HELV)", "0", "0%", "–", "–"]
    assert cells[-5:] == ["between (MID)", "1", "25%", "2.00 bits", "0.00 bits²"]
    nothing = Page(row_of()._repr_html_())
    assert (nothing.cells, nothing.tokens) == ([], [])


def test_the_size_of_the_html_is_bounded() -> None:
    """The HTML has at most 300 kB for 1,000 tokens, and 600 kB for any number."""
    names = [word(f" {i} <b>", REGIMES[i % 5], position=i) for i in range(5000)]
    assert len(row_of(*names[:1000])._repr_html_()) < 300_000
    page = row_of(*names)._repr_html_()
    assert len(page) < 600_000
    assert len(Page(page).tokens) == MAX_TOKENS
    assert "and 3000 more tokens" in page
    assert ">1000<" in page, "the table counts them all"
    many = Rows([row_of(*names[:900])] * 100)._repr_html_()
    assert len(Page(many).tokens) == MAX_TOKENS
    assert "and 700 more tokens" in many
    assert "and 97 more texts" in many
    assert len(Rows([row_of(word("a"))] * 1000)._repr_html_()) < 300_000


def test_style_of_a_cell() -> None:
    """Colours have a contrast of 3 by WCAG 2.1. Light ones have it on dark, too, since a dark
    notebook may not be detected. Every rule applies only to its own cell."""
    for regime in REGIMES:
        pattern = rf"--{regime}: light-dark\(#(\w{{6}}), #(\w{{6}})\);"
        ((light, dark),) = re.findall(pattern, style("rows"))
        for colour, background in ((light, 255), (light, 0), (dark, 0)):
            assert contrast([*bytes.fromhex(colour)], [background] * 3) >= 3.0, regime
    sheet = re.sub(r"/\*.*?\*/", "", style("rows"), flags=re.DOTALL)
    rules = re.sub(r"\{[^}]*\}", "\0", sheet).split("\0")
    selectors = [one.strip() for rule in rules if rule.strip() for one in rule.split(",")]
    assert len(selectors) > 20
    assert all(re.search(r"(^| )\.entropix-jax( |$)", one) for one in selectors)


# Runs.


def test_a_saved_trace_equals_the_run(model: LanguageModel, tmp_path: Path) -> None:
    # NumPy integers are valid.
    numbers: Any = {"max_new_tokens": np.int64(20), "samples": np.int64(2), "seed": np.int64(3)}
    run = entropix_jax.stream(
        model, "Once upon a time", LITERAL, **numbers, chat=False, ignore_eos=True
    )
    events = [event for event in run if event.token is not None]
    path, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    run.rows.save_trace(path)
    header, *lines, footer = read_trace(path)
    assert (header["seed"], header["sampler"]) == (3, "literal")
    assert header["prompt"] == "<|begin_of_text|>Once upon a time"
    for row in (0, 1):
        own = [event for event in events if event.row.number == row]
        records = [event.token.to_json(retracted=event.retracted) for event in own if event.token]
        assert [line for line in lines if line["row"] == row] == json.loads(json.dumps(records))
    assert any(line["type"] == "retracted" for line in lines)
    assert footer["timings"] == run.timings
    assert footer["rows"][1]["text"] == run.rows[1].text
    run.rows.save_report(page)
    assert page.read_text("utf-8") == run_page(path)
    assert {one.name for one in tmp_path.iterdir()} == {"run.jsonl", "run.html"}
    assert Page(run._repr_html_()).plain.count("<|begin_of_text|>Once upon a time") == 2
