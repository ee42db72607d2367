"""The trace: its objects, its file, and that what is written is read back; whole traces of runs
are in test_main.py."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.engine.results import Row
from entropix_jax.engine.trace import BranchRecord, TokenRecord, TraceWriter, footer, header, plain
from entropix_jax.errors import UserError
from entropix_jax.host.decimals import shorten
from entropix_jax.host.files import check_writable
from entropix_jax.model.precision import choose_precision
from entropix_jax.names import REGIMES
from entropix_jax.sampler.calibration import TABLES
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.presets import load_sampler
from tests.support.models import TINY
from tests.support.properties import examples
from tests.support.runs import unrun
from tests.support.samplers import CALIBRATION
from tests.support.traces import OPTIONAL, Trace, load_trace, record

# The contract, in order. More fields stand among them: the agreement as published, which two
# presets act on, three measures of confidence, and whether a branching was too close to call.
PUBLISHED = """row position token_id text regime action logprob entropy varentropy
    sequence_varentropy attn_entropy attn_entropy_norm attn_varentropy agreement
    interaction_strength temperature top_k top_p min_p forwards loop top branches
    layers""".split()
MORE = {
    "agreement_published",
    "confidence",
    "ambiguous",
    "chosen",
    "token_confidence",
    "self_certainty",
}


def test_fields_and_their_order() -> None:
    branch = BranchRecord([1], "a", -0.5, chosen=True)
    full = record(
        top=[(1, "a", 0.5)], layers=[[0.5]], branches=[branch], ambiguous=False, chosen=True
    )
    keys = list(full.to_json())
    assert keys[0] == "type"
    assert [key for key in keys[1:] if key not in MORE] == PUBLISHED
    assert set(keys[1:]) - set(PUBLISHED) == MORE
    told = {"tokens": [1], "text": "a", "score": -0.5, "chosen": True}
    assert json.dumps(full.to_json()["branches"]) == json.dumps([told])
    assert not OPTIONAL & set(record().to_json())
    taken_back = full.to_json(retracted=True)
    assert [*taken_back.items()] == [*(full.to_json() | {"type": "retracted"}).items()]


@pytest.mark.parametrize("number", [0.1, 1 / 3, 1e-30, 3.4e38, 16777216.0, 1.5e-45])
def test_a_float32_becomes_the_shortest_decimal_that_means_it(number: float) -> None:
    value = np.float32(number)
    text = json.dumps(plain(value))
    assert np.float32(json.loads(text)) == value
    candidates = (f"{float(value):.{digits}g}" for digits in range(1, 10))
    assert float(text) == float(next(s for s in candidates if np.float32(s) == value))


def test_shortest_decimals_are_those_of_numpys_texts() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    fractions = rng.integers(-(10**6), 10**6, 50_000) / 2.0 ** rng.integers(0, 24, 50_000)
    tenths = rng.integers(-(10**6), 10**6, 50_000) / 10.0 ** rng.integers(0, 12, 50_000)
    powers = 2.0 ** np.arange(-140, 128)
    for some in (bits, rng.normal(size=200_000), fractions, tenths, powers):
        x = some[~np.isnan(some)].astype(np.float32)
        np.testing.assert_array_equal(shorten(x), x.astype(str).astype(np.float64))


def test_plain_values() -> None:
    assert plain(np.array([[0.1, 0.2], [0.3, 1.0]], np.float32)) == [[0.1, 0.2], [0.3, 1.0]]
    assert json.dumps(plain(np.float32(-0.0))) == "0.0"
    assert [type(plain(x)) for x in (np.int32(7), np.bool_(True))] == [int, bool]


def test_lines_are_there_as_they_are_written(tmp_path: Path) -> None:
    path, name = tmp_path / "trace.jsonl", os.fsdecode(b"tiny\xff")
    with TraceWriter(path) as writer:
        writer.write({"type": "header", "prompt": "né\n"})
        assert path.read_text(encoding="utf-8") == '{"type": "header", "prompt": "né\\n"}\n'
        writer.write({"model": name})  # which is not UTF-8: an escape
        with pytest.raises(ValueError, match="JSON"):
            writer.write({"entropy": float("nan")})
    assert json.loads(path.read_text().splitlines()[1]) == {"model": name}


def test_a_full_disk_is_noticed_at_the_first_line() -> None:
    full = "/dev/full: cannot be written: No space"
    writer = TraceWriter(Path("/dev/full"))
    with pytest.raises(UserError, match=full):
        writer.write({"type": "header"})
    with pytest.raises(UserError, match=full), writer:
        pass


def test_paths_are_checked(tmp_path: Path) -> None:
    """Looking leaves no file and changes none."""
    (tmp_path / "old").write_text("kept")
    for name, reason in (("none/a", "no folder"), (".", "is a folder"), ("old/a", "no folder")):
        with pytest.raises(UserError, match=reason):
            check_writable(tmp_path / name)
        with pytest.raises(UserError, match="cannot be written"):
            TraceWriter(tmp_path / name)
    for name in ("new", "old"):
        check_writable(tmp_path / name)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]


# Any trace: a part of it says so, and what is damaged is refused

Json = dict[str, Any]

RESOLVED = load_sampler("entropix").resolve(CALIBRATION)
SAMPLER: Json = {"values": RESOLVED.values, "sampler": RESOLVED, "calibration": CALIBRATION}


def test_a_header_has_the_thresholds_as_written_and_as_numbers() -> None:
    tokenizer = SimpleNamespace(decode=lambda ids, *, skip_special: "")
    model: Any = SimpleNamespace(
        config=TINY, precision=choose_precision("float32"), tokenizer=tokenizer
    )
    sampler: Any = SimpleNamespace(**SAMPLER, name="entropix")
    one = json.loads(json.dumps(header(model, sampler, [1], seed=0, name="tiny")))
    names = [f"thresholds.{name}" for name in ("h1", "h2", "u1", "u2")]
    assert one["percentiles"] == dict(zip(names, ("30%", "70%", "60%", "60%"), strict=True))
    assert [one["sampler_parameters"][name] for name in names] == [0.3, 2.5, 2.5, 2.5]
    tables = one["calibration"]["quantiles"]
    assert {name: len(table) for name, table in tables.items()} == dict.fromkeys(TABLES, 101)
    assert [tables["entropy"][i] for i in (0, 30, 70, 100)] == [0.0, 0.3, 2.5, 10.0]


# Any text that a tokenizer may give, line breaks of all sorts and control characters among it.
texts = st.text(st.characters(codec="utf-8"), max_size=6) | st.sampled_from(
    ("\n", "\r\n", "\u2028", "\x85", '"}', "\\", "\x00", "é", "🙂", "")
)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    (0.0, -0.0, 1e-45, 3.4028234663852886e38, 1 / 3)
)
measured = float32.map(lambda number: plain(np.float32(number)))
tokens_ids = st.integers(0, 2**31 - 1)

branches = st.builds(
    BranchRecord,
    tokens=st.lists(tokens_ids, min_size=1, max_size=3),
    text=texts,
    score=st.none() | measured,
    chosen=st.booleans(),
)
records = st.builds(
    TokenRecord,
    row=st.just(0),
    position=st.just(0),
    token_id=tokens_ids,
    text=texts,
    regime=st.sampled_from(REGIMES),
    action=st.sampled_from(ACTIONS),
    **dict.fromkeys(
        """logprob entropy varentropy sequence_varentropy attn_entropy attn_entropy_norm
        attn_varentropy agreement agreement_published interaction_strength confidence temperature
        token_confidence self_certainty top_p min_p""".split(),
        measured,
    ),
    top_k=st.integers(0, 2**31 - 1),
    forwards=st.integers(0, 2**31 - 1),
    loop=st.booleans(),
    top=st.none() | st.lists(st.tuples(tokens_ids, texts, measured), max_size=2),
    branches=st.none() | st.lists(branches, max_size=2),
    layers=st.none() | st.lists(st.lists(measured, max_size=2), max_size=2),
    ambiguous=st.none() | st.booleans(),
    chosen=st.none() | st.just(True),
)


@st.composite
def rows(draw: st.DrawFn, number: int) -> Row:
    """A row of a run: tokens in order, of which some stand in the place of several others."""
    row = Row(unrun([1, 2, 3], str(number), 8))
    for position in range(3, 3 + draw(st.integers(0, 3))):
        back = [i for _ in range(draw(st.integers(0, 2))) for i in range(draw(st.integers(0, 3)))]
        for beyond, kept in [*((i, row.retracted_tokens) for i in back), (0, row.tokens)]:
            kept.append(replace(draw(records), row=number, position=position + beyond))
            row.log.append((kept[-1], kept is not row.tokens))
    row.text = "".join(token.text for token in row.tokens)
    row.finish_reason = draw(st.sampled_from((None, "eos", "length", "stop", "error")))
    row.error = draw(texts) if row.finish_reason == "error" else None
    return row


@st.composite
def traces(draw: st.DrawFn) -> list[Json]:
    """The objects of a trace, as a run makes them."""
    prompt = draw(texts)
    tokenizer = SimpleNamespace(decode=lambda ids, *, skip_special: prompt)
    model: Any = SimpleNamespace(
        config=TINY, precision=choose_precision("float32"), tokenizer=tokenizer
    )
    sampler: Any = SimpleNamespace(**SAMPLER, name=draw(texts))
    prompt_ids = draw(st.lists(tokens_ids, max_size=3))
    seed, name = draw(st.none() | st.integers(0, 2**63)), draw(texts)
    start = header(model, sampler, prompt_ids, seed=seed, name=name)
    run = [draw(rows(i)) for i in range(draw(st.integers(1, 2)))]
    lines = [t.to_json(retracted=back) for row in run for t, back in row.log]
    ends = [{"row": i, **row.to_json()} for i, row in enumerate(run)]
    seconds = st.floats(0, 1e6)
    timings = draw(st.dictionaries(st.sampled_from(("total", "first_token")), seconds))
    return [start, *lines, footer(ends, timings)]


def written(objects: list[Json]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        with TraceWriter(path) as writer:
            for one in objects:
                writer.write(one)
        return path.read_bytes()


def read(content: bytes) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(content)
        return load_trace(path)


@examples(40)
@given(traces(), st.data())
def test_what_is_written_is_read_as_far_as_it_goes(trace: list[Json], data: st.DataObject) -> None:
    """A trace that ends with any of its lines but the last says that it is unfinished; so does one
    that ends within a line, which is not read."""
    content = written(trace)
    expected = json.loads(json.dumps(trace))  # tuples are lists
    lines = [line + b"\n" for line in content.split(b"\n")[:-1]]
    assert len(lines) == len(trace)
    for number in range(1, len(lines) + 1):
        found = read(b"".join(lines[:number]))
        assert found.header == expected[0]
        assert found.tokens == expected[1:number][: len(lines) - 2]
        assert found.footer == (expected[-1] if number == len(lines) else None)
        assert not found.torn
    number = data.draw(st.integers(1, len(lines) - 1))
    cut = data.draw(st.integers(len(b'{"type"'), len(lines[number]) - 2))
    found = read(b"".join(lines[:number]) + lines[number][:cut])
    assert (found.torn, found.footer) == (True, None)
    assert found.tokens == expected[1:number]


@examples(40)
@given(traces(), st.data())
def test_a_line_that_is_missing_or_twice_there_is_told(
    trace: list[Json], data: st.DataObject
) -> None:
    """With the line's number. All but one kind: a token that was taken back may be gone, or be
    there twice, as a position may be drawn any number of times."""
    told = [i for i, one in enumerate(trace[:-1]) if one["type"] != "retracted"]
    at = data.draw(st.sampled_from(told))
    twice = data.draw(st.booleans())
    damaged = [*trace[:at], *[trace[at]] * (2 if twice else 0), *trace[at + 1 :]]
    with pytest.raises(UserError, match=r"trace\.jsonl: line \d+: "):
        read(written(damaged))
    with pytest.raises(UserError, match=r"line \d+: data after the footer"):
        read(written([*trace, trace[at]]))
