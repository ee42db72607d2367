"""Damaged and hostile inputs of each kind that is read from outside; and that the harness which
tries thousands of them sees what it is to see."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from verification.fuzzing import fuzz
from verification.surfaces import SURFACES, check_line, inputs_of

from entropix_jax.errors import UserError

NUMBER = 120  # of each kind; the script tries thousands
SLOW = {"chat-template": 60}

PLANTED = """
import os, time
from pathlib import Path
from entropix_jax.errors import UserError
from verification.surfaces import Surface

KINDS = {kinds!r}

def prepare(folder):
    held = []
    def read(data):
        match data.decode():
            case "refused": raise UserError("no")
            case "two lines":
                raise type("Lines", (UserError,), {{"__str__": lambda self: "a\\nb"}})("")
            case "traceback": raise KeyError("planted")
            case "panic": raise BaseException("planted")
            case "hang": time.sleep(1000)
            case "slow":
                begun = time.process_time()
                while time.process_time() < begun + 1: pass
            case "abort": os.abort()
            case "exit": os._exit(7)
            case "memory": held.append(b"a" * 100_000_000)
    return [b"valid"], read

SURFACES = {{"planted": Surface("planted", "x", lambda rng, seeds: rng.choice(KINDS), prepare)}}
"""


@pytest.mark.parametrize("name", SURFACES)
def test_each_input_gives_a_result_or_a_line(name: str, tmp_path: Path) -> None:
    surface = SURFACES[name]
    with pytest.MonkeyPatch.context() as patch:
        # What surfaces change in their own process.
        patch.setattr("entropix_jax.chat_template.SECONDS", 0.5)
        patch.setattr("entropix_jax.report.page.plotly_source", bytes)
        seeds, read = surface.prepare(tmp_path)
        for valid in seeds:
            read(valid)
        outcomes = []
        for number in range(len(seeds), SLOW.get(name, NUMBER)):
            try:
                read(inputs_of(surface, seeds, 1, number))
                outcomes.append("read")
            except UserError as error:
                check_line(error)
                outcomes.append("refused")
    assert "read" in outcomes  # not so damaged that nothing is tried
    assert "refused" in outcomes or name == "batch-jsonl"  # whose lines are refused one by one


def test_an_input_follows_from_its_number(tmp_path: Path) -> None:
    for name in ("config", "sweep", "safetensors-header", "batch-jsonl", "batch-csv"):
        folder = tmp_path / name
        folder.mkdir()
        surface = SURFACES[name]
        seeds, _ = surface.prepare(folder)
        for number in (0, 20, 21):
            data = inputs_of(surface, seeds, 3, number)
            assert data == inputs_of(surface, seeds, 3, number)
        assert len({inputs_of(surface, seeds, 3, number) for number in range(20, 40)}) > 10


def test_the_harness_sees_what_it_is_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on with the next input, in a new process where the old one has ended."""
    failing = ["two lines", "traceback", "panic", "hang", "slow", "abort", "exit", "memory"]
    kinds = [kind.encode() for kind in ("fine", "refused", *failing)]
    (tmp_path / "planted.py").write_text(PLANTED.format(kinds=kinds))
    monkeypatch.syspath_prepend(tmp_path)
    seed, numbers = 2940, range(1, 11)  # which has each kind soon
    drawn = {n: Random(f"planted {seed} {n}").choice(kinds).decode() for n in numbers}
    assert set(drawn.values()) == {"fine", "refused", *failing}
    outcome = fuzz(
        "planted", seed, numbers, module="planted", seconds=0.5, patience=15, growth=64 * 2**20
    )
    assert outcome.next == numbers.stop
    found = {failure["number"]: failure["kind"] for failure in outcome.failures}
    said = {
        **dict.fromkeys(("two lines", "traceback", "panic"), "exception"),
        "hang": "hang: nothing for 15 s",
        "slow": "slow",
        "abort": "crash: the process ended with status -6",
        "exit": "crash: the process ended with status 7",
        "memory": "memory",
    }
    assert found == {n: said[drawn[n]] for n in numbers if drawn[n] in said}
    assert outcome.refused == sum(drawn[n] == "refused" for n in numbers)
    told = {failure["number"]: failure["what"] for failure in outcome.failures}
    assert all("planted" in told[n] for n in numbers if drawn[n] in ("traceback", "panic"))
    line = outcome.line("x", seed)
    assert (line.tried, line.failures) == (len(numbers), len(found))
    assert {detail["signature"] for detail in line.details} == {
        failure["signature"] for failure in outcome.failures
    }
