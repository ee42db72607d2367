"""Plots of a study's results, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from entropix_jax.errors import require
from entropix_jax.host.files import replacing
from entropix_jax.lab.statistics import Interval
from entropix_jax.lab.summary import Findings, Line
from entropix_jax.lab.votes import MAJORITY
from entropix_jax.names import REGIMES

# Okabe and Ito's colour-blind safe palette.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")
_REGIME_COLOURS = dict(
    zip(REGIMES, ("#56B4E9", "#009E73", "#E69F00", "#D55E00", "#BBBBBB"), strict=True)
)
_MARKERS = "osD^vP*X"
_MAX_HEIGHT = 400.0  # inches; matplotlib limits a PNG to 2^16 rows of pixels


def draw_plots(findings: Findings, folder: Path) -> list[str]:
    """Draws all plots that the findings have data for, and returns their names without suffixes.

    The folder is created if it is missing.

    Raises:
        UserError: a file cannot be written, or matplotlib is not installed.
    """
    require("lab", "matplotlib")
    names = []
    if findings.lines:
        names.append(_scores(findings, folder))
        names += _responses(findings, folder)
    names.append(_regimes(findings, folder))
    if findings.bins:
        names.append(_reliability(findings, folder))
    if findings.truth:
        names.append(_truth(findings, folder))
    return names


def _scores(findings: Findings, folder: Path) -> str:
    """Score against forward passes; majority votes of the baseline as a line."""
    lines = findings.lines
    with _figure(folder, "scores", height=max(4.5, 0.24 * len(lines))) as axes:
        for number, line in enumerate(lines):
            _point(axes, number, line)
        if votes := findings.votes.get((findings.baseline, MAJORITY)):
            costs = [cost for cost, _ in votes]
            values = [score.value for _, score in votes]
            bounds = [score.low for _, score in votes], [score.high for _, score in votes]
            label = _escape(f"majorities of {findings.baseline} samples")
            axes.plot(costs, values, color="#888888", label=label)
            axes.fill_between(costs, *bounds, color="#888888", alpha=0.15, linewidth=0)
        if all(line.cost for line in lines):  # a logarithmic axis has no 0
            axes.set_xscale("log", subs=[2, 3, 5])
        for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            axis("{x:g}")
        axes.set_xlabel("forward passes per answer, beyond the prompt")
        axes.set_ylabel("score")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    return "scores"


def _point(axes: Any, number: int, line: Line) -> None:
    score = line.score
    axes.errorbar(
        line.cost,
        score.value,
        yerr=_error_bars([score]),
        fmt=_MARKERS[number // len(_COLOURS) % len(_MARKERS)],
        color=_COLOURS[number % len(_COLOURS)],
        label=_escape(line.setting.name),
        capsize=2,
        markersize=5,
        linewidth=1,
    )


def _error_bars(scores: Sequence[Interval]) -> list[list[float]]:
    """Lengths [2, n] of the error bars, down and up. A percentile interval need not contain the
    value, so they are clipped at 0."""
    return [
        [max(s.value - s.low, 0.0) for s in scores],
        [max(s.high - s.value, 0.0) for s in scores],
    ]


def _responses(findings: Findings, folder: Path) -> list[str]:
    """Score against value, one plot per varied key."""
    keys = sorted({key for line in findings.lines for key in line.setting.varied})
    names = []
    for key in keys:
        points = [line for line in findings.lines if key in line.setting.varied]
        values = [line.setting.varied[key] for line in points]
        if len({str(value) for value in values}) < 2:
            continue
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        places = values if numeric else [_escape(str(value)) for value in values]
        scores = [line.score for line in points]
        name = f"response-{key}"
        with _figure(folder, name, width=6) as axes:
            values_of = [s.value for s in scores]
            axes.errorbar(
                places,
                values_of,
                yerr=_error_bars(scores),
                fmt="o",
                color=_COLOURS[0],
                capsize=2,
                alpha=0.7,
            )
            means: dict[Any, list[float]] = {}
            for place, value in zip(places, values_of, strict=True):
                means.setdefault(place, []).append(value)
            if numeric and len(means) < len(points):  # a grid: also the mean over the other keys
                line = sorted((place, float(np.mean(found))) for place, found in means.items())
                axes.plot(*zip(*line, strict=True), color=_COLOURS[4], label="mean")
                axes.legend(frameon=False)
            axes.set_xlabel(key)
            axes.set_ylabel("score")
        names.append(name)
    return names


def _regimes(findings: Findings, folder: Path) -> str:
    """Shares of the regimes by setting."""
    settings = list(findings.digest.settings.values())
    with _figure(folder, "regimes", height=1.2 + 0.26 * len(settings)) as axes:
        left = np.zeros(len(settings))
        for regime in REGIMES:
            shares = np.array([100 * s.regimes[regime] / max(s.tokens, 1) for s in settings])
            names = [_escape(s.name) for s in settings]
            axes.barh(names, shares, left=left, color=_REGIME_COLOURS[regime], label=regime.upper())
            left += shares
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the tokens, %")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    return "regimes"


def _reliability(findings: Findings, folder: Path) -> str:
    """Mean score by the text's mean entropy."""
    with _figure(folder, "reliability", width=6) as axes:
        for number, (name, bins) in enumerate(findings.bins.items()):
            axes.plot(
                [b.mean for b in bins],
                [b.score for b in bins],
                marker=_MARKERS[number % len(_MARKERS)],
                color=_COLOURS[number % len(_COLOURS)],
                label=_escape(name),
            )
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("mean entropy of the text, bits (deciles)")
        axes.set_ylabel("mean score")
        axes.legend(frameon=False, fontsize=8)
    return "reliability"


def _truth(findings: Findings, folder: Path) -> str:
    """True entropy and the model's, by regime."""
    places = np.arange(len(findings.truth))
    with _figure(folder, "truth", width=6) as axes:
        true = [float(t.true_entropy.mean()) for t in findings.truth]
        model = [float(t.model_entropy.mean()) for t in findings.truth]
        axes.bar(places - 0.2, true, 0.4, color="#888888", label="true")
        axes.bar(places + 0.2, model, 0.4, color=_COLOURS[0], label="model's")
        axes.set_xticks(places, [t.regime.upper() for t in findings.truth])
        axes.set_ylabel("mean entropy, bits")
        axes.legend(frameon=False)
    return "truth"


@contextmanager
def _figure(folder: Path, name: str, *, width: float = 9.0, height: float = 4.5) -> Iterator[Any]:
    import matplotlib
    from matplotlib import pyplot

    # No window, and files that are the same from run to run.
    pyplot.switch_backend("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "entropix_jax"
    figure, axes = pyplot.subplots(figsize=(width, min(height, _MAX_HEIGHT)), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    try:
        yield axes
        metadata: Mapping[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}}
        for suffix, without_date in metadata.items():
            with replacing(folder / f"{name}.{suffix}") as scratch:
                figure.savefig(scratch, format=suffix, dpi=150, metadata=without_date)
    finally:
        pyplot.close(figure)


def _escape(name: str) -> str:
    """Escapes a name, so that matplotlib does not read `$` as mathematics."""
    return name.replace("$", r"\$")
