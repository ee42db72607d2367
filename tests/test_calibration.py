"""Bounds that are solved for: against brute force, on text that was not seen, and as files."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.calibration.boxes import (
    QUANTILES,
    Boxes,
    read_boxes,
    occupancy,
    quantiles,
    classify_points,
)
from entropix_jax.calibration.output import calibration_text, preset_text, write_text
from entropix_jax.calibration.solver import solve
from entropix_jax.errors import UserError
from entropix_jax.loading import CALIBRATION_FILE
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.regimes import classify
from entropix_jax.vocabulary import BOXES, REGIMES, THRESHOLDS
from tests.samplers import calibrated, metrics_of, params_of

ENTROPIX = load_sampler("entropix")
BOUNDS = {"h1": 0.5, "h2": 2.0, "u1": 1.0, "u2": 3.0}

# Boxes that touch, boxes that overlap, and boxes with bounds of their own.
CHANGES: dict[str, dict[str, Any]] = {
    "entropix": {},
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


def boxes(kind: str = "entropix") -> Boxes:
    return read_boxes(ENTROPIX.with_values(CHANGES[kind]))


def shares(*values: float) -> dict[str, float]:
    return dict(zip(BOXES, values, strict=True))


def text(seed: int, count: int) -> np.ndarray:
    """Tokens of four kinds, as a model's text has them: most are certain, few are not."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(4, count, p=[0.6, 0.2, 0.1, 0.1])
    centre = np.array([[-3.0, -3.0], [1.0, -0.5], [0.5, 1.2], [1.5, 1.0]])[kind]
    return np.exp(centre + 0.7 * rng.normal(size=(count, 2)))


def regime_by_hand(h: float, u: float, kind: str, bounds: Mapping[str, float]) -> str:
    """The regime of one point, written out."""
    h, u, h1, h2, u1, u2 = (
        float(np.float32(x)) for x in (h, u, *(bounds[name] for name in THRESHOLDS))
    )
    helv = h > h1 and u < u2 if kind != "entropix" else h > h2 and u < u1
    if kind == "overlapping":
        inside = (h < h2 and u < u1, helv, u > u1, 1 < h < 4)
    else:
        inside = (h < h1 and u < u1, helv, h < h2 and u > u2, h > h2 and u > u2)
    return next((box for box, is_in in zip(BOXES, inside, strict=True) if is_in), "mid")


def largest_deviation(reached: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    goal = {**wanted, "mid": 1 - sum(wanted.values())}
    return max(abs(reached[regime] - goal[regime]) for regime in REGIMES)


def least_deviation(points: np.ndarray, wanted: Mapping[str, float], kind: str) -> float:
    """By trying every gap of both axes for every bound: the least largest deviation there is."""
    points = np.asarray(points, np.float32)
    goal = np.array([wanted[box] for box in BOXES])
    pairs = []
    for values in points.T:
        # The boxes' own numbers part a gap as well.
        own = [0.0, 1.0, 4.0] if kind == "overlapping" else [0.0]
        marks = np.unique(np.concatenate([values, np.array(own, np.float32)]))
        middle = (marks[:-1] + marks[1:]) / 2
        top = 2 * marks[-1] + 1
        cuts = np.concatenate([[0.0], middle, [top, 2 * top]])
        pairs.append([(a, b) for a in cuts for b in cuts if a <= b])
    # Each box's condition on entropy for each pair (h1, h2), on varentropy for each (u1, u2).
    h, u = points.T
    h1, h2 = (np.array(x)[:, None] for x in zip(*pairs[0], strict=True))
    u1, u2 = (np.array(x)[:, None] for x in zip(*pairs[1], strict=True))
    every_h, every_u = np.ones((len(h1), len(h)), bool), np.ones((len(u1), len(h)), bool)
    along_h = [h < h1, h > h2, h < h2, h > h2]
    along_u = [u < u1, u < u1, u > u2, u > u2]
    allowed = np.ones((len(h1), len(u1)), bool)
    if kind != "entropix":
        along_h[1], along_u[1] = h > h1, u < u2
    if kind == "overlapping":
        along_h = [h < h2, h > h1, every_h, every_h & (h > 1) & (h < 4)]
        along_u = [u < u1, u < u2, u > u1, every_u]
    if kind == "between":
        along_h[1], along_u[1] = h > h2, u < u1
        along_h[3], along_u[3] = (h > h1) & (h < h2), (u > u1) & (u < u2)
        allowed = (h1 < h2) & (u1 < u2).T
    free = np.ones((len(h1), len(u1), len(h)), bool)
    deviation = np.zeros((len(h1), len(u1)))
    for a, b, share in zip(along_h, along_u, goal, strict=True):
        inside = a[:, None, :] & b[None, :, :] & free
        free &= ~inside
        deviation = np.maximum(deviation, np.abs(inside.mean(axis=2) - share))
    deviation = np.maximum(deviation, np.abs(free.mean(axis=2) - (1 - goal.sum())))
    return float(deviation[allowed].min())


# Which regime a point is in


@pytest.mark.parametrize("kind", ["entropix", "document-004", "overlapping"])
def test_occupancy_is_that_of_the_boxes_written_out(kind: str) -> None:
    points = text(0, 500)
    found = [regime_by_hand(h, u, kind, BOUNDS) for h, u in points]
    assert [REGIMES[i] for i in classify_points(points, BOUNDS, boxes(kind))] == found
    expected = {regime: found.count(regime) / 500 for regime in REGIMES}
    assert occupancy(points, BOUNDS, boxes(kind)) == pytest.approx(expected, abs=1e-12)
    assert min(expected[regime] for regime in ("lelv", "helv", "lehv")) > 0


@pytest.mark.parametrize("kind", sorted(CHANGES))
def test_points_on_and_beside_every_bound_are_where_the_sampler_puts_them(kind: str) -> None:
    bounds = {"h1": 0.3, "h2": 2.7, "u1": 1.1, "u2": 2.3}  # none of them a float32

    def around(*values: float) -> list[np.float32]:
        inf = np.float32(np.inf)
        middle = [np.float32(value) for value in values]
        return [x for m in middle for x in (np.nextafter(m, -inf), m, np.nextafter(m, inf))]

    points = np.array([(h, u) for h in around(0.3, 1.0, 2.7, 4.0) for u in around(1.1, 2.3)])
    changes = {**CHANGES[kind], **{f"thresholds.{name}": x for name, x in bounds.items()}}
    params = params_of("entropix", changes)
    metrics = metrics_of(entropy=0.0, varentropy=0.0)
    rows = jax.tree.map(lambda x: jnp.repeat(x[None], len(points), axis=0), metrics).replace(
        entropy=jnp.asarray(points[:, 0]), varentropy=jnp.asarray(points[:, 1])
    )
    by_sampler = jax.jit(jax.vmap(classify, in_axes=(0, None)))(rows, params)
    assert classify_points(points, bounds, boxes(kind)).tolist() == by_sampler.tolist()
    assert len(set(by_sampler.tolist())) >= 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"regimes.helv": ["agreement > 0.5"]}, "'agreement > 0.5' cannot be calibrated"),
        ({"regimes.lelv": ["entropy < u1"]}, "regimes.lelv: 'entropy < u1' cannot be calibrated"),
        ({"regimes.lelv": ["entropy < 1"]}, "no box of its regimes uses h1"),
    ],
)
def test_samplers_whose_bounds_cannot_be_solved_for(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        read_boxes(ENTROPIX.with_values(changes))
    assert words in str(caught.value)
    assert str(caught.value).startswith("entropix: ")


# The solver


@pytest.mark.parametrize("kind", sorted(CHANGES))
@pytest.mark.parametrize("ties", [False, True])
def test_nothing_is_nearer_than_the_solution(kind: str, ties: bool) -> None:
    rng = np.random.default_rng(7)
    count = 18
    for seed in range(4):
        points = text(seed, count)
        points = np.round(points) if ties else points  # many zeros, and points on 1 and 4
        for goal in (rng.dirichlet(np.ones(5))[:4], np.eye(4)[seed], [0.5, 0.5, 0.0, 0.0]):
            wanted = shares(*goal)
            solution = solve(points, wanted, boxes(kind), tolerance=1.0)
            assert solution.occupancy == occupancy(points, solution.thresholds, boxes(kind))
            ENTROPIX.with_values(  # does not refuse them
                {
                    **CHANGES[kind],
                    **{f"thresholds.{k}": v for k, v in solution.thresholds.items()},
                }
            )
            best = least_deviation(points, wanted, kind)
            # Half a token, a tenth of the standard error, and what may go to the other regimes.
            slack = 0.5 / count + 0.05 / np.sqrt(count) + 0.0224 * best
            assert largest_deviation(solution.occupancy, wanted) <= best + slack


@pytest.mark.parametrize("kind", ["entropix", "document-004"])
def test_an_occupancy_that_bounds_had_is_reached(kind: str) -> None:
    points = text(1, 20_000)
    rng = np.random.default_rng(2)
    for _ in range(6):
        ranks = np.sort(rng.random((2, 2)), axis=1)
        bounds = [np.quantile(points[:, i], ranks[i]) for i in (0, 1)]
        there = occupancy(points, dict(zip(THRESHOLDS, np.ravel(bounds), strict=True)), boxes(kind))
        wanted = {box: there[box] for box in BOXES}
        solution = solve(points, wanted, boxes(kind))
        assert largest_deviation(solution.occupancy, wanted) < 0.001


@pytest.mark.parametrize("kind", ["entropix", "document-004"])
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


def test_order_of_the_tokens_does_not_matter() -> None:
    points = text(3, 3000)
    again = np.random.default_rng(0).permutation(points)
    assert solve(points, SOME, boxes()) == solve(again, SOME, boxes())


def test_bounds_lie_in_the_middle_of_gaps_and_have_few_digits() -> None:
    """Four clusters whose shares are not quite the wanted ones: the gaps between them win."""
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


def test_bounds_have_the_fewest_digits_that_keep_them_near_the_middle_of_their_gap() -> None:
    points = text(9, 10_000)
    thresholds = solve(points, SOME, boxes()).thresholds
    assert sorted(thresholds) == list(THRESHOLDS)
    for name, bound in thresholds.items():
        values = np.sort(points[:, THRESHOLDS.index(name) // 2].astype(np.float32))
        place = np.searchsorted(values, np.float32(bound))
        low, high = map(float, values[place - 1 : place + 1])
        middle, near = (low + high) / 2, (high - low) / 4
        assert abs(bound - middle) <= near
        digits = len(f"{bound:.9e}".split("e")[0].rstrip("0").replace(".", ""))
        assert digits == 1 or abs(float(f"{middle:.{digits - 1}g}") - middle) > near


@pytest.mark.parametrize(
    ("points", "wanted"),
    [
        (np.zeros((30, 2)), shares(0, 0, 0, 0)),
        (np.ones((30, 2)), shares(1, 0, 0, 0)),
        (np.ones((30, 2)), shares(0, 0, 0, 1)),
        (text(0, 300), shares(0, 0, 0, 0)),
        (text(0, 300), shares(0, 1, 0, 0)),
    ],
)
def test_extremes_are_reached(points: np.ndarray, wanted: dict[str, float]) -> None:
    assert largest_deviation(solve(points, wanted, boxes()).occupancy, wanted) < 0.005


def test_a_box_between_two_bounds_keeps_room() -> None:
    """Equal bounds would serve best, but then nothing could ever lie in the box between them."""
    points = np.array([[1.0, 1.0], [3.0, 1.0]] * 9)
    thresholds = solve(points, shares(0.5, 0.5, 0, 0), boxes("between"), tolerance=1).thresholds
    assert thresholds["h1"] < thresholds["h2"]
    assert thresholds["u1"] < thresholds["u2"]


# What is refused


def test_an_occupancy_that_the_text_does_not_allow_is_refused_with_the_nearest() -> None:
    points = text(5, 4000)
    wanted = shares(0.25, 0.25, 0.25, 0.25)
    with pytest.raises(UserError) as caught:
        solve(points, wanted, boxes())
    line = str(caught.value)
    assert "\n" not in line
    assert "does not allow lelv 25.0%, helv 25.0%, lehv 25.0%, hehv 25.0%" in line
    named = {k: float(v) / 100 for k, v in re.findall(r"(\w+) ([\d.]+)%", line.split("nearest")[1])}
    assert list(named) == list(REGIMES)
    assert sum(named.values()) == pytest.approx(1, abs=0.0025)  # five rounded shares

    distance = largest_deviation(named, wanted)
    assert distance > 0.01
    reached = solve(points, {box: named[box] for box in BOXES}, boxes(), tolerance=0.002).occupancy
    assert reached == pytest.approx(named, abs=0.002)
    assert solve(points, wanted, boxes(), tolerance=distance + 0.001)
    with pytest.raises(UserError):
        solve(points, wanted, boxes(), tolerance=distance - 0.001)


def test_tokens_that_cannot_be_told_apart() -> None:
    with pytest.raises(UserError, match=r"nearest that it allows is lelv 100\.0%, helv 0\.0%"):
        solve(np.ones((40, 2)), shares(0.7, 0.1, 0.1, 0.0), boxes())


@pytest.mark.parametrize(
    ("points", "wanted", "words"),
    [
        (np.zeros((0, 2)), SOME, "no tokens"),
        (np.array([[0.0, np.nan]]), SOME, "not a finite number"),
        (np.array([[np.inf, 0.0]]), SOME, "not a finite number"),
        (np.ones((9, 2)), shares(0.5, 0.3, 0.2, 0.1), "at most 1 in all"),
        (np.ones((9, 2)), shares(0.5, -0.1, 0.2, 0.1), "at least 0"),
        (np.ones((9, 2)), shares(0.5, np.nan, 0.2, 0.1), "at least 0"),
        (np.ones((9, 2)), {"lelv": 0.5}, "lelv, helv, lehv, hehv"),
        (np.ones((9, 2)), {**SOME, "mid": 0.2}, "lelv, helv, lehv, hehv"),
    ],
)
def test_requests_that_make_no_sense(
    points: np.ndarray, wanted: dict[str, float], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        solve(points, wanted, boxes())
    assert "\n" not in str(caught.value)


# Files


def test_a_written_preset_is_read_as_it_was_meant(tmp_path: Path) -> None:
    thresholds = {"h1": 0.1 + 0.2, "h2": 5e-05, "u1": 1 / 3, "u2": 20.0}
    thresholds["h1"], thresholds["h2"] = sorted((thresholds["h1"], thresholds["h2"]))
    description = 'calibrated on "a\\b"\n\ttext\x7f, 30 % — 😀'
    path = tmp_path / "new" / "mine.toml"
    write_text(path, preset_text("document-001", thresholds, description))
    sampler = load_sampler(str(path))
    assert sampler.description == description
    assert {name: sampler.values[f"thresholds.{name}"] for name in THRESHOLDS} == thresholds
    assert sampler.values["thresholds.calibrated"] is False
    rest = {k: v for k, v in load_sampler("document-001").values.items() if "thresholds." not in k}
    assert {k: sampler.values[k] for k in rest} == rest
    # A model's own thresholds do not take their place.
    (tmp_path / CALIBRATION_FILE).write_text(calibration_text(BOUNDS, "elsewhere"))
    assert calibrated(sampler, tmp_path).values["thresholds.u1"] == 1 / 3

    # One that extends a file, by its path from the new one's folder.
    write_text(tmp_path / "next.toml", preset_text("new/mine.toml", BOUNDS, ""))
    assert load_sampler(str(tmp_path / "next.toml")).values["thresholds.u2"] == 3.0


def test_a_written_calibration_is_the_models(tmp_path: Path) -> None:
    thresholds = {"u2": 2.5, "u1": 1 / 3, "h2": 3.0, "h1": 5e-05}
    write_text(tmp_path / CALIBRATION_FILE, calibration_text(thresholds, "a text"))
    stored = json.loads((tmp_path / CALIBRATION_FILE).read_text())
    assert list(stored["thresholds"]) == list(THRESHOLDS)
    assert stored["source"] == "a text"
    sampler = calibrated(ENTROPIX, tmp_path)
    assert {name: sampler.values[f"thresholds.{name}"] for name in THRESHOLDS} == thresholds


def test_solved_thresholds_survive_the_file(tmp_path: Path) -> None:
    points = text(6, 5000)
    solution = solve(points, SOME, boxes())
    write_text(tmp_path / "mine.toml", preset_text("entropix", solution.thresholds, "mine"))
    sampler = load_sampler(str(tmp_path / "mine.toml"))
    read = {name: sampler.values[f"thresholds.{name}"] for name in THRESHOLDS}
    assert occupancy(points, read, read_boxes(sampler)) == solution.occupancy


# What is shown


def test_quantiles() -> None:
    rng = np.random.default_rng(0)
    points = rng.permuted(np.stack([np.arange(101), 10.0 * np.arange(101)], axis=1), axis=0)
    expected = np.outer([5, 25, 50, 75, 95, 99], [1.0, 10.0])
    np.testing.assert_allclose(quantiles(points), expected, rtol=0, atol=1e-9)
    assert len(QUANTILES) == len(expected)


@pytest.mark.parametrize("width", [66, 46])
def test_the_plane(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane, "_WIDTH", width)
    points = text(8, 5000)
    lines = draw_plane(points, BOUNDS, boxes()).split("\n")
    assert max(map(len, lines)) <= width + 14
    assert lines[0] == "varentropy (bits²)"
    assert lines[-1].endswith("entropy (bits)")
    whole = "\n".join(lines)
    for regime, share in occupancy(points, BOUNDS, boxes()).items():
        # The narrowest box has room for its name alone.
        name = regime.upper()
        assert (name if regime == "lelv" else f" {name} {share:.1%}") in whole

    # Rows and columns of the bounds, by their names; and the numbers of the axes by theirs.
    column = {name: lines[1].index(name) for name in ("h1", "h2")}
    row = {name: next(i for i, x in enumerate(lines) if x.endswith(name)) for name in ("u1", "u2")}
    ticks = {float(x.group()): x.start() for x in re.finditer(r"\S+", lines[-2])}
    assert len(ticks) >= 5
    if width == 46:  # where there is room for a number at that bound
        assert ticks[2.0] == column["h2"]
    assert all(lines[-3][place] == "┬" for place in ticks.values())
    assert row["u2"] < row["u1"]

    # Each box ends at its bounds, and MID lies between them.
    inner = (column["h1"] + column["h2"]) // 2
    assert {lines[i][column["h1"]] for i in range(row["u1"] + 1, len(lines) - 3)} == {"│"}
    assert {lines[i][column["h2"]] for i in range(2, row["u2"])} == {"│"}
    assert lines[row["u2"]][inner] == "─"
    assert lines[row["u1"]][inner] not in "─│"
    assert lines[row["u1"]][column["h1"]] == "┐"
    assert lines[row["u1"]][column["h2"]] == "┌"
    assert lines[row["u2"]][column["h2"]] == "┴"


def test_the_planes_shades() -> None:
    """One point, a hundred, none: the darkest shade where most are, blank where none is."""
    points = np.concatenate([np.full((100, 2), 9.0), [[1.0, 4.0]]])
    bounds = {"h1": 20.0, "h2": 20.0, "u1": 20.0, "u2": 20.0}  # outside of the picture
    lines = draw_plane(points, bounds, boxes()).split("\n")
    body = [line[8:] for line in lines[2:-3]]
    shades = {mark for line in body for mark in line} - set(" LELV100.0%")
    assert shades == {"█", "·"}
    assert body[0].endswith("█")
    (low,) = [(i, line.index("·")) for i, line in enumerate(body) if "·" in line]
    # A third of the way along entropy, two thirds up varentropy: square roots.
    assert low[1] == pytest.approx(len(body[0]) / 3, abs=1)
    assert len(body) - 1 - low[0] == pytest.approx(len(body) * 2 / 3, abs=1)


def test_planes_with_nothing_to_tell_apart() -> None:
    """Zeros alone, and bounds in one place: all names stay within the picture."""
    assert " LELV 100.0% " in draw_plane(np.zeros((5, 2)), BOUNDS, boxes())
    same = {"h1": 2.0, "h2": 2.0, "u1": 2.0, "u2": 2.0}
    lines = draw_plane(text(8, 500), same, boxes()).split("\n")
    assert lines[1].split() == ["h1", "h2"]
    assert any(line.endswith(" u1 u2") for line in lines)
    assert max(map(len, lines)) <= 80
