"""A study's findings: means and differences with intervals, as data frames."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from entropix_jax.lab.measures import self_bleu
from entropix_jax.lab.results import own_measures
from entropix_jax.lab.statistics import (
    Bootstrap,
    Floats,
    Resampled,
    joint_intervals,
    over_curve,
    percentile_interval,
)
from entropix_jax.lab.sweep import Comparison
from entropix_jax.lab.uncertainty import evaluate
from entropix_jax.lab.votes import KINDS, MAJORITY, VOTES, Sample, rotate

SCORE = "score"
ALL = "all scored tasks"
SELF_BLEU = "self_bleu"
# Measures of any text, by which tasks without a score are compared besides their own.
TEXT_MEASURES = ("logprob", "distinct_1", "distinct_2", "repetition", SELF_BLEU)
_MEANS = (SCORE, "perplexity", "distinct_1", "distinct_2", "repetition")  # over texts


@dataclass(frozen=True)
class Findings:
    """The results of a study.

    The rows of each frame are in the study's order. An `estimate` is an `Interval`. If there are
    several scored tasks, the task `ALL` stands for all of them and comes first.

    Attributes:
        rows: the frame of `results.read_results`.
        baselines: the settings that the others are compared with.
        sizes: numbers of samples for one answer.
        free: tasks with free text, without votes.
        overall: `ALL`, or the only scored task; None without one.
        means: by setting, of each measure over all texts.
        costs: task, setting, tokens and forwards.
        values: task, setting, measure, estimate. `compared` marks the measures that a task is
            compared by: its score, or all its measures if it has none.
        differences: task, baseline, setting, measure, estimate, verdict. Intervals of one task and
            baseline are joint.
        scores: by setting, over the scored tasks: forwards, averaged like the score, and the
            estimate at_equal_forwards, over majority votes of the first baseline, or None.
        several: task, setting, kind, samples, forwards, estimate of the score.
        uncertainty: by scored task and watched setting, the frame of `uncertainty.evaluate` with
            the numbers of answers and of wrong ones.
        tuned: sampler, candidates, unchanged (its score), score (of the best) and values.
        comparisons: each with a frame of setting, its estimates of the cost and the score, the
            difference from the curve, verdict and place: `curve` for a point of the curve, `below`
            or `above` where the cost is outside the curve's, so that its nearer end counts. A pair
            is named `A - B`. Intervals of the differences of one comparison are joint.
    """

    rows: pd.DataFrame
    baselines: tuple[str, ...]
    sizes: tuple[int, ...]
    free: frozenset[str]
    overall: str | None
    means: pd.DataFrame
    costs: pd.DataFrame
    values: pd.DataFrame
    differences: pd.DataFrame
    scores: pd.DataFrame
    several: pd.DataFrame
    uncertainty: pd.DataFrame
    tuned: pd.DataFrame
    comparisons: Sequence[tuple[Comparison, pd.DataFrame]]

    def to_json(self) -> dict[str, Any]:
        """Returns the frames as lists of records. An estimate is `{value, low, high}`; a missing
        figure is null."""
        frames = {
            "costs": self.costs,
            "values": self.values,
            "differences": self.differences,
            "scores": self.scores,
            "several_samples": self.several,
            "uncertainty": self.uncertainty,
        }
        options: dict[str, Any] = {"orient": "records", "double_precision": 6}

        def records(frame: pd.DataFrame) -> Any:
            return json.loads(frame.to_json(default_handler=vars, **options))

        return {
            "baselines": [*self.baselines],
            "sizes": [*self.sizes],
            **{name: records(frame) for name, frame in frames.items()},
            "comparisons": [
                {**asdict(comparison), "found": records(frame)}
                for comparison, frame in self.comparisons
            ],
        }


class _Sums:
    """Rows summed over seeds: numerators and denominators of each measure by setting and item."""

    def __init__(self, rows: pd.DataFrame, diverse: Collection[str]) -> None:
        """`diverse` are the tasks that need Self-BLEU."""
        self.rows = rows.assign(place=rows.groupby(["task", "item"], sort=False).ngroup())
        self.settings, self.tasks = [*rows["setting"].unique()], [*rows["task"].unique()]
        whole = rows["score"].notna().groupby(rows["task"]).all()
        self.scored = [task for task in self.tasks if whole[task]]
        self.task_of = self.rows.groupby("place")["task"].first()

        # By row.
        parts = rows[[*_MEANS]].copy()
        wholes = parts.notna().astype(float)
        tokens = rows["tokens"].astype(float)
        for name, part, of in (
            ("logprob", -tokens * np.log(rows["perplexity"]), tokens * wholes["perplexity"]),
            ("tokens", tokens, 1.0),
            ("forwards", rows["forwards"], 1.0),
        ):
            parts[name], wholes[name] = part, of
        for name in own_measures(rows):  # before others of their names
            part, of = rows[f"measure_{name}"], rows[f"measure_{name}_of"]
            if name in parts:
                part, of = part.combine_first(parts[name]), of.combine_first(wholes[name])
            parts[name], wholes[name] = part, of

        # By setting and item. A score is a mean over seeds, then items.
        by = [self.rows["setting"], self.rows["place"]]
        parts, wholes = (each.groupby(by, sort=False).sum() for each in (parts, wholes))
        parts[SCORE] = (parts[SCORE] / wholes[SCORE]).fillna(0.0)
        wholes[SCORE] = (wholes[SCORE] > 0).astype(float)
        texts = self.rows[rows["task"].isin(diverse)].groupby(["setting", "place"])["text"]
        bleu = texts.agg(lambda own: self_bleu([*own])).reindex(parts.index).astype(float)
        parts[SELF_BLEU], wholes[SELF_BLEU] = bleu.fillna(0.0), bleu.notna().astype(float)
        self._sums = pd.concat({"part": parts, "whole": wholes}, axis=1)

    def measures(self, task: str) -> list[str]:
        """Returns the measures of a task's texts, the task's own ones first."""
        rows = self.rows[self.rows["task"] == task]
        known = self._chosen([task])["whole"].any()
        return [n for n in dict.fromkeys((*own_measures(rows), *TEXT_MEASURES)) if known[n]]

    def bootstrap(self, tasks: Sequence[str]) -> Bootstrap:
        """Resamples of the items of some tasks."""
        return Bootstrap([self.tasks.index(task) for task in self.task_of if task in tasks])

    def of_items(self, setting: str, name: str, tasks: Sequence[str]) -> tuple[Floats, Floats]:
        """Parts and wholes [I] of a measure on the items of some tasks."""
        own = self._chosen(tasks).loc[setting]
        return own["part", name].to_numpy(), own["whole", name].to_numpy()

    def average(
        self, bootstrap: Bootstrap, setting: str, name: str, tasks: Sequence[str]
    ) -> Resampled:
        """Averages a measure like the score: over seeds, then items that have it, then tasks."""
        parts, wholes = self.of_items(setting, name, tasks)
        known = wholes > 0
        means = np.divide(parts, wholes, out=np.zeros(len(parts)), where=known)
        return bootstrap.ratio(means, known.astype(float))

    def means(self, tasks: Sequence[str]) -> pd.DataFrame:
        """The means of each measure over the texts of some tasks, by setting; NaN without one."""
        sums = self._chosen(tasks).groupby(level="setting", sort=False).sum()
        return sums["part"] / sums["whole"].where(sums["whole"] > 0)

    def _chosen(self, tasks: Sequence[str]) -> pd.DataFrame:
        places = self.task_of.index[self.task_of.isin(tasks)]
        return self._sums[self._sums.index.get_level_values("place").isin(places)]


def analyse(
    rows: pd.DataFrame,
    votes: Mapping[str, bool],
    baselines: Sequence[str],
    sizes: Sequence[int],
    watched: Sequence[str],
    tuned: pd.DataFrame,
    comparisons: Sequence[Comparison] = (),
) -> Findings:
    """Computes a study's findings.

    Args:
        rows: ordered by item, then setting, then seed.
        votes: by the task's name, whether a majority of its answers is meaningful.
        baselines: the settings that the others are compared with by task; the first one is also
            compared at equal forwards, with votes of several samples.
        sizes: numbers of samples for one answer, ascending from 1.
        watched: the settings whose measures of uncertainty are evaluated.
        tuned: see `Findings`.
        comparisons: settings to compare with curves, each over some scored task.
    """
    free = frozenset(task for task in rows["task"].unique() if not votes[task])
    at_equal_bleu = [one.tasks or rows["task"] for one in comparisons if one.by == SELF_BLEU]
    sums = _Sums(rows, free.union(*at_equal_bleu))
    scored = sums.scored
    several_tasks = {ALL: scored} if len(scored) > 1 else {}
    groups = {**several_tasks, **{task: [task] for task in sums.tasks}}
    compared = [_compare(sums, name, tasks, baselines) for name, tasks in groups.items()]
    values, differences = (
        pd.concat(frames, ignore_index=True) for frames in zip(*compared, strict=True)
    )
    costs = [
        sums.means(tasks)[["tokens", "forwards"]].assign(task=name)
        for name, tasks in groups.items()
    ]
    scores = several = pd.DataFrame()
    if scored:
        answers = _answers(sums.rows[rows["task"].isin(scored)], free, sizes)
        scores = _scores(sums, answers, baselines[0], sizes)
        if len(sizes) > 1:
            with_score = {name: own for name, own in groups.items() if own[0] in scored}
            frames = [_several(sums, answers, *group, sizes) for group in with_score.items()]
            several = pd.concat(frames, ignore_index=True)
    return Findings(
        rows=rows,
        baselines=tuple(baselines),
        sizes=tuple(sizes),
        free=free,
        overall=next(iter((*several_tasks, *scored)), None),
        means=sums.means(sums.tasks),
        costs=pd.concat(costs).reset_index(),
        values=values,
        differences=differences,
        scores=scores,
        several=several,
        uncertainty=_evaluate_uncertainty(sums, watched),
        tuned=tuned,
        comparisons=[(one, _compare_on_curve(sums, one)) for one in comparisons],
    )


def _compare(
    sums: _Sums, name: str, tasks: Sequence[str], baselines: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns values of one task, or of all scored tasks, and differences from each baseline."""
    scored = tasks[0] in sums.scored
    # Texts of unlike tasks are not put together.
    measures = sums.measures(name) if len(tasks) == 1 else []
    columns = [SCORE] if scored else measures
    bootstrap = sums.bootstrap(tasks)
    # Values, and the same of each resample.
    found = {
        (setting, measure): bootstrap.ratio(*sums.of_items(setting, measure, tasks))
        for setting in sums.settings
        for measure in dict.fromkeys((*columns, *measures))
    }
    values = [
        (name, setting, measure, measure in columns, percentile_interval(*resampled))
        for (setting, measure), resampled in found.items()
    ]
    differences = []
    for baseline in baselines:
        keys = [(s, measure) for s in sums.settings if s != baseline for measure in columns]
        if keys:
            over = [found[key][0] - found[baseline, key[1]][0] for key in keys]
            each = np.stack([found[key][1] - found[baseline, key[1]][1] for key in keys])
            joint = joint_intervals(over, each)
            differences += [
                (name, baseline, *key, one, one.verdict)
                for key, one in zip(keys, joint, strict=True)
            ]
    return (
        pd.DataFrame(values, columns=["task", "setting", "measure", "compared", "estimate"]),
        pd.DataFrame(
            differences, columns=["task", "baseline", "setting", "measure", "estimate", "verdict"]
        ),
    )


def _answers(rows: pd.DataFrame, free: Collection[str], sizes: Sequence[int]) -> pd.DataFrame:
    """Returns scores and forwards of one answer from k samples, by setting, kind and k; columns are
    (score or forwards, item). Without votes, a vote of any k is a single sample."""
    found = []
    rows = rows.assign(
        answer=rows["answer"].replace({np.nan: None}),
        logprob=-np.log(rows["perplexity"].fillna(math.inf)),
        lowest_group_confidence=rows["lowest_group_confidence"].fillna(0.0),
    )
    fields = ["answer", "score", "logprob", "lowest_group_confidence"]
    for (setting, place, task), own in rows.groupby(["setting", "place", "task"], sort=False):
        samples = [Sample(*values) for values in zip(*(own[name] for name in fields), strict=True)]
        cost = own["forwards"].mean()
        for k, (kind, choose) in itertools.product(sizes, KINDS.items()):
            number = 1 if task in free and kind in VOTES else k
            score = np.mean([choose(run) for run in rotate(samples, number)])
            found.append((setting, kind, k, place, score, cost * number))
    index = ["setting", "kind", "samples", "place"]
    frame = pd.DataFrame(found, columns=[*index, SCORE, "forwards"])
    return frame.set_index(index).unstack("place")


def _scores(
    sums: _Sums, answers: pd.DataFrame, baseline: str, sizes: Sequence[int]
) -> pd.DataFrame:
    bootstrap, found = sums.bootstrap(sums.scored), []
    votes = [answers.loc[(baseline, MAJORITY, k)] for k in sizes]
    curve = [
        (bootstrap.mean_of(vote["forwards"]), bootstrap.mean_of(vote[SCORE])) for vote in votes
    ]
    for setting in sums.settings:
        cost, score = (
            sums.average(bootstrap, setting, name, sums.scored) for name in ("forwards", SCORE)
        )
        at_equal = None
        if setting != baseline and len(sizes) > 1:
            at_equal = percentile_interval(*over_curve(curve, cost, score))
        found.append((setting, cost[0], at_equal))
    return pd.DataFrame(found, columns=["setting", "forwards", "at_equal_forwards"])


def _compare_on_curve(sums: _Sums, comparison: Comparison) -> pd.DataFrame:
    """Compares settings with a curve; see `Findings.comparisons`."""
    tasks = [task for task in sums.scored if task in (comparison.tasks or sums.scored)]
    bootstrap, curve = sums.bootstrap(tasks), comparison.curve
    named = dict.fromkeys(itertools.chain(curve, comparison.settings, *comparison.pairs))
    of = {
        name: (
            sums.average(bootstrap, name, comparison.by, tasks),
            sums.average(bootstrap, name, SCORE, tasks),
        )
        for name in named
    }
    costs = [of[setting][0][0] for setting in curve]

    def outside(setting: str) -> str:
        cost = of[setting][0][0]
        return "below" if cost < min(costs) else "above" if cost > max(costs) else ""

    heights = {s: over_curve([of[point] for point in curve], *of[s]) for s in named}
    found = {s: (heights[s], outside(s)) for s in comparison.settings}
    for one, other in comparison.pairs:
        (value, each), (less, each_less) = heights[one], heights[other]
        sides = ", ".join(dict.fromkeys(filter(None, map(outside, (one, other)))))
        found[f"{one} - {other}"] = (value - less, each - each_less), sides
    joint = joint_intervals(
        [over[0] for over, _ in found.values()], np.stack([over[1] for over, _ in found.values()])
    )
    rows = [(name, None, "", "curve") for name in curve] + [
        (name, one, one.verdict_with(comparison.margin), side)
        for (name, (_, side)), one in zip(found.items(), joint, strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["setting", "difference", "verdict", "place"])
    for place, column in enumerate((comparison.by, SCORE)):
        own = {setting: percentile_interval(*pair[place]) for setting, pair in of.items()}
        frame[column] = [own.get(name) for name in frame["setting"]]
    return frame


def _several(
    sums: _Sums, answers: pd.DataFrame, name: str, tasks: Sequence[str], sizes: Sequence[int]
) -> pd.DataFrame:
    bootstrap, found = sums.bootstrap(tasks), []
    places = sums.task_of.index[sums.task_of.isin(tasks)]
    for setting in sums.settings:
        keys = [*itertools.product(KINDS, sizes)]
        own = answers.loc[[(setting, *key) for key in keys]]
        scores, costs = (own[name][places].to_numpy() for name in (SCORE, "forwards"))
        for key, cost, one in zip(keys, costs, bootstrap.estimates(scores), strict=True):
            found.append((name, setting, *key, bootstrap.mean(cost), one))
    columns = ["task", "setting", "kind", "samples", "forwards", "estimate"]
    return pd.DataFrame(found, columns=columns)


def _evaluate_uncertainty(sums: _Sums, watched: Sequence[str]) -> pd.DataFrame:
    """Evaluates the measures of answers with tokens, within each scored task."""
    frames = []
    rows = sums.rows[sums.rows["tokens"] > 0]
    for task, setting in itertools.product(sums.scored, watched):
        own = rows[(rows["task"] == task) & (rows["setting"] == setting)]
        frame = evaluate(own)
        counts = {"answers": len(own), "wrong": int((own["score"] < 1).sum())}
        frames.append(frame.assign(task=task, setting=setting, **counts))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
