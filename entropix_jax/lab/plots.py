"""Plots of a study's results, each as PNG and SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from entropix_jax.errors import require
from entropix_jax.lab.figures import COLOURS, MARKERS, error_bars, escape, figure, point
from entropix_jax.lab.findings import Findings
from entropix_jax.lab.task_plots import draw_differences, draw_trade_offs
from entropix_jax.lab.votes import MAJORITY
from entropix_jax.names import REGIMES

_REGIME_COLOURS = dict(
    zip(REGIMES, ("#56B4E9", "#009E73", "#E69F00", "#D55E00", "#BBBBBB"), strict=True)
)


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
        names += draw_differences(findings, folder)
        names += draw_trade_offs(findings, folder)
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
    with figure(folder, "scores", height=max(4.5, 0.24 * len(lines))) as axes:
        for number, line in enumerate(lines):
            point(axes, number, line.setting.name, line.cost, line.score)
        if votes := findings.several.get((findings.baseline, MAJORITY)):
            costs = [cost for cost, _ in votes]
            values = [score.value for _, score in votes]
            bounds = [score.low for _, score in votes], [score.high for _, score in votes]
            label = escape(f"majorities of {findings.baseline} samples")
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
        places = values if numeric else [escape(str(value)) for value in values]
        scores = [line.score for line in points]
        name = f"response-{key}"
        with figure(folder, name, width=6) as axes:
            values_of = [s.value for s in scores]
            axes.errorbar(
                places,
                values_of,
                yerr=error_bars(scores),
                fmt="o",
                color=COLOURS[0],
                capsize=2,
                alpha=0.7,
            )
            means: dict[Any, list[float]] = {}
            for place, value in zip(places, values_of, strict=True):
                means.setdefault(place, []).append(value)
            if numeric and len(means) < len(points):  # a grid: also the mean over the other keys
                line = sorted((place, float(np.mean(found))) for place, found in means.items())
                axes.plot(*zip(*line, strict=True), color=COLOURS[4], label="mean")
                axes.legend(frameon=False)
            axes.set_xlabel(key)
            axes.set_ylabel("score")
        names.append(name)
    return names


def _regimes(findings: Findings, folder: Path) -> str:
    """Shares of the regimes by setting."""
    settings = list(findings.digest.settings.values())
    with figure(folder, "regimes", height=1.2 + 0.26 * len(settings)) as axes:
        left = np.zeros(len(settings))
        for regime in REGIMES:
            shares = np.array([100 * s.regimes[regime] / max(s.tokens, 1) for s in settings])
            names = [escape(s.name) for s in settings]
            axes.barh(names, shares, left=left, color=_REGIME_COLOURS[regime], label=regime.upper())
            left += shares
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of the tokens, %")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    return "regimes"


def _reliability(findings: Findings, folder: Path) -> str:
    """Mean score by the text's mean entropy."""
    with figure(folder, "reliability", width=6) as axes:
        for number, (name, bins) in enumerate(findings.bins.items()):
            axes.plot(
                [b.mean for b in bins],
                [b.score for b in bins],
                marker=MARKERS[number % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                label=escape(name),
            )
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("mean entropy of the text, bits (deciles)")
        axes.set_ylabel("mean score")
        axes.legend(frameon=False, fontsize=8)
    return "reliability"


def _truth(findings: Findings, folder: Path) -> str:
    """True entropy and the model's, by regime."""
    places = np.arange(len(findings.truth))
    with figure(folder, "truth", width=6) as axes:
        true = [float(t.true_entropy.mean()) for t in findings.truth]
        model = [float(t.model_entropy.mean()) for t in findings.truth]
        axes.bar(places - 0.2, true, 0.4, color="#888888", label="true")
        axes.bar(places + 0.2, model, 0.4, color=COLOURS[0], label="model's")
        axes.set_xticks(places, [t.regime.upper() for t in findings.truth])
        axes.set_ylabel("mean entropy, bits")
        axes.legend(frameon=False)
    return "truth"
