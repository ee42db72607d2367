"""Scores and measures by task, and the settings' differences from one or more baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from entropix_jax.lab.digest import TEXT_MEASURES, Digest
from entropix_jax.lab.statistics import (
    Bootstrap,
    Floats,
    Interval,
    joint_intervals,
    percentile_interval,
)

SCORE = "score"
ALL = "all scored tasks"

Resampled = tuple[float, Floats]  # a value, and the same of each resample


@dataclass(frozen=True)
class Family:
    """Scores or measures of all settings on one task, and differences to be judged together.

    Attributes:
        columns: the score, or the measures of a task without one: what settings are compared by.
        further: the measures of a task with a score, which are not compared.
        values: by setting and column; NaN where no text has the measure.
        over: by baseline, setting and column of `columns`: the paired difference from the baseline
            with its interval. For each baseline those of all settings and columns are joint.
    """

    task: str
    columns: tuple[str, ...]
    further: tuple[str, ...]
    values: Mapping[tuple[str, str], Interval]
    over: Mapping[str, Mapping[tuple[str, str], Interval]]

    @property
    def scored(self) -> bool:
        """Whether the settings are compared by a score."""
        return self.columns == (SCORE,)


@dataclass(frozen=True)
class Comparison:
    """All tasks together, if any has a score, and each of them."""

    baselines: tuple[str, ...]
    overall: Family | None
    tasks: tuple[Family, ...]

    @property
    def scored(self) -> list[Family]:
        """The tasks with a score; before several of them all of them together."""
        families = [family for family in self.tasks if family.scored]
        overall = self.overall
        return families if overall is None or len(families) == 1 else [overall, *families]


def compare(digest: Digest, baselines: Sequence[str]) -> Comparison:
    """Compares all settings with each baseline: by the score, or without one by the measures.

    The score of all tasks is the mean of those with a score.
    """
    scored = digest.scored()
    families = [_compare(digest, [task], baselines, scored=task in scored) for task in digest.tasks]
    overall = None
    if len(scored) == 1:
        overall = families[digest.tasks.index(scored[0])]
    elif scored:
        overall = _compare(digest, scored, baselines, scored=True)
    return Comparison(tuple(baselines), overall, tuple(families))


def _compare(
    digest: Digest, tasks: Sequence[str], baselines: Sequence[str], *, scored: bool
) -> Family:
    items = digest.items(tasks)
    bootstrap = Bootstrap([digest.strata[item] for item in items])
    settings = digest.settings
    own = dict.fromkeys((*(name for task in tasks for name in digest.own[task]), *TEXT_MEASURES))
    measures = [
        name for name in own if any(s.measure(name, items)[1].any() for s in settings.values())
    ]
    columns, further = ([SCORE], measures) if scored else (measures, [])
    if len(tasks) > 1:
        further = []  # texts of unlike tasks are not put together

    found: dict[tuple[str, str], Resampled] = {}
    for name, setting in settings.items():
        for column in (*columns, *further):
            if column == SCORE:
                parts, wholes = setting.score()[items], np.ones(len(items))
            else:
                parts, wholes = setting.measure(column, items)
            found[name, column] = bootstrap.ratio(parts, wholes)
    return Family(
        task=tasks[0] if len(tasks) == 1 else ALL,
        columns=tuple(columns),
        further=tuple(further),
        values={key: percentile_interval(*resampled) for key, resampled in found.items()},
        over={baseline: _over(found, settings, columns, baseline) for baseline in baselines},
    )


def _over(
    found: Mapping[tuple[str, str], Resampled],
    settings: Mapping[str, object],
    columns: Sequence[str],
    baseline: str,
) -> dict[tuple[str, str], Interval]:
    keys = [(name, column) for name in settings if name != baseline for column in columns]
    if not keys:
        return {}
    values = [found[key][0] - found[baseline, key[1]][0] for key in keys]
    each = np.stack([found[key][1] - found[baseline, key[1]][1] for key in keys])
    return dict(zip(keys, joint_intervals(values, each), strict=True))
