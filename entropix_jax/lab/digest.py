"""Aggregates of a study's rows by setting: scores and costs per item, counts, predictors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from entropix_jax.lab.statistics import Floats, rotate
from entropix_jax.lab.tasks.task import Item, Task
from entropix_jax.lab.votes import MAJORITY, VOTES, Sample

# Candidate predictors of errors: a higher value should mean an error.
PREDICTORS = ("mean_entropy", "max_entropy", "mean_varentropy", "max_varentropy", "perplexity")
MEASURES = ("perplexity", "distinct_1", "distinct_2", "repetition")


@dataclass
class SettingDigest:
    """One setting's results on the I test items, in their order.

    `votes[vote, k]` has the scores and the forwards, [I] each, of votes of k samples, of each kind
    in `VOTES`; k = 1, and every k in a task without votes, is a single sample. Per-row lists are
    ordered by item, then seed.
    """

    name: str
    sampler: str
    varied: Mapping[str, Any]
    votes: dict[tuple[str, int], tuple[list[float], list[float]]] = field(default_factory=dict)
    tokens: int = 0
    positions: int = 0  # forward passes of all rows
    rows: int = 0
    retracted: int = 0
    regimes: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    finish: Counter[str] = field(default_factory=Counter)
    predictors: dict[str, list[float]] = field(default_factory=dict)
    # Scores and item indices of the rows in `predictors`: those with a score and tokens.
    row_scores: list[float] = field(default_factory=list)
    row_items: list[int] = field(default_factory=list)
    measures: dict[str, list[float]] = field(default_factory=dict)  # sum and count

    def score(self, k: int = 1, vote: str = MAJORITY) -> Floats:
        """Scores [I] of votes of k samples."""
        return np.asarray(self.votes[vote, k][0])

    def cost(self, k: int = 1, vote: str = MAJORITY) -> Floats:
        """Forward passes [I] beyond the prompt of votes of k samples."""
        return np.asarray(self.votes[vote, k][1])

    def measure(self, name: str) -> float:
        """The mean of a measure over the rows that have it; NaN if none has."""
        total, number = self.measures.get(name, (0.0, 0.0))
        return total / number if number else float("nan")


@dataclass
class Digest:
    """Results by setting; `strata[I]` is each item's task as an index into `tasks`."""

    tasks: list[str]
    strata: list[int]
    settings: dict[str, SettingDigest]


def collect_digest(
    rows: Iterable[Mapping[str, Any]],
    judge: Mapping[str, tuple[Task, Mapping[str, Item]]],
    *,
    sizes: Sequence[int],
) -> Digest:
    """Aggregates the test rows of a study, which are ordered by item, then setting, then seed.

    Args:
        judge: each task and its items by id, by the task's name; scores the votes.
        sizes: numbers of samples per vote, ascending from 1.
    """
    digest = Digest([], [], {})
    for (task_name, item_id), of_item in groupby(rows, key=lambda row: (row["task"], row["item"])):
        if task_name not in digest.tasks:
            digest.tasks.append(task_name)
        digest.strata.append(digest.tasks.index(task_name))
        task, items = judge[task_name]
        for name, of_setting in groupby(of_item, key=lambda row: row["setting"]):
            samples = list(of_setting)
            setting = digest.settings.setdefault(
                name, SettingDigest(name, samples[0]["sampler"], samples[0]["varied"])
            )
            _add_votes(setting, samples, task, items[item_id], sizes)
            for row in samples:
                _add_row(setting, row, len(digest.strata) - 1)
    return digest


def _add_votes(
    setting: SettingDigest,
    samples: Sequence[Mapping[str, Any]],
    task: Task,
    item: Item,
    sizes: Sequence[int],
) -> None:
    voters = [Sample(row["answer"], row["forwards"], row["confidence_lows"]) for row in samples]
    score_of = {voter.answer: task.score(item, voter.answer) for voter in voters}
    for k in sizes:
        runs = rotate(voters, k if task.votes else 1)
        for name, vote in VOTES.items() if k <= len(samples) else ():
            answers, costs = zip(*map(vote, runs), strict=True)
            scores, forwards = setting.votes.setdefault((name, k), ([], []))
            scores.append(float(np.mean([score_of[answer] for answer in answers])))
            forwards.append(float(np.mean(costs)))


def _add_row(setting: SettingDigest, row: Mapping[str, Any], item: int) -> None:
    setting.rows += 1
    setting.tokens += row["tokens"]
    setting.positions += row["forwards"]
    setting.retracted += row["retracted"]
    setting.regimes.update(row["regimes"])
    setting.actions.update(row["actions"])
    setting.finish[row["finish_reason"]] += 1
    for name in MEASURES:
        if (value := row.get(name)) is not None:
            total = setting.measures.setdefault(name, [0.0, 0.0])
            total[0] += value
            total[1] += 1
    if row["score"] is not None and "mean_entropy" in row:
        setting.row_scores.append(row["score"])
        setting.row_items.append(item)
        for name in PREDICTORS:
            setting.predictors.setdefault(name, []).append(row[name])
