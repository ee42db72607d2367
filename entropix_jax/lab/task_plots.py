"""Plots of a study by task: differences from a baseline, and scores against repetition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entropix_jax.lab.comparison import SCORE, Family
from entropix_jax.lab.figures import COLOURS, error_bars, escape, figure, point
from entropix_jax.lab.findings import Findings
from entropix_jax.lab.markdown import format_name

_SEEN, _UNSEEN = COLOURS[0], "#808080"
# What the score is drawn against: the first of these that a task without a score has.
_AGAINST = ("repeated_4grams", "repetition")


def draw_differences(findings: Findings, folder: Path) -> list[str]:
    """A forest plot for each baseline: settings as rows, a panel for each scored task."""
    comparison = findings.comparison
    families = comparison.scored
    names: list[str] = []
    for number, baseline in enumerate(comparison.baselines, 1):
        rows = [name for name in findings.digest.settings if name != baseline]
        if not (families and rows):
            continue
        names.append("differences" if number == 1 else f"differences-{number}")
        width, height = 2.2 + 2.4 * len(families), 1.3 + 0.24 * len(rows)
        with figure(folder, names[-1], width=width, height=height, panels=len(families)) as axes:
            panels = [axes] if len(families) == 1 else list(axes)
            for panel, family in zip(panels, families, strict=True):
                _forest(panel, family, baseline, rows)
            panels[0].set_yticks(range(len(rows)), [escape(name) for name in rows], fontsize=8)
            panels[0].invert_yaxis()
            panels[0].figure.supxlabel(
                escape(f"score over {baseline}, joint 95 % intervals"), fontsize=9
            )
    return names


def _forest(axes: Any, family: Family, baseline: str, rows: Sequence[str]) -> None:
    """Filled where a difference is seen."""
    axes.axvline(0, color="#000000", linewidth=0.8)
    for place, name in enumerate(rows):
        over = family.over[baseline][name, SCORE]
        seen = over.verdict in ("higher", "lower")
        axes.errorbar(
            over.value,
            place,
            xerr=error_bars([over]),
            fmt="o",
            color=_SEEN if seen else _UNSEEN,
            markerfacecolor=_SEEN if seen else "white",
            markersize=4.5,
            capsize=2,
            linewidth=1.2,
        )
    axes.set_title(escape(family.task), fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.locator_params(axis="x", nbins=4)


def draw_trade_offs(findings: Findings, folder: Path) -> list[str]:
    """The score of all scored tasks against the repetition in each task without a score."""
    overall = findings.comparison.overall
    names: list[str] = []
    settings = [*findings.digest.settings]
    for family in findings.comparison.tasks:
        measure = next((name for name in _AGAINST if name in family.columns), None)
        if measure is None or overall is None:
            continue
        names.append(f"quality-{len(names) + 1}" if names else "quality")
        with figure(folder, names[-1], height=max(4.5, 0.24 * len(settings))) as axes:
            for number, name in enumerate(settings):
                against = family.values[name, measure]
                if not math.isnan(against.value):
                    score = overall.values[name, SCORE]
                    label = f"{number + 1}  {name}"
                    point(axes, number, label, against.value, score, against)
                    place = (against.value, score.value)
                    axes.annotate(number + 1, place, (4, 4), textcoords="offset points", fontsize=8)
            axes.set_xlabel(escape(f"{format_name(measure)} in {family.task}"))
            axes.set_ylabel(escape(f"score, {overall.task}"))
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    return names
