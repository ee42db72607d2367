"""The tables of scores, measures and differences by task, of the page of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from entropix_jax.lab.comparison import SCORE, Comparison, Family
from entropix_jax.lab.digest import SELF_BLEU, TEXT_MEASURES, Digest
from entropix_jax.lab.markdown import format_difference, format_estimate, format_name, format_table
from entropix_jax.lab.statistics import Interval

_COSTS = ("tokens", "forwards")


def format_tasks(comparison: Comparison, digest: Digest) -> str:
    """Scores and measures by task, then the differences from each baseline."""
    text = (
        "A score is a mean over seeds, then items; over all tasks, the mean of the scored ones. A "
        "measure is a sum over all texts over another, such as words over all words. Intervals "
        "are 95 % bootstrap intervals over items."
    )
    if any(SELF_BLEU in (*family.columns, *family.further) for family in comparison.tasks):
        text += (
            " Self-BLEU (Zhu et al. 2018) compares the samples of an item with each other; 1: all "
            "are the same."
        )
    parts = [f"## Tasks\n\n{text}"]
    if families := comparison.scored:
        rows = [
            [name, *(format_estimate(family.values[name, SCORE]) for family in families)]
            for name in digest.settings
        ]
        parts += [format_table(["setting", *(family.task for family in families)], rows)]
    for family in comparison.tasks:
        if measures := _shown(family):
            parts += [f"`{family.task}`:\n\n{_measures(family, measures, digest)}"]
    if len(digest.settings) > 1:
        parts += [_differences(comparison, digest, baseline) for baseline in comparison.baselines]
    return "\n\n".join(parts)


def _shown(family: Family) -> list[str]:
    """Of a scored task only its own measures, and the diversity of its samples."""
    if not family.scored:
        return [*family.columns]
    return [name for name in family.further if name not in TEXT_MEASURES or name == SELF_BLEU]


def _measures(family: Family, measures: Sequence[str], digest: Digest) -> str:
    items = digest.items([family.task])
    rows = [
        [
            name,
            *(format_estimate(family.values[name, column]) for column in measures),
            *(f"{setting.mean(cost, items):.1f}" for cost in _COSTS),
        ]
        for name, setting in digest.settings.items()
    ]
    return format_table(["setting", *map(format_name, measures), *_COSTS], rows)


def _differences(comparison: Comparison, digest: Digest, baseline: str) -> str:
    text = (
        "Paired differences. The intervals of a column of scores, or of all columns of a task "
        "without a score, are joint: in 95 % of studies all of them contain the true difference "
        "(max-t bootstrap), so that among many settings few seem better by chance. Without a "
        "verdict no difference is seen."
    )
    others = [name for name in digest.settings if name != baseline]
    parts = [f"## Differences from {baseline}\n\n{text}"]
    if families := comparison.scored:
        rows = [
            [name, *(_cell(family.over[baseline], name, SCORE) for family in families)]
            for name in others
        ]
        parts += [format_table(["setting", *(family.task for family in families)], rows)]
    for family in comparison.tasks:
        if family.columns and not family.scored:
            rows = [
                [name, *(_cell(family.over[baseline], name, column) for column in family.columns)]
                for name in others
            ]
            table = format_table(["setting", *map(format_name, family.columns)], rows)
            parts += [f"`{family.task}`:\n\n{table}"]
    return "\n\n".join(parts)


def _cell(over: Mapping[tuple[str, str], Interval], name: str, column: str) -> str:
    difference, verdict = format_difference(over[name, column])
    return f"{difference} **{verdict}**" if verdict in ("higher", "lower") else difference
