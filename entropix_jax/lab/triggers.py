"""Compares triggers of lookups on stored answers: which answers look up, and before which token.

A trigger has a level at each token. With threshold c an answer looks up before its first token
whose level exceeds c. A rate is the share of answers that look up: the threshold is the level at
which the share is reached, with `level >= c` for a random part of the answers and `level > c` for
the others, so that the share is exact. All results are expectations over that choice. Resamples of
the answers choose thresholds of their own.

Legend: n answers, T tokens of the longest, V = 1 + T versions of an answer (without a lookup, with
one before each token), L thresholds, R resamples. Index 0 of an axis of 1 + R is the sample itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from entropix_jax.batch.storage import open_file, read_lines
from entropix_jax.errors import UserError
from entropix_jax.lab.statistics import Floats, joint_intervals, percentile_interval
from entropix_jax.lab.uncertainty import separate
from entropix_jax.lab.wrong import calibration_error, fit_wrong
from entropix_jax.sampler.wrong import MEASURES, WrongTable
from entropix_jax.text.intents import intent_entropy

RATES = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
_COMPARED = RATES[1:-1]
WRONG, ORACLE, RANDOM, FIRST = "P(wrong)", "oracle", "random", "random, first token"
_UNSETTLED = ("hehv", "lehv")  # regimes
_RESAMPLES = 1000

Row = Mapping[str, Any]


def read_rows(address: str) -> list[Row]:
    """Reads the rows of `lookups`, possibly compressed, in the order of the questions.

    Raises:
        UserError: the file cannot be read, or has a line that `lookups` does not write.
    """
    rows: list[Row] = []
    with open_file(address) as file:
        for number, line in enumerate(read_lines(address, file), 1):
            try:
                row = json.loads(line)
                if "error" not in row:
                    _check(row)
                rows.append({"line": number, **row, "split": str(row["split"])})
            except (ValueError, TypeError, KeyError):
                raise UserError(f"{address}: line {number} is not a result of lookups") from None
    return sorted(rows, key=lambda row: row["line"])


def _check(row: Row) -> None:
    """Raises ValueError, TypeError or KeyError for columns of different lengths or other types."""
    tokens = len(as_measures(row))
    if len(row["regime"]) != tokens or len(row["lookups"]) not in (0, tokens):
        raise ValueError
    if [type(row[name]) for name in ("ambiguous", "score", "samples")] != [bool, float, list]:
        raise TypeError


def as_measures(row: Row) -> Floats:
    """Returns the measures of a row's tokens for P(wrong), [tokens, 4]."""
    return np.array([row[name] for name in MEASURES], float).T.reshape(-1, len(MEASURES))


@dataclass(frozen=True)
class Threshold:
    """The versions that each threshold chooses.

    Attributes:
        highest: [n] the highest level of each answer, -inf for an answer that never looks up.
        levels: [L] its distinct finite values, descending: the thresholds.
        least, above: int [L, n] the version of each answer with `level >= c` and `level > c`.
    """

    highest: Floats
    levels: Floats
    least: NDArray[np.intp]
    above: NDArray[np.intp]

    @staticmethod
    def of(levels: Floats) -> Threshold:
        """Makes the thresholds of `levels[n, T]`, padded with -inf."""
        highest = levels.max(axis=1)
        each = np.unique(highest[highest > -np.inf])[::-1]
        reached = levels >= each[:, None, None], levels > each[:, None, None]
        versions = (np.where(r.any(axis=-1), 1 + r.argmax(axis=-1), 0) for r in reached)
        return Threshold(highest, each, *versions)

    def choose(self, counts: Floats, rate: float) -> Floats:
        """Returns the probability of each version, [n, V - 1] at most, where a share of the answers
        looks up, or as many as ever do. `counts[n]` are the copies of the answers."""
        number = len(counts)
        shares = np.zeros((number, 1 + int(self.least.max(initial=0))))
        if not len(self.levels) or not rate:
            shares[:, 0] = 1
            return shares
        masses = np.zeros(len(self.levels))
        known = self.highest > -np.inf
        places = np.searchsorted(-self.levels, -self.highest[known])
        np.add.at(masses, places, counts[known])
        ends, wanted = masses.cumsum(), rate * counts.sum()
        at = min(int(np.searchsorted(ends, wanted - 1e-9)), len(ends) - 1)
        part = min((wanted - ends[at] + masses[at]) / masses[at], 1) if masses[at] else 1.0
        answers = np.arange(number)
        shares[answers, self.least[at]] += part
        shares[answers, self.above[at]] += 1 - part
        return shares


@dataclass(frozen=True)
class Answers:
    """The answers to unambiguous questions of the test split, with all their versions.

    Attributes:
        scores: [n, V]; a version after the last token has the score of the answer
            without a lookup.
        lowest: [n, V] the lowest probability of the most likely token over a version's own tokens.
        sizes: int [n] tokens of each answer.
        levels: of each trigger with a level, [n, T], padded with -inf.
    """

    scores: Floats
    lowest: Floats
    sizes: NDArray[np.intp]
    levels: Mapping[str, Floats]

    @staticmethod
    def of(rows: Sequence[Row], table: WrongTable) -> Answers:
        """Makes the answers of rows, each with at least one token."""
        sizes = np.array([len(row["regime"]) for row in rows])
        shape = len(rows), int(sizes.max())
        scores, lowest = (np.zeros((shape[0], 1 + shape[1])) for _ in range(2))
        names = (WRONG, "1 - p1", "h", "regime, then h")
        levels = {name: np.full(shape, -np.inf) for name in names}
        for at, row in enumerate(rows):
            measures, size = as_measures(row), sizes[at]
            scores[at], lowest[at] = row["score"], measures[:, 2].min()
            if row["lookups"]:  # empty if the lookup has no result
                scores[at, 1 : 1 + size] = [found[0] for found in row["lookups"]]
                lowest[at, 1 : 1 + size] = [found[1] for found in row["lookups"]]
            entropy = measures[:, 0]
            unsettled = np.isin(row["regime"], _UNSETTLED)
            own = (
                table.probabilities(measures),
                1 - measures[:, 2],
                entropy,
                entropy + 1e3 * unsettled,
            )
            for name, values in zip(names, own, strict=True):
                levels[name][at, :size] = values
        gain = scores[:, 1:] - scores[:, :1]
        best = (np.arange(shape[1]) == gain.argmax(axis=1)[:, None]) & (gain > 0)
        return Answers(scores, lowest, sizes, {**levels, ORACLE: np.where(best, gain, -np.inf)})

    @cached_property
    def thresholds(self) -> dict[str, Threshold]:
        """The thresholds of each trigger with a level."""
        return {name: Threshold.of(levels) for name, levels in self.levels.items()}

    @cached_property
    def triggers(self) -> tuple[str, ...]:
        """All triggers: P(wrong) first."""
        *measured, oracle = self.levels
        return (*measured, RANDOM, FIRST, oracle)

    @cached_property
    def _order(self) -> NDArray[np.intp]:
        """All versions from the most certain on."""
        return np.argsort(-self.lowest.ravel(), kind="stable")

    def shares(self, trigger: str, counts: Floats, rate: float) -> Floats:
        """Returns the probability of each version, [n, V]."""
        shares = np.zeros(self.scores.shape)
        if trigger in self.thresholds:
            found = self.thresholds[trigger].choose(counts, rate)
            shares[:, : found.shape[1]] = found
            return shares
        shares[:, 0] = 1 - rate
        if trigger == FIRST:
            shares[:, 1] = rate
        else:
            there = np.arange(self.scores.shape[1] - 1) < self.sizes[:, None]
            shares[:, 1:] = there * (rate / self.sizes[:, None])
        return shares

    def accuracy(self, shares: Floats, counts: Floats) -> float:
        """Returns the mean score."""
        return float(counts @ (shares * self.scores).sum(axis=1) / counts.sum())

    def risk(self, shares: Floats, counts: Floats) -> float:
        """Returns the area under the risk-coverage curve: the share of wrong answers among the
        most certain ones, averaged over coverages."""
        mass = (counts[:, None] * shares).ravel()[self._order]
        wrong = mass * (1 - self.scores.ravel()[self._order])
        ends = mass.cumsum()
        share = np.divide(wrong.cumsum(), ends, out=np.zeros_like(ends), where=ends > 0)
        return float(mass @ share / ends[-1])


def draw_resamples(number: int) -> Floats:
    """Returns copies of each answer in each resample, [1 + R, n]; the first row has each once."""
    drawn = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), _RESAMPLES)
    return np.concatenate([np.ones((1, number)), drawn])


def compare_triggers(answers: Answers) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compares all triggers at all rates.

    Returns:
        Accuracy and area under the risk-coverage curve with percentile intervals, by trigger,
        measure and rate. The differences of accuracy between P(wrong) and the others but the
        oracle, with intervals joint over all rates and triggers.
    """
    resamples = draw_resamples(len(answers.sizes))
    kinds = {"accuracy": answers.accuracy, "AURC": answers.risk}
    found: dict[tuple[str, float, str], Floats] = {}
    for trigger in answers.triggers:
        for rate in RATES:
            each = ((answers.shares(trigger, own, rate), own) for own in resamples)
            values = np.array([[kind(*one) for kind in kinds.values()] for one in each])
            found |= {(trigger, rate, name): values[:, k] for k, name in enumerate(kinds)}
    table = pd.DataFrame(
        {
            "measure": name,
            "trigger": trigger,
            **{f"{rate:.0%}": interval(found[trigger, rate, name]) for rate in RATES},
        }
        for name in kinds
        for trigger in answers.triggers
    )
    others = [name for name in answers.triggers if name not in (WRONG, ORACLE)]
    pairs = {
        (name, rate): found[WRONG, rate, "accuracy"] - found[name, rate, "accuracy"]
        for name in others
        for rate in _COMPARED
    }
    stacked = np.stack([*pairs.values()])
    intervals = joint_intervals(stacked[:, 0].tolist(), stacked[:, 1:])
    joint = dict(zip(pairs, intervals, strict=True))
    differences = pd.DataFrame(
        {"P(wrong) minus": name, **{f"{rate:.0%}": str(joint[name, rate]) for rate in _COMPARED}}
        for name in others
    )
    return table, differences


def interval(values: Floats) -> str:
    """Returns the interval of values [1 + R] as text."""
    return str(percentile_interval(float(values[0]), values[1:]))


def separate_groups(values: Mapping[str, Floats], positive: NDArray[np.bool_]) -> pd.DataFrame:
    """Returns the AUROC of each of the `values[n]`, with joint intervals, for `positive[n]`: the
    probability that a positive answer has the higher value. Also the area under the risk-coverage
    curve, where positives are the errors."""
    counts = draw_resamples(len(positive)).astype(int)
    each = {name: separate(own, positive, counts) for name, own in values.items()}
    aurocs = np.stack([own[0] for own in each.values()])
    joint = joint_intervals(aurocs[:, 0].tolist(), aurocs[:, 1:])
    joint = [replace(one, low=max(one.low, 0), high=min(one.high, 1)) for one in joint]
    return pd.DataFrame(
        {"measure": name, "AUROC": str(one), "AURC": interval(own[1])}
        for (name, own), one in zip(each.items(), joint, strict=True)
    )


def calibration(answers: Answers) -> Iterator[str]:
    """Yields lines with the calibration error of P(wrong) for whole answers, by its maximum over
    their tokens, and for tokens, where an answer has the weight of one token."""
    levels, wrong = answers.levels[WRONG], 1 - answers.scores[:, 0]
    there = levels > -np.inf
    owners = np.nonzero(there)[0]
    predicted = {"answers, by their highest": levels.max(axis=1), "tokens": levels[there]}
    owner = {"answers, by their highest": np.arange(len(wrong)), "tokens": owners}
    for name, values in predicted.items():
        own = owner[name]
        even = 1 / np.bincount(own)[own]
        errors = np.array(
            [
                calibration_error(values, wrong[own], counts[own] * even)
                for counts in draw_resamples(len(wrong))
            ]
        )
        # A resample repeats answers, which raises the error: its mean excess is subtracted.
        errors[1:] = np.maximum(errors[1:] - (errors[1:].mean() - errors[0]), 0)
        yield f"Calibration error of P(wrong) at {name}: {interval(errors)}."


def summarise(rows: Sequence[Row]) -> str:
    """Returns the tables of rows as Markdown.

    Raises:
        UserError: no answer of a split, or P(wrong) cannot be fitted.
    """
    kept = [row for row in rows if "error" not in row and row["regime"]]
    plain = [row for row in kept if not row["ambiguous"]]
    tuning = [row for row in plain if row["split"] == "tuning"]
    test = [row for row in plain if row["split"] == "test"]
    if not tuning or not test:
        raise UserError("both splits need an answer to a question that is not ambiguous")
    wrong = np.array([row["score"] < 1 for row in tuning])
    table = fit_wrong([as_measures(row) for row in tuning], wrong)
    answers = Answers.of(test, table)
    results, differences = compare_triggers(answers)
    counted = (
        f"{len(tuning)} tuning and {len(test)} test answers of {answers.sizes.mean():.1f} tokens,"
        f" {np.mean(~wrong):.3f} and {answers.scores[:, 0].mean():.3f} right without a lookup."
        f" {sum(not row['lookups'] for row in test)} test questions have no result of a lookup,"
        f" {len(rows) - len(kept)} questions no answer."
    )
    parts = [
        counted,
        *(_markdown(own) for _, own in results.groupby("measure", sort=False)),
        "Differences of accuracy, with joint 95 % intervals:",
        _markdown(differences),
    ]
    failed = answers.scores[:, 0] < 1
    if failed.any() and not failed.all():
        highest = {name: own.max(axis=1) for name, own in answers.levels.items() if name != ORACLE}
        parts += ["Wrong against right answers without a lookup, by their highest level:"]
        parts += [_markdown(separate_groups(highest, failed)), *calibration(answers)]
    # A question is unknown if its answer without a lookup is wrong.
    sampled = (row for row in kept if row["samples"] and row["split"] == "test")
    asked = [row for row in sampled if row["ambiguous"] or row["score"] < 1]
    unknown = np.array([not row["ambiguous"] for row in asked])
    if unknown.any() and not unknown.all():
        columns = {
            "intent entropy": [intent_entropy(row["samples"]) for row in asked],
            "highest h": [max(row["entropy"]) for row in asked],
            "first h": [row["entropy"][0] for row in asked],
            "highest u": [max(row["varentropy"]) for row in asked],
            "1 - lowest p1": [1 - min(row["max_prob"]) for row in asked],
        }
        values = {name: np.array(own, float) for name, own in columns.items()}
        groups = f"{unknown.sum()} unknown against {(~unknown).sum()} ambiguous questions:"
        parts += [groups, _markdown(separate_groups(values, unknown).drop(columns="AURC"))]
    return "\n\n".join(parts) + "\n"


def _markdown(table: pd.DataFrame) -> str:
    return str(table.to_markdown(index=False, disable_numparse=True))
