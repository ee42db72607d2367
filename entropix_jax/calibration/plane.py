"""The entropy/varentropy plane as text: the tokens, the boxes, and the share that each holds.

Row 0 is the lowest until the picture is printed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from entropix_jax.calibration.boxes import Boxes, occupancy, regimes_of
from entropix_jax.names import THRESHOLDS

_SHADES = " ·░▒▓█"
_LINES = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"  # bits: up, down, left, right
_WIDTH, _HEIGHT = 66, 20  # of the picture; beside it are numbers and names
_TICKS = [0.0, *(digit * 10.0**power for power in range(-2, 4) for digit in (1, 2, 5))]


def draw_plane(points: np.ndarray, thresholds: Mapping[str, float], boxes: Boxes) -> str:
    """The plane as text of at most 80 columns: where the points are, the boxes, their shares.

    Both axes are scaled by the square root, since most tokens of a text are certain ones; shades
    grow with the logarithm of the count. The last row and column also hold what lies beyond them.
    """
    points = np.asarray(points, np.float32)
    size = (_WIDTH, _HEIGHT)
    x, y = (
        _Scale(points[:, i], _bounds_of(i, thresholds, boxes), size[i], spacing=(6, 2)[i])
        for i in (0, 1)
    )
    counts = np.zeros((_HEIGHT, size[0]), np.int64)
    np.add.at(counts, (y.cells(points[:, 1]), x.cells(points[:, 0])), 1)
    shades = np.ceil(np.log1p(counts) / np.log1p(counts.max()) * (len(_SHADES) - 1))
    picture = np.array(list(_SHADES))[shades.astype(int)]

    def regimes(entropy: np.ndarray, varentropy: np.ndarray) -> np.ndarray:
        corners = np.stack(np.meshgrid(entropy, varentropy), axis=-1)
        return regimes_of(corners.reshape(-1, 2), thresholds, boxes).reshape(counts.shape)

    # The regimes at each cell's corners: a line runs between two that differ.
    low = regimes(x.below, y.below), regimes(x.above, y.below)
    top = regimes(x.below, y.above), regimes(x.above, y.above)
    up, down, left, right = top[0] != top[1], low[0] != low[1], low[0] != top[0], low[1] != top[1]
    lines = up + 2 * down + 4 * left + 8 * right
    picture = np.where(lines, np.array(list(_LINES))[lines], picture)

    for i, (regime, share) in enumerate(occupancy(points, thresholds, boxes).items()):
        name = regime.upper()
        _put_label(picture, (lines == 0) & (low[0] == i), (f" {name} {share:.1%} ", name))
    return "\n".join(_framed(picture, x, y))


class _Scale:
    """One axis of the picture: which cell a value is in, and what each cell stands for."""

    def __init__(
        self, values: np.ndarray, bounds: Mapping[str, np.float32], size: int, spacing: int
    ) -> None:
        self._size = size
        inside = [bound for bound in bounds.values() if bound < values.max()]
        common = np.quantile(values, 0.999)
        self._largest = float(max([common, *(1.2 * bound for bound in inside)])) or 1.0
        middles = self._largest * ((np.arange(size) + 0.5) / size) ** 2
        self.below, self.above = middles.astype(np.float32), middles.astype(np.float32)
        self.names: dict[int, str] = {}  # of the bounds, by cell
        for name, bound in sorted(bounds.items(), key=lambda item: item[1]):
            if not 0 < bound < self._largest:
                continue
            cell = int(self.cells(bound))
            # Cells stand for their middles, but those on a bound for what is just beside it.
            if self.below[cell] == self.above[cell]:
                self.below[cell] = np.nextafter(bound, np.float32(-np.inf))
            self.above[cell] = np.nextafter(bound, np.float32(np.inf))
            if name in THRESHOLDS:
                self.names[cell] = f"{self.names.get(cell, '')} {name}".strip()
        self.ticks: dict[int, str] = {}
        for tick in _TICKS:
            cell = int(self.cells(tick))
            if tick < self._largest and cell >= max(self.ticks, default=-spacing) + spacing:
                self.ticks[cell] = f"{tick:g}"

    def cells(self, values: Any) -> np.ndarray:
        """The cells of values; an entropy can be negative by rounding."""
        scaled = self._size * np.sqrt(np.maximum(values, 0) / self._largest)
        cells: np.ndarray = np.minimum(scaled, self._size - 1).astype(int)
        return cells


def _bounds_of(axis: int, thresholds: Mapping[str, float], boxes: Boxes) -> dict[str, np.float32]:
    """Names and values of all bounds of an axis; a number's name is its own text."""
    bounds = [c.bound for box in boxes for c in box if c.axis == axis]
    return {str(b): np.float32(thresholds[b] if isinstance(b, str) else b) for b in bounds}


def _put_label(picture: np.ndarray, free: np.ndarray, labels: Sequence[str]) -> None:
    """Writes the first of the labels that fits where the picture is free, near the middle."""
    places = np.argwhere(free)
    for label in labels:
        fits = [
            (row, start)
            for row, start in places
            if start + len(label) <= free.shape[1] and free[row, start : start + len(label)].all()
        ]
        if fits:
            middle = places.mean(axis=0) - [0, len(label) / 2]
            # A cell is about twice as high as wide.
            distances = np.abs((np.array(fits) - middle) * [2, 1]).sum(axis=1)
            row, start = fits[int(np.argmin(distances))]
            picture[row, start : start + len(label)] = list(label)
            return


def _framed(picture: np.ndarray, x: _Scale, y: _Scale) -> list[str]:
    """The picture's lines, highest first, between axes with numbers and the bounds' names."""
    height, width = picture.shape
    lines = ["varentropy (bits²)", _spread(x.names, 8)]
    for row in reversed(range(height)):
        tick = y.ticks.get(row)
        axis = f"{tick or '':>6} {'┤' if tick else '│'}"
        lines.append(f"{axis}{''.join(picture[row])} {y.names.get(row, '')}")
    axis = "".join("┬" if cell in x.ticks else "─" for cell in range(width))
    lines += [f"{'':>7}└{axis}", _spread(x.ticks, 8), f"{'entropy (bits)':>{width + 8}}"]
    return [line.rstrip() for line in lines]


def _spread(texts: Mapping[int, str], indent: int) -> str:
    """Texts at their columns, or as near to the right of them as there is room."""
    line = " " * indent
    for column, text in sorted(texts.items()):
        line = line.ljust(indent + column) + text + " "
    return line
