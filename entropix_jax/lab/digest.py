"""Aggregates of a study's rows by setting: scores, costs and measures per item, counts,
predictors."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from entropix_jax.lab.measures import self_bleu
from entropix_jax.lab.statistics import Floats, rotate
from entropix_jax.lab.votes import CHOICES, MAJORITY, VOTES, Sample

# Candidate predictors of errors: a higher value should mean an error.
PREDICTORS = ("mean_entropy", "max_entropy", "mean_varentropy", "max_varentropy", "perplexity")
_OF_ROWS = ("perplexity", "distinct_1", "distinct_2", "repetition")
SELF_BLEU = "self_bleu"
# Measures of any text, by which tasks without a score are compared besides their own.
TEXT_MEASURES = ("logprob", "distinct_1", "distinct_2", "repetition", SELF_BLEU)
KINDS = (*VOTES, *CHOICES)  # ways to one answer from several samples


@dataclass
class SettingDigest:
    """One setting's results on the I test items, in their order.

    `several[kind, k]` has the scores (NaN without one) and the forwards, [I] each, of k samples put
    to one answer, by each of `KINDS`. k = 1 is a single sample, and so is every k of a vote in a
    task without votes. Per-row lists are ordered by item, then seed.
    """

    name: str
    sampler: str
    varied: Mapping[str, Any]
    several: dict[tuple[str, int], tuple[list[float], list[float]]] = field(default_factory=dict)
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
    # Parts and wholes by measure and item, sums over seeds. A mean is parts over wholes.
    measures: dict[str, dict[int, tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def score(self, k: int = 1, kind: str = MAJORITY) -> Floats:
        """Scores [I] of k samples."""
        return np.asarray(self.several[kind, k][0])

    def cost(self, k: int = 1, kind: str = MAJORITY) -> Floats:
        """Forward passes [I] beyond the prompt of k samples."""
        return np.asarray(self.several[kind, k][1])

    def measure(self, name: str, items: Iterable[int] | None = None) -> tuple[Floats, Floats]:
        """Parts and wholes [n] of a measure on n items, by default all; 0 where there is none."""
        found = self.measures.get(name, {})
        of_items = [found.get(item, (0.0, 0.0)) for item in (found if items is None else items)]
        parts, wholes = np.array(of_items).reshape(-1, 2).T
        return parts, wholes

    def mean(self, name: str, items: Iterable[int] | None = None) -> float:
        """The mean of a measure over what has it; NaN if nothing has."""
        parts, wholes = self.measure(name, items)
        return float(parts.sum() / wholes.sum()) if wholes.any() else math.nan


@dataclass
class Digest:
    """Results by setting; `strata[I]` is each item's task as an index into `tasks`."""

    tasks: list[str]
    strata: list[int]
    settings: dict[str, SettingDigest]
    # The measures of each task's own, by its name.
    own: dict[str, list[str]] = field(default_factory=dict)
    free: set[str] = field(default_factory=set)  # tasks of free text, without votes

    def items(self, tasks: Iterable[str]) -> list[int]:
        """Indices of the items of some tasks."""
        chosen = {self.tasks.index(task) for task in tasks}
        return [item for item, task in enumerate(self.strata) if task in chosen]

    def scored(self) -> list[str]:
        """The tasks with a score for every item and setting."""
        missing = np.zeros(len(self.strata), bool)
        for setting in self.settings.values():
            missing |= np.isnan(setting.score())
        without = {self.tasks[self.strata[item]] for item in np.flatnonzero(missing)}
        return [task for task in self.tasks if task not in without]


def collect_digest(
    rows: Iterable[Mapping[str, Any]], votes: Mapping[str, bool], *, sizes: Sequence[int]
) -> Digest:
    """Aggregates the test rows of a study, which are ordered by item, then setting, then seed.

    Args:
        votes: by the task's name, whether a majority of its answers is meaningful.
        sizes: numbers of samples for one answer, ascending from 1.
    """
    digest = Digest([], [], {})
    for (task, _), of_item in groupby(rows, key=lambda row: (row["task"], row["item"])):
        if task not in digest.tasks:
            digest.tasks.append(task)
        digest.strata.append(digest.tasks.index(task))
        item = len(digest.strata) - 1
        own = digest.own.setdefault(task, [])
        if not votes[task]:
            digest.free.add(task)
        for name, of_setting in groupby(of_item, key=lambda row: row["setting"]):
            samples = list(of_setting)
            setting = digest.settings.setdefault(
                name, SettingDigest(name, samples[0]["sampler"], samples[0]["varied"])
            )
            _add_several(setting, samples, sizes, votes=votes[task])
            for row in samples:
                _add_row(setting, row, item)
                own += [name for name in row.get("measures", {}) if name not in own]
            if not votes[task] and len(samples) > 1:
                value = self_bleu([row["text"] for row in samples])
                if value is not None:
                    setting.measures[SELF_BLEU][item] = value, 1.0
    return digest


def _add_several(
    setting: SettingDigest,
    samples: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    *,
    votes: bool,
) -> None:
    voters = [
        Sample(
            row["answer"],
            row["forwards"],
            row["confidence_lows"],
            math.nan if row["score"] is None else row["score"],
            _logprob(row),
        )
        for row in samples
    ]
    # The winner of a vote is the answer of a sample, which has its score.
    score_of = {voter.answer: voter.score for voter in voters}

    def add(kind: str, k: int, results: Sequence[tuple[float, int]]) -> None:
        scores, forwards = setting.several.setdefault((kind, k), ([], []))
        scores.append(float(np.mean([score for score, _ in results])))
        forwards.append(float(np.mean([cost for _, cost in results])))

    for k in (k for k in sizes if k <= len(samples)):
        runs = rotate(voters, k)
        for kind, choose in CHOICES.items():
            add(kind, k, [choose(run) for run in runs])
        if not votes:
            runs = rotate(voters, 1)
        for kind, vote in VOTES.items():
            add(kind, k, [(score_of[answer], cost) for answer, cost in map(vote, runs)])


def _logprob(row: Mapping[str, Any]) -> float:
    """The mean ln p per token; -inf without tokens."""
    perplexity = row.get("perplexity")
    return -math.inf if perplexity is None else -math.log(perplexity)


def _add_row(setting: SettingDigest, row: Mapping[str, Any], item: int) -> None:
    setting.rows += 1
    setting.tokens += row["tokens"]
    setting.positions += row["forwards"]
    setting.retracted += row["retracted"]
    setting.regimes.update(row["regimes"])
    setting.actions.update(row["actions"])
    setting.finish[row["finish_reason"]] += 1
    for name, (part, whole) in _measures(row).items():
        parts, wholes = setting.measures[name].get(item, (0.0, 0.0))
        setting.measures[name][item] = parts + part, wholes + whole
    if row["score"] is not None and "mean_entropy" in row:
        setting.row_scores.append(row["score"])
        setting.row_items.append(item)
        for name in PREDICTORS:
            setting.predictors.setdefault(name, []).append(row[name])


def _measures(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """A row's measures as part and whole; the task's own before others of their names."""
    tokens = row["tokens"]
    found = {name: (row[name], 1.0) for name in _OF_ROWS if row.get(name) is not None}
    if "perplexity" in found:
        found["logprob"] = tokens * _logprob(row), tokens
    found["tokens"] = tokens, 1.0
    found["forwards"] = row["forwards"], 1.0
    found["seconds"] = row["timings"]["seconds"], tokens
    return found | {name: (part, whole) for name, (part, whole) in row.get("measures", {}).items()}
