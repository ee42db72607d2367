"""A study's figures as they are, without a word: `findings.json`, which its page is made of."""

from __future__ import annotations

import math
from typing import Any

from entropix_jax.names import FINDINGS_FORMAT
from entropix_jax.studies.digest import MEASURES, SettingDigest
from entropix_jax.studies.statistics import Interval
from entropix_jax.studies.summary import Findings, Line


def figures_of(findings: Findings) -> dict[str, Any]:
    """The findings in JSON's types; what is not a number is null.

    Items stand in the study's order. Of each setting `scores` and `forwards` are its items' own,
    the means over their seeds; `line` holds its figures over all of them with their intervals,
    null where nothing is scored.
    """
    digest = findings.digest
    lines = {line.setting.name: line for line in findings.lines}
    return {
        "format_version": FINDINGS_FORMAT,
        "tasks": digest.tasks,
        "baseline": findings.baseline,
        "items": [
            {"task": digest.tasks[task], "item": item}
            for task, item in zip(digest.strata, digest.items, strict=True)
        ],
        "settings": [
            _setting(one) | {"line": _line(findings, lines.get(one.name))}
            for one in digest.settings.values()
        ],
        "predictors": [
            {
                "setting": setting,
                "task": task,
                "auroc": {name: _interval(one) for name, one in found.items()},
            }
            for (setting, task), found in findings.predictors.items()
        ],
        "reliability": [
            {"setting": setting, "bins": [vars(one) for one in bins]}
            for setting, bins in findings.bins.items()
        ],
        "truth": [
            {
                "regime": truth.regime,
                "positions": truth.number,
                "true_entropy": float(truth.true_entropy.mean()),
                "model_entropy": float(truth.model_entropy.mean()),
                "entropy_error": truth.entropy_error,
                "true_varentropy": float(truth.true_varentropy.mean()),
                "model_varentropy": float(truth.model_varentropy.mean()),
                "varentropy_error": truth.varentropy_error,
            }
            for truth in findings.truth
        ],
        "tuned": [{**vars(one), "values": dict(one.values)} for one in findings.tuned],
    }


def _setting(one: SettingDigest) -> dict[str, Any]:
    return {
        "name": one.name,
        "sampler": one.sampler,
        "varied": dict(one.varied),
        "rows": one.rows,
        "tokens": one.tokens,
        "positions": one.positions,
        "errors": one.errors,
        "retracted": one.retracted,
        "regimes": dict(one.regimes),
        "actions": dict(one.actions),
        "finish": dict(one.finish),
        **{name: _number(one.measure(name)) for name in MEASURES},
        "scores": [_number(score) for score in one.scores[1]],
        "forwards": one.forwards[1],
    }


def _line(findings: Findings, line: Line | None) -> dict[str, Any] | None:
    if line is None:
        return None
    return {
        "score": _interval(line.score),
        "by_task": list(line.by_task),
        "forwards": line.cost,
        "over_baseline": _difference(line.over_baseline),
        "at_equal_forwards": _difference(line.at_equal_cost),
        "over_base": _difference(line.over_base),
        "votes": [
            {"samples": k, "forwards": cost, "score": _interval(score)}
            for k, (cost, score) in zip(
                findings.sizes, findings.votes[line.setting.name], strict=True
            )
        ],
    }


def _difference(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else _interval(interval) | {"verdict": interval.verdict}


def _interval(interval: Interval) -> dict[str, Any]:
    return {name: _number(value) for name, value in vars(interval).items()}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
