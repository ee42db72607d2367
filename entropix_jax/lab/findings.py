"""A study's findings: numbers with intervals, from the aggregates of its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropix_jax.lab.comparison import SCORE, Comparison, compare
from entropix_jax.lab.digest import KINDS, PREDICTORS, Digest, SettingDigest
from entropix_jax.lab.statistics import Bin, Bootstrap, Interval, auroc_interval, reliability
from entropix_jax.lab.truth import Truth
from entropix_jax.lab.votes import MAJORITY

# By setting and kind of `KINDS`: cost in forward passes and score of each number of samples.
Several = Mapping[tuple[str, str], tuple[tuple[float, Interval], ...]]


@dataclass(frozen=True)
class Tuned:
    """The result of tuning one sampler."""

    sampler: str
    candidates: int
    score: float  # of the best candidate, on the tuning split
    default_score: float  # of the unchanged sampler
    values: Mapping[str, Any]  # that the best candidate changes


@dataclass(frozen=True)
class Line:
    """One setting's row of the table of scores."""

    setting: SettingDigest
    score: Interval
    cost: float  # forward passes, averaged like the score
    over_baseline: Interval | None  # joint for all settings; None for the baseline itself
    over_base: Interval | None  # over the setting that it is a change of, if it is one
    at_equal_cost: Interval | None  # over majority votes of the baseline


@dataclass(frozen=True)
class Findings:
    """The results of a study, with intervals."""

    digest: Digest
    baseline: str
    sizes: tuple[int, ...]  # numbers of samples for one answer
    comparison: Comparison
    lines: tuple[Line, ...]  # over the scored tasks; empty without one
    several: Several  # over the scored tasks
    several_by_task: Mapping[str, Several]  # of each scored task
    predictors: Mapping[tuple[str, str], Mapping[str, Interval]]  # AUROCs by setting and task
    bins: Mapping[str, list[Bin]]  # of the mean entropy, by setting
    truth: tuple[Truth, ...]
    tuned: tuple[Tuned, ...]


def analyse_digest(
    digest: Digest,
    baselines: Sequence[str],
    bases: Mapping[str, str],
    sizes: Sequence[int],
    watched: Sequence[str],
    truth: Sequence[Truth] = (),
    tuned: Sequence[Tuned] = (),
) -> Findings:
    """Computes a study's findings.

    Args:
        baselines: the settings that the others are compared with by task; the first one also by
            several of its samples at equal forwards.
        bases: for each setting that is a change of another one, the other one.
        sizes: numbers of samples for one answer.
        watched: the settings whose predictors of errors are evaluated.
    """
    base = digest.settings[baselines[0]]
    comparison = compare(digest, baselines)
    scored = digest.scored()
    items = digest.items(scored)
    lines: list[Line] = []
    several: Several = {}
    by_task: dict[str, Several] = {}

    # Scores: each setting alone, against the baseline, and against the baseline's votes.
    if comparison.overall is not None:
        bootstrap = Bootstrap([digest.strata[item] for item in items])
        sizes = [k for k in sizes if (MAJORITY, k) in base.several]
        curve = np.stack([base.score(k)[items] for k in sizes])
        costs = np.stack([base.cost(k)[items] for k in sizes])
        over_baseline = comparison.overall.over[base.name]
        for name, setting in digest.settings.items():
            score, cost = setting.score()[items], setting.cost()[items]
            over_base = at_equal_cost = None
            if setting is not base and len(sizes) > 1:
                at_equal_cost = bootstrap.over_curve(costs, curve, cost, score)
            if name in bases:
                over_base = bootstrap.estimate(score - digest.settings[bases[name]].score()[items])
            lines.append(
                Line(
                    setting=setting,
                    score=comparison.overall.values[name, SCORE],
                    cost=bootstrap.mean(cost),
                    over_baseline=over_baseline.get((name, SCORE)),
                    over_base=over_base,
                    at_equal_cost=at_equal_cost,
                )
            )
        if len(sizes) > 1:
            several = _several(digest, scored, sizes)
            by_task = {scored[0]: several}
            if len(scored) > 1:
                by_task = {task: _several(digest, [task], sizes) for task in scored}

    # Predictors of errors, over all scored tasks and within each.
    predictors: dict[tuple[str, str], dict[str, Interval]] = {}
    bins: dict[str, list[Bin]] = {}
    for name in watched if scored else ():
        setting = digest.settings[name]
        of_rows = np.asarray(setting.row_items, np.int64)
        scores = np.asarray(setting.row_scores)
        parts = {task: np.isin(of_rows, digest.items([task])) for task in scored}
        for task, part in {"all": np.isin(of_rows, items), **parts}.items():
            wrong = scores[part] < 1
            if len(np.unique(wrong)) < 2:
                continue  # all right or all wrong: nothing to predict
            predictors[name, task] = {
                key: auroc_interval(np.asarray(setting.predictors[key])[part], wrong, of_rows[part])
                for key in PREDICTORS
            }
        if (name, "all") in predictors:
            part = np.isin(of_rows, items)
            entropies = np.asarray(setting.predictors["mean_entropy"])
            bins[name] = reliability(entropies[part], scores[part])
    return Findings(
        digest=digest,
        baseline=base.name,
        sizes=tuple(sizes),
        comparison=comparison,
        lines=tuple(lines),
        several=several,
        several_by_task=by_task,
        predictors=predictors,
        bins=bins,
        truth=tuple(truth),
        tuned=tuple(tuned),
    )


def _several(digest: Digest, tasks: Sequence[str], sizes: Sequence[int]) -> Several:
    items = digest.items(tasks)
    bootstrap = Bootstrap([digest.strata[item] for item in items])
    several: dict[tuple[str, str], tuple[tuple[float, Interval], ...]] = {}
    for name, setting in digest.settings.items():
        for kind in KINDS:
            costs = [bootstrap.mean(setting.cost(k, kind)[items]) for k in sizes]
            scores = np.stack([setting.score(k, kind)[items] for k in sizes])
            several[name, kind] = tuple(zip(costs, bootstrap.estimates(scores), strict=True))
    return several
