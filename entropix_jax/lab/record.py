"""A study's findings as JSON values, for `findings.json`."""

from __future__ import annotations

import math
from typing import Any

from entropix_jax.lab.comparison import Family
from entropix_jax.lab.digest import Digest
from entropix_jax.lab.findings import Findings, Several
from entropix_jax.lab.statistics import Interval


def record_findings(findings: Findings) -> dict[str, Any]:
    """All numbers of the tables by task, of several samples and of the predictors of error.

    An interval is `{value, low, high}`, a difference has a `verdict`, too; null is what no text
    has.
    """
    digest, comparison = findings.digest, findings.comparison
    unscored = [family for family in comparison.tasks if not family.scored]
    return {
        "baselines": [*comparison.baselines],
        "tasks": [_record_family(family, digest) for family in [*comparison.scored, *unscored]],
        "several_samples": {
            "sizes": [*findings.sizes],
            "overall": _record_several(findings.several),
            "tasks": {
                task: _record_several(several) for task, several in findings.several_by_task.items()
            },
        },
        "at_equal_forwards": {
            line.setting.name: _record_difference(line.at_equal_cost)
            for line in findings.lines
            if line.at_equal_cost is not None
        },
        "predictors": [
            {
                "setting": name,
                "task": task,
                "auroc": {key: _record_interval(found) for key, found in aurocs.items()},
            }
            for (name, task), aurocs in findings.predictors.items()
        ],
    }


def _record_family(family: Family, digest: Digest) -> dict[str, Any]:
    items = digest.items([family.task] if family.task in digest.tasks else digest.scored())
    names = (*family.columns, *family.further)
    settings = {}
    for name, setting in digest.settings.items():
        over = {
            baseline: {
                column: _record_difference(differences[name, column]) for column in family.columns
            }
            for baseline, differences in family.over.items()
            if baseline != name
        }
        settings[name] = {
            "values": {column: _record_interval(family.values[name, column]) for column in names},
            "over": over,
            "tokens": _number(setting.mean("tokens", items)),
            "forwards": _number(setting.mean("forwards", items)),
            # Of a row among others in its batch: depends on the hardware and the rows beside it.
            "seconds_per_token": _number(setting.mean("seconds", items)),
        }
    return {
        "task": family.task,
        "items": len(items),
        "compared_by": [*family.columns],
        "comparisons": len(family.columns) * (len(digest.settings) - 1),
        "settings": settings,
    }


def _record_several(several: Several) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By setting and kind: forwards and score of each size."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for (name, kind), curve in several.items():
        found.setdefault(name, {})[kind] = [
            {"forwards": _number(cost), "score": _record_interval(score)} for cost, score in curve
        ]
    return found


def _record_interval(interval: Interval) -> dict[str, Any]:
    return {key: _number(getattr(interval, key)) for key in ("value", "low", "high")}


def _record_difference(interval: Interval) -> dict[str, Any]:
    verdict = None if math.isnan(interval.value) else interval.verdict
    return {**_record_interval(interval), "verdict": verdict}


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
