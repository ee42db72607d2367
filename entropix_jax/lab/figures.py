"""Figures: size, colours, points with error bars, and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entropix_jax.host.files import replacing
from entropix_jax.lab.statistics import Interval

# Okabe and Ito's colour-blind safe palette.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")
MARKERS = "osD^vP*X"
_MAX_HEIGHT = 400.0  # inches; matplotlib limits a PNG to 2^16 rows of pixels


@contextmanager
def figure(
    folder: Path, name: str, *, width: float = 9.0, height: float = 4.5, panels: int = 1
) -> Iterator[Any]:
    """Yields the axes, or several side by side with one vertical axis, and then writes `name.png`
    and `name.svg`. Their background is white, so that they are legible on any page."""
    import matplotlib
    from matplotlib import pyplot

    # No window, and files that are the same from run to run.
    pyplot.switch_backend("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "entropix_jax"
    size = (width, min(height, _MAX_HEIGHT))
    drawn, axes = pyplot.subplots(
        1, panels, figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    for one in axes[0]:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
        one.set_axisbelow(True)
    try:
        yield axes[0, 0] if panels == 1 else axes[0]
        metadata: Mapping[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}}
        for suffix, without_date in metadata.items():
            with replacing(folder / f"{name}.{suffix}") as scratch:
                drawn.savefig(scratch, format=suffix, dpi=150, metadata=without_date)
    finally:
        pyplot.close(drawn)


def point(
    axes: Any, number: int, name: str, x: float, y: Interval, x_interval: Interval | None = None
) -> None:
    """A setting's point with its error bars, in a colour and shape by its number."""
    axes.errorbar(
        x,
        y.value,
        xerr=None if x_interval is None else error_bars([x_interval]),
        yerr=error_bars([y]),
        fmt=MARKERS[number // len(COLOURS) % len(MARKERS)],
        color=COLOURS[number % len(COLOURS)],
        label=escape(name),
        capsize=2,
        markersize=5,
        linewidth=1,
    )


def error_bars(scores: Sequence[Interval]) -> list[list[float]]:
    """Lengths [2, n] of the error bars, down and up. A percentile interval need not contain the
    value, so they are clipped at 0."""
    return [
        [max(s.value - s.low, 0.0) for s in scores],
        [max(s.high - s.value, 0.0) for s in scores],
    ]


def escape(name: str) -> str:
    """Escapes a name, so that matplotlib does not read `$` as mathematics."""
    return name.replace("$", r"\$")
