"""Fork strengths against their formula, and true strengths against an enumeration of all texts."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from entropix_jax.lab.strength import fork_strength, permuted_strength
from entropix_jax.lab.tasks.tiny import _WORLD, STORIES, _first_event, _write_story
from entropix_jax.lab.world.futures import Futures
from entropix_jax.lab.world.grammar import Document, replay, weighted, write
from entropix_jax.lab.world.lexicon import split_terminals


def direct_strength(chances: list[float], outcomes: list[list[float]]) -> float:
    total = sum(chances)
    mean = [
        sum(p / total * each[a] for p, each in zip(chances, outcomes, strict=True))
        for a in range(len(outcomes[0]))
    ]
    return sum(
        p / total * sum(abs(x - m) for x, m in zip(each, mean, strict=True)) / 2
        for p, each in zip(chances, outcomes, strict=True)
    )


def test_fork_strength_equals_its_formula() -> None:
    rng = np.random.default_rng(0)
    for alternatives in (1, 2, 5):
        chances = rng.random(alternatives)
        outcomes = rng.dirichlet(np.ones(4), alternatives)
        expected = direct_strength(chances.tolist(), outcomes.tolist())
        assert fork_strength(chances, outcomes) == pytest.approx(expected, abs=1e-12)
    assert fork_strength([0.3], [[0.2, 0.8]]) == 0
    assert fork_strength([0.2, 0.2], [[1, 0], [0, 1]]) == 0.5
    assert fork_strength([0.1, 0.3], [[1, 0], [0, 1]]) == pytest.approx(0.375)


def test_permuted_strength_is_the_mean_over_permutations() -> None:
    """The estimate from 100 permutations is within 5 standard errors of the exact mean."""
    chances, counts = [0.5, 0.3], np.array([[3, 0], [1, 2]])
    samples = [0, 0, 0, 0, 1, 1]
    each = []
    for order in permutations(samples):
        shares = [[part.count(a) / 3 for a in (0, 1)] for part in (order[:3], order[3:])]
        each.append(direct_strength(chances, shares))
    found = permuted_strength(chances, counts)
    assert abs(found - np.mean(each)) < 5 * np.std(each) / 10
    assert found == permuted_strength(chances, counts)


def test_a_constant_outcome_has_no_strength() -> None:
    assert permuted_strength([0.5, 0.5], [[7], [7]]) == 0


def toast() -> Document:
    """Writes `A` or `B`, then a colour that depends on it. `C` is too rare to be an alternative."""
    first = yield from write(weighted("fork", {"A": 0.6, "B": 0.37, "C": 0.03}))
    colours = {"A": {" red": 0.9, " blue": 0.1}, "B": {" red": 0.2, " blue": 0.8}}
    yield from write(" is", weighted("fork", colours.get(first, {" red": 1.0})), ".")


def test_futures_of_a_small_grammar() -> None:
    def read(text: str) -> str | None:
        return next((colour for colour in ("red", "blue") if colour in text), None)

    futures = Futures(toast, read)
    assert futures.after(()) == pytest.approx({"red": 0.644, "blue": 0.356})
    assert futures.after(("B", " is")) == pytest.approx({"red": 0.2, "blue": 0.8})
    expected = direct_strength([0.6, 0.37], [[0.9, 0.1], [0.2, 0.8]])
    assert futures.strength(()) == pytest.approx(expected, abs=1e-12)
    assert futures.strength(("A",)) == 0
    assert futures.strength(("A", " is", " red", ".")) == 0
    assert futures.strength(("A", " is")) == pytest.approx(0.18)


@pytest.mark.parametrize(
    "text",
    [
        "Once on Tuesday Bob went to the castle with Tina. There",
        "Once on Tuesday Bob went to the ... castle. There Bob found a Wait... Bob found a",
        "Once upon a time Igor lived in Munich. One Monday Igor went to the forest. There Igor met",
    ],
)
def test_a_storys_state_determines_its_outcomes(text: str) -> None:
    """Merged prefixes have the outcomes of an enumeration of every text."""
    said = split_terminals(text)
    whole = Futures(lambda: _write_story(_WORLD), _first_event)
    found = STORIES._futures.after(said)
    assert found == pytest.approx(whole.after(said), abs=1e-12)
    assert sum(found.values()) == pytest.approx(1)


def test_true_strengths_of_stories() -> None:
    item = next(iter(STORIES.items("test", chat=False)))
    assert not isinstance(item.prompt, tuple)
    choice = replay(_write_story(_WORLD), split_terminals(item.prompt))
    assert choice is not None
    assert sum(p >= 0.05 for p in choice.probabilities) > 1
    assert STORIES.true_strength(item, "") == pytest.approx(
        STORIES._futures.strength(split_terminals(item.prompt))
    )
    assert STORIES.true_strength(item, " nonsense") is None
    assert STORIES.true_strength(item, " castle. There") is None or item.prompt.endswith("the")


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (" There Anna met Bob. Bob was sad and wept.", "wept"),
        (" There Anna met ... Bob. Bob was happy and danced.", "danced"),
        (" There Anna danced with Bob.", "with"),
        (" There Anna found a bell. Anna kept the bell.", "bell"),
        (" There Anna found a Wait... Anna found a ... ring.", "ring"),
        (" There Anna met Bob. Bob was sad", None),
        (" and wept", None),
    ],
)
def test_outcomes_of_stories(text: str, outcome: str | None) -> None:
    item = next(iter(STORIES.items("test", chat=False)))
    prompt = type(item)(item.id, "Once on Monday Anna went to the park.", "")
    assert STORIES.extract(prompt, text) == outcome
    assert STORIES.score(prompt, outcome) == (outcome is not None)
