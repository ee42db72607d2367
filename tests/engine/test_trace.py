"""Objects of a trace, and its file, written and read back. Whole traces of runs are in
test_main.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import entropix_jax
from entropix_jax.engine.tokens import prompt_messages
from entropix_jax.engine.trace import BranchRecord, TraceWriter, header
from entropix_jax.host.decimals import shorten
from entropix_jax.model.loading import LanguageModel
from entropix_jax.model.precision import choose_precision
from entropix_jax.sampler.calibration import TABLES
from entropix_jax.sampler.presets import load_sampler
from tests.support.models import TINY
from tests.support.samplers import CALIBRATION
from tests.support.traces import OPTIONAL, record

# The documented fields, in order. There are more fields among them: the agreement as published,
# which two presets use, four measures of confidence, and whether a branching was ambiguous.
PUBLISHED = """row position token_id text regime action logprob entropy varentropy
    sequence_varentropy attn_entropy attn_entropy_norm attn_varentropy agreement
    interaction_strength temperature top_k top_p min_p forwards loop top branches
    layers layers_varentropy attention""".split()
MORE = {*"agreement_published confidence ambiguous intents chosen".split()}
MORE |= {"token_confidence", "self_certainty", "max_prob", "p_wrong"}


def test_fields_and_their_order() -> None:
    branch = BranchRecord([1], "a", -0.5, chosen=True)
    full = record(
        top=[(1, "a", 0.5)], layers=[[0.5]], branches=[branch], ambiguous=False, chosen=True,
        p_wrong=0.5,
        layers_varentropy=[[0.5]], attention=[{"layer": 0, "head": 0, "to": [(0, "a", 0.5)]}],
    )  # fmt: skip
    keys = list(full.to_json())
    assert keys[0] == "type"
    assert [key for key in keys[1:] if key not in MORE] == PUBLISHED
    assert set(keys[1:]) - set(PUBLISHED) == MORE
    told = {"tokens": [1], "text": "a", "score": -0.5, "chosen": True}
    assert json.dumps(full.to_json()["branches"]) == json.dumps([told])
    assert not OPTIONAL & set(record().to_json())
    taken_back = full.to_json(retracted=True)
    assert [*taken_back.items()] == [*(full.to_json() | {"type": "retracted"}).items()]


def test_shortest_decimals_equal_numpy() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    fractions = rng.integers(-(10**6), 10**6, 50_000) / 2.0 ** rng.integers(0, 24, 50_000)
    tenths = rng.integers(-(10**6), 10**6, 50_000) / 10.0 ** rng.integers(0, 12, 50_000)
    powers = 2.0 ** np.arange(-140, 128)
    for some in (bits, rng.normal(size=200_000), fractions, tenths, powers):
        x = some[~np.isnan(some)].astype(np.float32)
        np.testing.assert_array_equal(shorten(x), x.astype(str).astype(np.float64))


def test_lines_are_flushed_as_they_are_written(tmp_path: Path) -> None:
    path, name = tmp_path / "trace.jsonl", os.fsdecode(b"tiny\xff")
    with TraceWriter(path) as writer:
        writer.write({"type": "header", "prompt": "né\n"})
        assert path.read_text(encoding="utf-8") == '{"type": "header", "prompt": "né\\n"}\n'
        writer.write({"model": name})  # not UTF-8, so it is escaped
        with pytest.raises(ValueError, match="JSON"):
            writer.write({"entropy": float("nan")})
    assert json.loads(path.read_text().splitlines()[1]) == {"model": name}


def test_a_header_has_percentiles_and_thresholds() -> None:
    resolved = load_sampler("entropix").resolve(CALIBRATION)
    tokenizer = SimpleNamespace(decode=lambda ids, *, skip_special: "")
    precision = choose_precision("float32")
    model: Any = SimpleNamespace(config=TINY, precision=precision, tokenizer=tokenizer)
    sampler: Any = SimpleNamespace(
        values=resolved.values, sampler=resolved, calibration=CALIBRATION, name="entropix"
    )
    one = json.loads(json.dumps(header(model, sampler, [1], seed=0, name="tiny")))
    names = [f"thresholds.{name}" for name in ("h1", "h2", "u1", "u2")]
    assert one["percentiles"] == dict(zip(names, ("30%", "70%", "60%", "60%"), strict=True))
    assert [one["sampler_parameters"][name] for name in names] == [0.3, 2.5, 2.5, 2.5]
    tables = one["calibration"]["quantiles"]
    assert {name: len(table) for name, table in tables.items()} == dict.fromkeys(TABLES, 101)
    assert [tables["entropy"][i] for i in (0, 30, 70, 100)] == [0.0, 0.3, 2.5, 10.0]


def test_a_trace_has_the_messages_of_a_prompt(tiny: LanguageModel) -> None:
    """Their roles and texts only: other keys of a message may have any value."""
    assert prompt_messages("Hi", chat=False) is None
    asked = {"role": "user", "content": "Hi"}
    system = {"role": "system", "content": "Be kind."}
    assert prompt_messages("Hi", chat=True, system="Be kind.") == [system, asked]
    parts: Any = [{**asked, "content": [{"type": "text", "text": "Hi"}], "tool": print}]
    rows = entropix_jax.generate(tiny, parts, "greedy", max_new_tokens=1)
    assert rows.header is not None
    assert rows.header["messages"] == [asked]
