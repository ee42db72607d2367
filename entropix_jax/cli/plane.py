"""The plane of entropy and varentropy in characters: a sign for the tokens in each cell."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.text import Text

from entropix_jax.cli.terminal import fit, palette
from entropix_jax.names import BOXES, MEANINGS, REGIMES, read_condition

if TYPE_CHECKING:
    from entropix_jax.engine.trace import TokenRecord
    from entropix_jax.sampler.calibration import Calibration

_HEIGHT, _WIDTH = 16, 72  # cells, at most
_MARGIN = 8  # columns to the left of the cells
_SIGNS = dict(zip(REGIMES, "●■◆×▲", strict=True))
_LINES = {(True, False): "┊", (False, True): "┈", (True, True): "┼"}


def draw_plane(
    tokens: Iterable["TokenRecord"],
    values: Mapping[str, Any],
    calibration: "Calibration",
    columns: int,
) -> Text:
    """Returns the plane, at most `columns` wide. Both axes are percentiles of the model's answers,
    and dotted lines are the bounds of the regimes of the sampler's `values`. The sign of a cell is
    that of the regime of most of its tokens."""
    width = max(min(_WIDTH, columns - _MARGIN), 1)
    sizes = {"entropy": width, "varentropy": _HEIGHT}

    def cell(quantity: str, value: float) -> int:
        size = sizes[quantity]
        return min(int(calibration.rank(quantity, value) / 100 * size), size - 1)

    counts: defaultdict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for token in tokens:
        place = cell("entropy", token.entropy), cell("varentropy", token.varentropy)
        counts[place][token.regime] += 1
    lines: dict[str, defaultdict[int, list[str]]] = {name: defaultdict(list) for name in sizes}
    for quantity, name, value in _bounds(values):
        if quantity in lines and name not in (names := lines[quantity][cell(quantity, value)]):
            names.append(name)

    def drawn(x: int, y: int) -> tuple[str, str]:
        if (x, y) not in counts:
            return _LINES.get((x in lines["entropy"], y in lines["varentropy"]), " "), "dim"
        regime = max(REGIMES, key=lambda regime: counts[x, y][regime])
        return _SIGNS[regime], palette()[regime]

    head = [" "] * width
    for x, names in lines["entropy"].items():
        head[x : x + len("/".join(names))] = "/".join(names)
    text = Text(f"{'':{_MARGIN}}{''.join(head).rstrip()}\n", "dim")
    ends = {y: f"{calibration.value('varentropy', p):.2f}" for y, p in ((0, 0), (_HEIGHT - 1, 100))}
    for y in reversed(range(_HEIGHT)):
        label = "/".join(lines["varentropy"].get(y, [])) or ends.get(y, "")
        text.append(f"{label:>{_MARGIN - 2}} │", "dim")
        for style, run in groupby((drawn(x, y) for x in range(width)), key=lambda one: one[1]):
            text.append("".join(sign for sign, _ in run), style)
        text.append("\n")
    first, last = (f"{calibration.value('entropy', percent):.2f}" for percent in (0, 100))
    axis = f"{'entropy, bits; upwards varentropy, bits²':^{width - len(first) - len(last)}}"
    text.append(f"{'':{_MARGIN - 1}}└{'─' * width}\n{'':{_MARGIN}}{first}{axis}{last}\n", "dim")
    signs = [Text(f"{_SIGNS[regime]} {MEANINGS[regime]}", palette()[regime]) for regime in REGIMES]
    return text.append(fit(signs, "  ", columns))


def _bounds(values: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yields quantity, name and value of each bound of a regime."""
    for box in BOXES:
        for condition in values[f"regimes.{box}"]:
            quantity, _, bound = read_condition(condition)
            if isinstance(bound, str):
                yield quantity, bound, values[f"thresholds.{bound}"]
            else:
                yield quantity, f"{bound:g}", bound
