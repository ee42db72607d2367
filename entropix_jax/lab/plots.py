"""Plots of a study's findings, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from entropix_jax.host.files import replacing
from entropix_jax.lab.findings import SCORE, Findings
from entropix_jax.lab.statistics import NOT_SIGNIFICANT, Interval
from entropix_jax.lab.votes import MAJORITY

# Okabe and Ito's colour-blind safe palette.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")
MARKERS = "osD^vP*X"
_MAX_HEIGHT = 400.0  # inches; matplotlib limits a PNG to 2^16 rows of pixels


def draw_plots(findings: Findings, folder: Path) -> list[str]:
    """Draws the plots for which the findings have data, and returns their names without suffixes.

    The folder is created if it is missing.

    Raises:
        UserError: a file cannot be written.
    """
    if not findings.overall:
        return []
    return [
        _scores(findings, folder),
        *_differences(findings, folder),
        *_responses(findings, folder),
    ]


@contextmanager
def _figure(
    folder: Path, name: str, *, width: float = 9.0, height: float = 4.5, panels: int = 1
) -> Iterator[list[Any]]:
    """Yields axes side by side with one vertical axis, and then writes `name.png` and `name.svg`.
    Their background is white, so that they are legible on any page."""
    import matplotlib
    from matplotlib import pyplot

    # No window, files that are the same from run to run, and no mathematics in a name with `$`.
    pyplot.switch_backend("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "entropix_jax", "text.parse_math": False})
    size = (width, min(height, _MAX_HEIGHT))
    drawn, axes = pyplot.subplots(
        1, panels, figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    for one in axes[0]:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
        one.set_axisbelow(True)
    try:
        yield [*axes[0]]
        metadata: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None}}
        for suffix, without_date in metadata.items():
            with replacing(folder / f"{name}.{suffix}") as scratch:
                drawn.savefig(scratch, format=suffix, dpi=150, metadata=without_date)
    finally:
        pyplot.close(drawn)


def error_bars(scores: Sequence[Interval]) -> list[list[float]]:
    """Returns the lengths [2, n] of the error bars, down and up, clipped at 0 because a percentile
    interval need not contain the value."""
    return [
        [max(s.value - s.low, 0.0) for s in scores],
        [max(s.high - s.value, 0.0) for s in scores],
    ]


def _overall(findings: Findings) -> pd.Series:
    """The scores over all scored tasks, by setting."""
    values = findings.values
    chosen = values[(values["task"] == findings.overall) & (values["measure"] == SCORE)]
    return chosen.set_index("setting")["estimate"]


def _scores(findings: Findings, folder: Path) -> str:
    """Score against forward passes; majority votes of the baseline as a line."""
    scores, several = findings.scores, findings.several
    estimates = _overall(findings)
    with _figure(folder, "scores", height=max(4.5, 0.24 * len(scores))) as (axes,):
        for number, (name, cost) in enumerate(
            zip(scores["setting"], scores["forwards"], strict=True)
        ):
            axes.errorbar(
                cost,
                estimates[name].value,
                yerr=error_bars([estimates[name]]),
                fmt=MARKERS[number // len(COLOURS) % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                label=name,
                capsize=2,
                markersize=5,
                linewidth=1,
            )
        if len(several):
            groups = several.groupby(["task", "setting", "kind"])
            votes = groups.get_group((findings.overall, findings.baselines[0], MAJORITY))
            label = f"majorities of {findings.baselines[0]} samples"
            style, estimates = {"color": "#888888"}, [*votes["estimate"]]
            low, high = [e.low for e in estimates], [e.high for e in estimates]
            axes.plot(votes["forwards"], [e.value for e in estimates], label=label, **style)
            axes.fill_between(votes["forwards"], low, high, alpha=0.15, linewidth=0, **style)
        if scores["forwards"].all():  # a logarithmic axis has no 0
            axes.set_xscale("log", subs=[2, 3, 5])
        for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            axis("{x:g}")
        axes.set_xlabel("forward passes per answer, beyond the prompt")
        axes.set_ylabel("score")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    return "scores"


def _differences(findings: Findings, folder: Path) -> list[str]:
    """A forest plot for each baseline: settings as rows, a panel for each scored task."""
    names: list[str] = []
    found = findings.differences[findings.differences["measure"] == SCORE]
    for baseline, own in found.groupby("baseline", sort=False):
        tasks = [*own.groupby("task", sort=False)]
        rows = [*own["setting"].unique()]
        names.append(f"differences-{len(names) + 1}" if names else "differences")
        width, height = 2.2 + 2.4 * len(tasks), 1.3 + 0.24 * len(rows)
        with _figure(folder, names[-1], width=width, height=height, panels=len(tasks)) as panels:
            for panel, (task, of_task) in zip(panels, tasks, strict=True):
                _forest(panel, of_task)
                panel.set_title(task, fontsize=9)
            panels[0].set_yticks(range(len(rows)), rows, fontsize=8)
            panels[0].invert_yaxis()
            label = f"score over {baseline}, joint 95 % intervals"
            panels[0].figure.supxlabel(label, fontsize=9)
    return names


def _forest(axes: Any, differences: pd.DataFrame) -> None:
    """Draws points, filled if the difference is significant."""
    axes.axvline(0, color="#000000", linewidth=0.8)
    for place, (over, verdict) in enumerate(
        zip(differences["estimate"], differences["verdict"], strict=True)
    ):
        seen = verdict != NOT_SIGNIFICANT
        axes.errorbar(
            over.value,
            place,
            xerr=error_bars([over]),
            fmt="o",
            color=COLOURS[0] if seen else "#808080",
            markerfacecolor=COLOURS[0] if seen else "white",
            markersize=4.5,
            capsize=2,
            linewidth=1.2,
        )
    axes.tick_params(axis="x", labelsize=8)
    axes.locator_params(axis="x", nbins=4)


def _responses(findings: Findings, folder: Path) -> list[str]:
    """Score against value, one plot per varied key."""
    varied = findings.rows.drop_duplicates("setting").set_index("setting")["varied"]
    scores = _overall(findings)
    names = []
    for key in sorted({key for values in varied for key in values}):
        points = pd.DataFrame(
            [(own[key], scores[name]) for name, own in varied.items() if key in own],
            columns=["place", "score"],
        )
        if points["place"].map(str).nunique() < 2:
            continue
        numeric = all(type(place) in (int, float) for place in points["place"])
        if not numeric:
            points["place"] = points["place"].map(str)
        values = points["score"].map(lambda score: score.value)
        names.append(f"response-{key}")
        with _figure(folder, names[-1], width=6) as (axes,):
            bars = error_bars(points["score"])
            style = {"fmt": "o", "color": COLOURS[0], "capsize": 2, "alpha": 0.7}
            axes.errorbar(points["place"], values, yerr=bars, **style)
            means = values.groupby(points["place"]).mean()
            if numeric and len(means) < len(points):  # a grid: also the mean over the other keys
                axes.plot(means.index, means, color=COLOURS[4], label="mean")
                axes.legend(frameon=False)
            axes.set_xlabel(key)
            axes.set_ylabel("score")
    return names
