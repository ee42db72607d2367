"""The trace's objects and file; whole traces of runs are in test_main.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from entropix_jax.engine.trace import BranchRecord, TraceWriter, plain
from entropix_jax.errors import UserError
from entropix_jax.host.files import check_writable
from tests.support.traces import OPTIONAL, record

# The contract, in order. Three more fields stand among them: the agreement as published, which two
# presets act on, the adaptive arm's confidence, and whether a branching was too close to call.
PUBLISHED = """row position token_id text regime action logprob entropy varentropy
    sequence_varentropy attn_entropy attn_entropy_norm attn_varentropy agreement
    interaction_strength temperature top_k top_p min_p forwards loop top branches
    layers""".split()
MORE = {"agreement_published", "confidence", "ambiguous"}


def test_fields_and_their_order() -> None:
    branch = BranchRecord([1], "a", -0.5, chosen=True)
    full = record(top=[(1, "a", 0.5)], layers=[[0.5]], branches=[branch], ambiguous=False)
    keys = list(full.to_json())
    assert keys[0] == "type"
    assert [key for key in keys[1:] if key not in MORE] == PUBLISHED
    assert set(keys[1:]) - set(PUBLISHED) == MORE
    told = {"tokens": [1], "text": "a", "score": -0.5, "chosen": True}
    assert json.dumps(full.to_json()["branches"]) == json.dumps([told])
    assert not OPTIONAL & set(record().to_json())


def test_a_token_that_was_taken_back_differs_in_its_type_alone() -> None:
    one = record(text="a", top=[(1, "a", 0.5)])
    kept, taken_back = one.to_json(), one.to_json(retracted=True)
    assert (kept.pop("type"), taken_back.pop("type")) == ("token", "retracted")
    assert list(kept.items()) == list(taken_back.items())


@pytest.mark.parametrize("number", [0.1, 1 / 3, 1e-30, 3.4e38, 16777216.0, 1.5e-45])
def test_a_float32_becomes_the_shortest_decimal_that_means_it(number: float) -> None:
    value = np.float32(number)
    text = json.dumps(plain(value))
    assert np.float32(json.loads(text)) == value
    shortest = min(
        (f"{float(value):.{digits}g}" for digits in range(1, 10)),
        key=lambda s: (np.float32(s) != value, len(s)),
    )
    assert float(text) == float(shortest)


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
