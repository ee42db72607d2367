"""A study's results in a few arrays: scores and costs by setting and item, shares, predictors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from entropix_jax.studies.statistics import Floats, votes
from entropix_jax.tasks.task import Item, Task

# What a predictor of errors may go by; of all of them a higher value is to mean an error.
PREDICTORS = ("mean_entropy", "max_entropy", "mean_varentropy", "max_varentropy", "perplexity")
MEASURES = ("perplexity", "distinct_1", "distinct_2", "repetition")


@dataclass
class SettingDigest:
    """One setting's results on the test items, in their order.

    `scores[k]` and `forwards[k]`, each [I], are of a vote of k samples; k = 1 is a sample alone, as
    is any k in a task whose answers cannot be voted on. Rows are item by item, seed by seed.
    """

    name: str
    sampler: str
    varied: Mapping[str, Any]
    scores: dict[int, list[float]] = field(default_factory=dict)
    forwards: dict[int, list[float]] = field(default_factory=dict)
    tokens: int = 0
    positions: int = 0  # forwards of all rows
    rows: int = 0
    retracted: int = 0
    regimes: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    finish: Counter[str] = field(default_factory=Counter)
    predictors: dict[str, list[float]] = field(default_factory=dict)
    right: list[float] = field(default_factory=list)  # of the rows that predictors know
    row_items: list[int] = field(default_factory=list)  # and the numbers of their items
    measures: dict[str, list[float]] = field(default_factory=dict)  # sum and number

    def score(self, k: int = 1) -> Floats:
        """[I]."""
        return np.asarray(self.scores[k])

    def cost(self, k: int = 1) -> Floats:
        """[I], forward passes beyond the prompt."""
        return np.asarray(self.forwards[k])

    def measure(self, name: str) -> float:
        """The mean of a measure over the rows that have it; NaN where none has."""
        total, number = self.measures.get(name, (0.0, 0.0))
        return total / number if number else float("nan")


@dataclass
class Digest:
    """All settings, and the task of each item as an index into `tasks`."""

    tasks: list[str]
    strata: list[int]
    settings: dict[str, SettingDigest]


def digest_of(
    rows: Iterable[Mapping[str, Any]],
    judge: Mapping[str, tuple[Task, Mapping[str, Item]]],
    *,
    sizes: Sequence[int],
) -> Digest:
    """Goes through the test rows of a study, which come item by item, setting by setting.

    Args:
        judge: by name, each task and its items by id: who scores a vote.
        sizes: how many samples vote, in order; 1 is always among them.
    """
    found = Digest([], [], {})
    for (task_name, item_id), of_item in groupby(rows, key=lambda row: (row["task"], row["item"])):
        if task_name not in found.tasks:
            found.tasks.append(task_name)
        found.strata.append(found.tasks.index(task_name))
        task, items = judge[task_name]
        for name, of_setting in groupby(of_item, key=lambda row: row["setting"]):
            samples = list(of_setting)
            one = found.settings.setdefault(
                name, SettingDigest(name, samples[0]["sampler"], samples[0]["varied"])
            )
            _add_votes(one, samples, task, items[item_id], sizes)
            for row in samples:
                _add_row(one, row, len(found.strata) - 1)
    return found


def _add_votes(
    one: SettingDigest,
    samples: Sequence[Mapping[str, Any]],
    task: Task,
    item: Item,
    sizes: Sequence[int],
) -> None:
    answers = [row["answer"] for row in samples]
    forwards = float(np.mean([row["forwards"] for row in samples]))
    for k in sizes:
        if k > len(samples):
            continue
        asked = k if task.votes else 1  # one sample is all that is bought where no vote is
        scores = [task.score(item, answer) for answer in votes(answers, asked)]
        one.scores.setdefault(k, []).append(float(np.mean(scores)))
        one.forwards.setdefault(k, []).append(asked * forwards)


def _add_row(one: SettingDigest, row: Mapping[str, Any], item: int) -> None:
    one.rows += 1
    one.tokens += row["tokens"]
    one.positions += row["forwards"]
    one.retracted += row["retracted"]
    one.regimes.update(row["regimes"])
    one.actions.update(row["actions"])
    one.finish[row["finish_reason"]] += 1
    for name in MEASURES:
        if (value := row.get(name)) is not None:
            total = one.measures.setdefault(name, [0.0, 0.0])
            total[0] += value
            total[1] += 1
    if row["score"] is not None and "mean_entropy" in row:
        one.right.append(row["score"])
        one.row_items.append(item)
        for name in PREDICTORS:
            one.predictors.setdefault(name, []).append(row[name])
