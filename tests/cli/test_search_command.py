"""`generate --method`: the chosen text, the tree of continuations, and errors."""

import json

import pytest

from entropix_jax.engine.methods import METHODS
from entropix_jax.text.numbers import last_answer
from tests.support.commands import one_error, run_command

PROMPT = "Mia has 12 apples and buys 7. How many apples does Mia have?"
MODEL = ("generate", "--model", "tiny", "--sampler", "min-p")
ASKED = (*MODEL, "--prompt", PROMPT, "--max-new-tokens", 20)


def test_the_chosen_text_and_the_tree() -> None:
    found = run_command(*ASKED, "--method", "eager", "--forks", 4, "--vote", "--format", "json")
    told = json.loads(found.out)
    rows = told["continuations"]
    assert 1 < len(rows) <= 4
    assert told["text"] == rows[told["chosen"]]["text"]
    assert told["votes"][told["answer"]] == max(told["votes"].values())
    assert all(row["parent"] < row["row"] for row in rows[1:])
    shown = run_command(*ASKED, "--method", "eager", "--forks", 4, "--vote")
    assert shown.out == f"{told['text']}\n"
    lines = shown.err.splitlines()
    tree = [line for line in lines if line[:1] in "* " and line.strip("* ")[:1].isdigit()]
    assert len(tree) == len(rows)
    assert [line.startswith("*") for line in tree].index(True) == told["chosen"]
    assert f"{len(rows)} continuations, {told['forwards']} forward passes | votes: " in shown.err


@pytest.mark.parametrize("name", METHODS)
def test_every_method_ends_with_a_text(name: str) -> None:
    """Methods vote if they can. Some texts end with a stop string, which is not printed."""
    vote = () if name == "beam" else ("--vote",)
    found = run_command(*ASKED, "--method", name, "--forks", 3, "--stop", ".", *vote)
    text = found.out.removesuffix("\n")
    assert (found.status, bool(text), "." in text) == (0, True, False)


def test_last_answer() -> None:
    texts = {
        "1,250 or 7.": "7",
        "7.0": "7",
        "about 1,250 m2": "1250",
        "#### 5\nI hope these 3 steps help.": "5",
        "pages 3-7": "7",
        "It is Rome.\n": "it is rome",
        "is it -3.5": "-3.5",
        " ": None,
    }
    assert {text: last_answer(text) for text in texts} == texts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "dst"], "no method 'dst', did you mean 'dts'?"),
        (["--method", "dts", "--forks", 0], "--forks must be at least 1, not 0"),
        (["--method", "dts", "--forks", 33], "--forks"),
        (["--vote"], "--vote needs --method"),
        (["--method", "beam", "--vote"], "method 'beam' does not vote"),
        (["--method", "dts", "--samples", 2], "--method excludes --samples"),
    ],
)
def test_errors_of_methods(arguments: list[object], message: str) -> None:
    one_error(run_command(*ASKED, *arguments), message)
