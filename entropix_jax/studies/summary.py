"""A study's results as a page of text: `summary.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropix_jax.names import REGIMES
from entropix_jax.studies.digest import MEASURES, PREDICTORS, Digest, SettingDigest
from entropix_jax.studies.statistics import (
    Bin,
    Bootstrap,
    Interval,
    auroc_interval,
    reliability,
)
from entropix_jax.studies.truth import Truth


@dataclass(frozen=True)
class Tuned:
    """How a sampler was tuned."""

    sampler: str
    candidates: int
    score: float  # of the chosen one, on the tuning split
    default_score: float  # of the sampler as it is
    values: Mapping[str, Any]  # what was changed


@dataclass(frozen=True)
class Line:
    """One setting's figures, as the table has them."""

    setting: SettingDigest
    score: Interval
    cost: float  # forward passes, as the score a mean over tasks
    by_task: tuple[float, ...]
    over_baseline: Interval | None  # None of the baseline itself
    over_base: Interval | None  # over the setting that it changes, None of one that changes none
    at_equal_cost: Interval | None  # over votes of the baseline's samples


@dataclass(frozen=True)
class Findings:
    """What a study found."""

    digest: Digest
    baseline: str
    sizes: tuple[int, ...]  # of votes
    lines: tuple[Line, ...]  # empty where nothing is scored
    votes: Mapping[str, tuple[tuple[float, Interval], ...]]  # by setting: of each size cost, score
    predictors: Mapping[tuple[str, str], Mapping[str, Interval]]  # by setting and task, AUROCs
    bins: Mapping[str, list[Bin]]  # by setting, of mean entropy
    truth: tuple[Truth, ...]
    tuned: tuple[Tuned, ...]


def findings_of(
    digest: Digest,
    baseline: str,
    bases: Mapping[str, str],
    sizes: Sequence[int],
    watched: Sequence[str],
    truth: Sequence[Truth] = (),
    tuned: Sequence[Tuned] = (),
) -> Findings:
    """The figures of a study, with their intervals.

    Args:
        baseline: the setting that all others are held against.
        bases: of settings that are changes of another one, which.
        sizes: of votes.
        watched: the settings whose predictors of errors are looked at.
    """
    base = digest.settings[baseline]
    scored = not any(np.isnan(one.score()).any() for one in digest.settings.values())
    lines: list[Line] = []
    all_votes: dict[str, tuple[tuple[float, Interval], ...]] = {}
    strata = np.asarray(digest.strata)
    if scored:
        bootstrap = Bootstrap(digest.strata)
        sizes = [k for k in sizes if k in base.scores]
        curve = np.stack([base.score(k) for k in sizes])
        costs = np.stack([base.cost(k) for k in sizes])
        for one in digest.settings.values():
            own = one is base
            changed = digest.settings[bases[one.name]] if one.name in bases else None
            lines.append(
                Line(
                    setting=one,
                    score=bootstrap.mean(one.score()),
                    cost=bootstrap.even(one.cost()),
                    by_task=tuple(
                        float(one.score()[strata == task].mean())
                        for task in range(len(digest.tasks))
                    ),
                    over_baseline=None if own else bootstrap.mean(one.score() - base.score()),
                    over_base=None
                    if changed is None
                    else bootstrap.mean(one.score() - changed.score()),
                    at_equal_cost=None
                    if own or len(sizes) < 2
                    else bootstrap.over_curve(costs, curve, one.cost(), one.score()),
                )
            )
            all_votes[one.name] = tuple(
                (bootstrap.even(one.cost(k)), bootstrap.mean(one.score(k))) for k in sizes
            )
    predictors: dict[tuple[str, str], dict[str, Interval]] = {}
    bins: dict[str, list[Bin]] = {}
    for name in watched if scored else ():
        one = digest.settings[name]
        right, items = np.asarray(one.right), np.asarray(one.row_items, np.int64)
        parts = {task: strata[items] == number for number, task in enumerate(digest.tasks)}
        for task, part in {"all": np.ones(len(items), bool), **parts}.items():
            wrong = right[part] < 1
            if len(np.unique(wrong)) < 2:
                continue  # all right or all wrong: nothing to predict
            predictors[name, task] = {
                key: auroc_interval(np.asarray(one.predictors[key])[part], wrong, items[part])
                for key in PREDICTORS
            }
        if (name, "all") in predictors:
            bins[name] = reliability(np.asarray(one.predictors["mean_entropy"]), right)
    return Findings(
        digest=digest,
        baseline=baseline,
        sizes=tuple(sizes),
        lines=tuple(lines),
        votes=all_votes,
        predictors=predictors,
        bins=bins,
        truth=tuple(truth),
        tuned=tuple(tuned),
    )


def summary(findings: Findings, about: Mapping[str, Any]) -> str:
    """The page. `about` says what was run: a few lines of a name and a value each."""
    parts = [
        f"# {about['description'] or 'A study of samplers'}\n",
        "\n".join(f"- {name}: {value}" for name, value in about.items() if name != "description"),
    ]
    if findings.lines:
        parts += [_scores(findings)]
        if len(findings.sizes) > 1:
            parts += [_votes(findings)]
    parts += [_occupancy(findings.digest), _actions(findings.digest), _texts(findings.digest)]
    if findings.predictors:
        parts += [_predictors(findings), _reliability(findings)]
    if findings.truth:
        parts += [_truth(findings.truth)]
    if findings.tuned:
        parts += [_tuning(findings.tuned)]
    return "\n\n".join(parts) + "\n"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown; what stands in a cell cannot break it."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


def _scores(findings: Findings) -> str:
    tasks = findings.digest.tasks
    changes = any(line.over_base for line in findings.lines)
    rows = []
    for line in findings.lines:
        one = line.setting
        rows.append(
            [
                one.name,
                line.score,
                *(f"{score:.3f}" for score in line.by_task),
                f"{line.cost:.1f}",
                *_difference(line.over_baseline),
                *(_difference(line.at_equal_cost) if len(findings.sizes) > 1 else ()),
                *(_difference(line.over_base) if changes else ()),
            ]
        )
    headings = ["setting", "score [95 %]", *tasks, "forwards"]
    headings += [f"over {findings.baseline}", ""]
    if len(findings.sizes) > 1:
        headings += ["at equal forwards", ""]
    if changes:
        headings += ["over what it changes", ""]
    text = (
        "Scores are means over tasks, of means over items, of means over seeds. Intervals are 95 % "
        "bootstrap intervals over items; differences are paired. `forwards` are token positions "
        "evaluated for an answer beyond its prompt: written, rolled out and taken back alike; "
        "their mean is taken as that of the scores."
    )
    if len(findings.sizes) > 1:
        text += (
            f" `at equal forwards` is the difference from what majorities of `{findings.baseline}` "
            f"samples (of {', '.join(map(str, findings.sizes))}) score for as many forwards, on a "
            "straight line between two sizes; below one sample's forwards, from one sample."
        )
    return f"## Scores\n\n{text}\n\n{markdown_table(headings, rows)}"


def _difference(interval: Interval | None) -> tuple[str, str]:
    if interval is None:
        return "", ""
    return (
        f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]",
        interval.verdict,
    )


def _votes(findings: Findings) -> str:
    rows = [
        [name, *(f"{score} ({cost:.0f})" for cost, score in sizes)]
        for name, sizes in findings.votes.items()
    ]
    headings = ["setting", *(f"majority of {k} (forwards)" for k in findings.sizes)]
    text = "A task of free texts has no majority: there one sample stands for any number of them."
    return f"## Self-consistency\n\n{text}\n\n{markdown_table(headings, rows)}"


def _occupancy(digest: Digest) -> str:
    rows = [
        [one.name, one.tokens, *(_percent(one.regimes[r], one.tokens) for r in REGIMES)]
        for one in digest.settings.values()
    ]
    return f"## Regimes\n\n{markdown_table(['setting', 'tokens', *REGIMES], rows)}"


def _actions(digest: Digest) -> str:
    settings = digest.settings.values()
    actions = _all(one.actions for one in settings)
    rows = [
        [
            one.name,
            *(_percent(one.actions[action], one.tokens) for action in actions),
            _percent(one.retracted, one.tokens),
            f"{one.positions / max(one.tokens, 1):.2f}",
        ]
        for one in settings
    ]
    headings = ["setting", *actions, "taken back", "forwards a token"]
    return f"## Actions\n\nShares of the tokens.\n\n{markdown_table(headings, rows)}"


def _texts(digest: Digest) -> str:
    settings = digest.settings.values()
    reasons = _all(one.finish for one in settings)
    rows = [
        [
            one.name,
            f"{one.tokens / max(one.rows, 1):.1f}",
            *(_percent(one.finish[reason], one.rows) for reason in reasons),
            *(f"{one.measure(name):.3f}" for name in MEASURES),
        ]
        for one in settings
    ]
    headings = ["setting", "tokens a text", *(f"ends by {reason}" for reason in reasons)]
    headings += [name.replace("_", "-") for name in MEASURES]
    return f"## Texts\n\n{markdown_table(headings, rows)}"


def _predictors(findings: Findings) -> str:
    rows = [
        [name, task, *(auroc[key] for key in PREDICTORS)]
        for (name, task), auroc in findings.predictors.items()
    ]
    text = (
        "The area under the ROC curve of a text's own measures as predictors of an answer that is "
        "not wholly right: 0.5 is chance, 1 tells all errors from all right answers. Over all "
        "tasks it also tells hard tasks from easy ones; within a task it cannot."
    )
    headings = ["setting", "task", *(key.replace("_", " ") for key in PREDICTORS)]
    return f"## Predictors of error\n\n{text}\n\n{markdown_table(headings, rows)}"


def _reliability(findings: Findings) -> str:
    tables = []
    for name, bins in findings.bins.items():
        rows = [
            [f"{b.low:.3f} to {b.high:.3f}", f"{b.mean:.3f}", b.number, f"{b.right:.3f}"]
            for b in bins
        ]
        headings = ["mean entropy of the text, bits", "mean", "texts", "mean score"]
        tables.append(f"`{name}`:\n\n{markdown_table(headings, rows)}")
    return "## Reliability\n\n" + "\n\n".join(tables)


def _truth(truths: Sequence[Truth]) -> str:
    total = sum(truth.number for truth in truths)
    rows = [
        [
            truth.regime,
            _percent(truth.number, total),
            f"{truth.true_entropy.mean():.3f}",
            f"{truth.model_entropy.mean():.3f}",
            f"{truth.entropy_error:.3f}",
            f"{truth.true_varentropy.mean():.3f}",
            f"{truth.model_varentropy.mean():.3f}",
            f"{truth.varentropy_error:.3f}",
        ]
        for truth in truths
    ]
    text = (
        f"On {total} positions of text that the model was not trained on, whose true next-token "
        "distributions are known; regimes as the model's own figures tell them."
    )
    headings = ["regime", "share", "true entropy", "model's", "mean distance"]
    headings += ["true varentropy", "model's", "mean distance"]
    return f"## The model's entropy and the true one\n\n{text}\n\n{markdown_table(headings, rows)}"


def _tuning(tuned: Sequence[Tuned]) -> str:
    rows = [
        [
            one.sampler,
            one.candidates,
            f"{one.default_score:.3f}",
            f"{one.score:.3f}",
            ", ".join(f"`{key}={value}`" for key, value in one.values.items()) or "as it is",
        ]
        for one in tuned
    ]
    text = (
        "Each sampler's best candidate on the tuning split, which shares no item with the test "
        "split; of equal ones the cheaper. Its own values are the first candidate."
    )
    headings = ["sampler", "candidates", "own score", "best score", "chosen"]
    return f"## Tuning\n\n{text}\n\n{markdown_table(headings, rows)}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _all(counters: Iterable[Mapping[str, int]]) -> list[str]:
    return sorted({name for counter in counters for name in counter})
