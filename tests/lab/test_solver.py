"""Thresholds that are solved for: against brute force, and on held-out text."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from entropix_jax.errors import UserError
from entropix_jax.lab.boxes import Boxes, classify_points, occupancy, read_boxes
from entropix_jax.lab.solver import solve
from entropix_jax.names import BOXES, REGIMES, THRESHOLDS
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.regimes import classify
from tests.support.sampler_strategies import around
from tests.support.samplers import metrics_of, params_of

QUADRANTS = load_sampler("quadrants")
BOUNDS = {"h1": 0.5, "h2": 2.0, "u1": 1.0, "u2": 3.0}

# Boxes that touch, boxes that overlap, and boxes with bounds of their own.
CHANGES: dict[str, dict[str, Any]] = {
    "quadrants": {},
    "document-004": {"regimes.helv": ["entropy > h1", "varentropy < u2"]},
    "overlapping": {
        "regimes.lelv": ["entropy < h2", "varentropy < u1"],
        "regimes.helv": ["entropy > h1", "varentropy < u2"],
        "regimes.lehv": ["varentropy > u1"],
        "regimes.hehv": ["entropy > 1.0", "entropy < 4"],
    },
    "between": {
        "regimes.hehv": ["entropy > h1", "entropy < h2", "varentropy > u1", "varentropy < u2"],
    },
}
SOME = {"lelv": 0.5, "helv": 0.1, "lehv": 0.1, "hehv": 0.1}


def boxes(kind: str = "quadrants") -> Boxes:
    return read_boxes(QUADRANTS.with_values(CHANGES[kind]))


def shares(*values: float) -> dict[str, float]:
    return dict(zip(BOXES, values, strict=True))


def text(seed: int, count: int) -> np.ndarray:
    """Tokens of four kinds, as in a model's text: most are certain."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(4, count, p=[0.6, 0.2, 0.1, 0.1])
    centre = np.array([[-3.0, -3.0], [1.0, -0.5], [0.5, 1.2], [1.5, 1.0]])[kind]
    return np.exp(centre + 0.7 * rng.normal(size=(count, 2)))


def largest_deviation(reached: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    goal = {**wanted, "mid": 1 - sum(wanted.values())}
    return max(abs(reached[regime] - goal[regime]) for regime in REGIMES)


def reachable(points: np.ndarray, kind: str) -> list[dict[str, float]]:
    """Every occupancy that thresholds can give, by trying every gap of both axes for each."""
    own = {"overlapping": [0.0, 1.0, 4.0]}.get(kind, [0.0])  # numbers of boxes part a gap as well
    pairs = []
    for values in np.asarray(points, np.float32).T:
        marks = np.unique(np.concatenate([values, np.array(own, np.float32)]))
        cuts = [0.0, *((marks[:-1] + marks[1:]) / 2), 2 * marks[-1] + 1, 4 * marks[-1] + 2]
        apart = kind == "between"  # its box has room between the two
        pairs.append([(a, b) for a in cuts for b in cuts if a < b or (a == b and not apart)])
    return [
        occupancy(points, dict(zip(THRESHOLDS, (*h, *u), strict=True)), boxes(kind))
        for h in pairs[0]
        for u in pairs[1]
    ]


# Which regime a point is in


@pytest.mark.parametrize("kind", sorted(CHANGES))
def test_points_have_the_samplers_regime(kind: str) -> None:
    """Those of a text, and those on and beside every bound."""
    bounds = {"h1": 0.3, "h2": 2.7, "u1": 1.1, "u2": 2.3}  # none of them a float32
    axes = ((0.3, 1.0, 2.7, 4.0), (1.1, 2.3))
    h, u = ([x for bound in axis for x in around(bound)] for axis in axes)
    points = np.concatenate([text(0, 500), [(x, y) for x in h for y in u]])
    changes = {**CHANGES[kind], **{f"thresholds.{name}": x for name, x in bounds.items()}}
    rows = metrics_of(entropy=points[:, 0], varentropy=points[:, 1])
    found = jax.jit(jax.vmap(classify, in_axes=(0, None)))(rows, params_of("quadrants", changes))
    assert classify_points(points, bounds, boxes(kind)).tolist() == found.tolist()
    assert len(set(found.tolist())) >= 3
    counts = np.bincount(found, minlength=len(REGIMES)) / len(points)
    reached = occupancy(points, bounds, boxes(kind))
    assert reached == dict(zip(REGIMES, counts.tolist(), strict=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"regimes.helv": ["agreement > 0.5"]}, "'agreement > 0.5' cannot be calibrated"),
        ({"regimes.lelv": ["entropy < u1"]}, "regimes.lelv: 'entropy < u1' cannot be calibrated"),
        ({"regimes.lelv": ["entropy < 1"]}, "no box of its regimes uses h1"),
    ],
)
def test_samplers_that_cannot_be_calibrated(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_boxes(QUADRANTS.with_values(changes))
    assert words in str(caught.value)
    assert str(caught.value).startswith("quadrants: ")


# The solver


@pytest.mark.parametrize("kind", sorted(CHANGES))
@pytest.mark.parametrize("ties", [False, True])
def test_nothing_is_nearer_than_the_solution(kind: str, ties: bool) -> None:
    rng = np.random.default_rng(7)
    count = 11
    for seed in range(3):
        points = text(seed, count)
        points = np.round(points) if ties else points  # many zeros, and points on 1 and 4
        all_of = reachable(points, kind)
        for goal in (*rng.dirichlet(np.ones(5), 3)[:, :4], np.eye(4)[seed], [0.5, 0.5, 0.0, 0.0]):
            wanted = shares(*goal)
            solution = solve(points, wanted, boxes(kind), tolerance=1.0)
            assert solution.occupancy == occupancy(points, solution.thresholds, boxes(kind))
            found = {f"thresholds.{k}": v for k, v in solution.thresholds.items()}
            QUADRANTS.with_values({**CHANGES[kind], **found})  # does not refuse them
            best = min(largest_deviation(reached, wanted) for reached in all_of)
            # Half a token, a tenth of the standard error, and what may go to the other regimes.
            slack = 0.5 / count + 0.05 / np.sqrt(count) + 0.0224 * best
            assert largest_deviation(solution.occupancy, wanted) <= best + slack


@pytest.mark.parametrize("kind", ["quadrants", "document-004"])
def test_held_out_text_has_the_wanted_occupancy(kind: str) -> None:
    there = occupancy(text(99, 20_000), BOUNDS, boxes(kind))
    wanted = {box: round(there[box], 2) for box in BOXES}
    assert min(wanted.values()) >= 0.04
    for seed in range(3):
        points, others = text(seed, 20_000), text(100 + seed, 20_000)
        solution = solve(points, wanted, boxes(kind))
        assert largest_deviation(solution.occupancy, wanted) < 0.001
        measured = occupancy(others, solution.thresholds, boxes(kind))
        assert largest_deviation(measured, wanted) < 0.02


def test_thresholds_take_the_widest_gaps() -> None:
    """Between four clusters whose shares are not quite the wanted ones."""
    rng = np.random.default_rng(4)
    centres = np.repeat([[0.1, 0.2], [6.0, 0.2], [2.0, 8.0], [6.0, 8.0]], [500, 100, 150, 250], 0)
    points = centres + rng.uniform(-0.1, 0.1, centres.shape)
    wanted = shares(0.499, 0.1, 0.15, 0.25)
    solution = solve(points, wanted, boxes())
    assert solution.occupancy == {"lelv": 0.5, "helv": 0.1, "lehv": 0.15, "hehv": 0.25, "mid": 0.0}
    assert solution.thresholds == {"h1": 4.0, "h2": 4.0, "u1": 4.0, "u2": 4.0}
    # But not past what is tolerated.
    exact = solve(points, wanted, boxes(), tolerance=0.0005).occupancy
    assert largest_deviation(exact, wanted) < 0.0005


def test_thresholds_have_the_fewest_digits() -> None:
    points = text(9, 10_000)
    for name, bound in solve(points, SOME, boxes()).thresholds.items():
        values = np.sort(points[:, THRESHOLDS.index(name) // 2].astype(np.float32))
        place = np.searchsorted(values, np.float32(bound))
        low, high = map(float, values[place - 1 : place + 1])
        middle, near = (low + high) / 2, (high - low) / 4
        assert abs(bound - middle) <= near
        digits = len(f"{bound:.9e}".split("e")[0].rstrip("0").replace(".", ""))
        assert digits == 1 or abs(float(f"{middle:.{digits - 1}g}") - middle) > near


# What is refused


def test_the_nearest_occupancy_is_named() -> None:
    points = text(5, 4000)
    wanted = shares(0.25, 0.25, 0.25, 0.25)
    with pytest.raises(UserError) as caught:
        solve(points, wanted, boxes())
    line = str(caught.value)
    assert "does not allow lelv 25.0%, helv 25.0%, lehv 25.0%, hehv 25.0%" in line
    named = {k: float(v) / 100 for k, v in re.findall(r"(\w+) ([\d.]+)%", line.split("nearest")[1])}
    assert list(named) == list(REGIMES)
    # It can be reached, and nothing nearer can.
    distance = largest_deviation(named, wanted)
    assert distance > 0.01
    assert solve(points, wanted, boxes(), tolerance=distance + 0.001)
    with pytest.raises(UserError):
        solve(points, wanted, boxes(), tolerance=distance - 0.001)


@pytest.mark.parametrize(
    ("points", "wanted", "words"),
    [
        (np.zeros((0, 2)), SOME, "no tokens"),
        (np.array([[0.0, np.nan]]), SOME, "not a finite number"),
        (np.ones((9, 2)), shares(0.5, 0.3, 0.2, 0.1), "at most 1"),
        (np.ones((9, 2)), shares(0.5, -0.1, 0.2, 0.1), "at least 0"),
        (np.ones((9, 2)), {**SOME, "mid": 0.2}, "lelv, helv, lehv, hehv"),
    ],
)
def test_invalid_requests(points: np.ndarray, wanted: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        solve(points, wanted, boxes())
    assert "\n" not in str(caught.value)
