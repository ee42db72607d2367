"""A study's findings, and their Markdown page `summary.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropix_jax.lab.digest import MEASURES, PREDICTORS, Digest, SettingDigest
from entropix_jax.lab.statistics import Bin, Bootstrap, Interval, auroc_interval, reliability
from entropix_jax.lab.truth import Truth
from entropix_jax.lab.votes import MAJORITY, VOTES, WARM_UP
from entropix_jax.names import REGIMES


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
    by_task: tuple[float, ...]
    over_baseline: Interval | None  # None for the baseline itself
    over_base: Interval | None  # over the setting that it is a change of, if it is one
    at_equal_cost: Interval | None  # over majority votes of the baseline


@dataclass(frozen=True)
class Findings:
    """The results of a study, with intervals."""

    digest: Digest
    baseline: str
    sizes: tuple[int, ...]  # numbers of samples per vote
    lines: tuple[Line, ...]  # empty if the tasks have no scores
    # By setting and vote: cost and score of each size.
    votes: Mapping[tuple[str, str], tuple[tuple[float, Interval], ...]]
    predictors: Mapping[tuple[str, str], Mapping[str, Interval]]  # AUROCs by setting and task
    bins: Mapping[str, list[Bin]]  # of the mean entropy, by setting
    truth: tuple[Truth, ...]
    tuned: tuple[Tuned, ...]


def analyse_digest(
    digest: Digest,
    baseline: str,
    bases: Mapping[str, str],
    sizes: Sequence[int],
    watched: Sequence[str],
    truth: Sequence[Truth] = (),
    tuned: Sequence[Tuned] = (),
) -> Findings:
    """Computes a study's findings.

    Args:
        baseline: the setting that the others are compared with.
        bases: for each setting that is a change of another one, the other one.
        sizes: numbers of samples per vote.
        watched: the settings whose predictors of errors are evaluated.
    """
    base = digest.settings[baseline]
    scored = not any(np.isnan(setting.score()).any() for setting in digest.settings.values())
    lines: list[Line] = []
    all_votes: dict[tuple[str, str], tuple[tuple[float, Interval], ...]] = {}
    strata = np.asarray(digest.strata)

    # Scores: each setting alone, against the baseline, and against the baseline's votes.
    if scored:
        bootstrap = Bootstrap(digest.strata)
        sizes = [k for k in sizes if (MAJORITY, k) in base.votes]
        curve = np.stack([base.score(k) for k in sizes])
        costs = np.stack([base.cost(k) for k in sizes])
        for name, setting in digest.settings.items():
            score, cost = setting.score(), setting.cost()
            over_baseline = over_base = at_equal_cost = None
            if setting is not base:
                over_baseline = bootstrap.estimate(score - base.score())
                if len(sizes) > 1:
                    at_equal_cost = bootstrap.over_curve(costs, curve, cost, score)
            if name in bases:
                over_base = bootstrap.estimate(score - digest.settings[bases[name]].score())
            by_task = (float(score[strata == task].mean()) for task in range(len(digest.tasks)))
            lines.append(
                Line(
                    setting=setting,
                    score=bootstrap.estimate(score),
                    cost=bootstrap.mean(cost),
                    by_task=tuple(by_task),
                    over_baseline=over_baseline,
                    over_base=over_base,
                    at_equal_cost=at_equal_cost,
                )
            )
            for vote in VOTES if len(sizes) > 1 else ():
                all_votes[name, vote] = tuple(
                    (
                        bootstrap.mean(setting.cost(k, vote)),
                        bootstrap.estimate(setting.score(k, vote)),
                    )
                    for k in sizes
                )

    # Predictors of errors, over all tasks and within each.
    predictors: dict[tuple[str, str], dict[str, Interval]] = {}
    bins: dict[str, list[Bin]] = {}
    for name in watched if scored else ():
        setting = digest.settings[name]
        scores = np.asarray(setting.row_scores)
        items = np.asarray(setting.row_items, np.int64)
        parts = {task: strata[items] == number for number, task in enumerate(digest.tasks)}
        for task, part in {"all": np.ones(len(items), bool), **parts}.items():
            wrong = scores[part] < 1
            if len(np.unique(wrong)) < 2:
                continue  # all right or all wrong: nothing to predict
            predictors[name, task] = {
                key: auroc_interval(np.asarray(setting.predictors[key])[part], wrong, items[part])
                for key in PREDICTORS
            }
        if (name, "all") in predictors:
            bins[name] = reliability(np.asarray(setting.predictors["mean_entropy"]), scores)
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


def format_summary(findings: Findings, about: Mapping[str, Any]) -> str:
    """The page. `about` describes the run: JSON values by name."""
    parts = [
        f"# {about['description'] or 'A study of samplers'}\n",
        "\n".join(
            f"- {name}: {_format_value(value)}"
            for name, value in about.items()
            if name != "description"
        ),
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


def _format_value(value: Any) -> str:
    """A JSON value as one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def format_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; pipes and line breaks in cells are escaped."""
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
        setting = line.setting
        rows.append(
            [
                setting.name,
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
        headings += ["over its base", ""]
    text = (
        "A score is a mean over seeds, then items, then tasks. Intervals are 95 % bootstrap "
        "intervals over items; differences are paired. `forwards` counts the token positions "
        "evaluated per answer beyond its prompt, rollouts and retracted tokens included, and is "
        "averaged like the score."
    )
    if len(findings.sizes) > 1:
        text += (
            " `at equal forwards` is the difference from the score of majority votes of "
            f"`{findings.baseline}` (of {', '.join(map(str, findings.sizes))} samples) with the "
            "same forwards, interpolated linearly; below the cost of one sample, from one sample."
        )
    return f"## Scores\n\n{text}\n\n{format_table(headings, rows)}"


def _difference(interval: Interval | None) -> tuple[str, str]:
    if interval is None:
        return "", ""
    return (f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]", interval.verdict)


def _votes(findings: Findings) -> str:
    rows = [
        [*of, *(f"{score} ({cost:.0f})" for cost, score in sizes)]
        for of, sizes in findings.votes.items()
    ]
    headings = ["setting", "vote", *(f"{k} samples (forwards)" for k in findings.sizes)]
    text = (
        "A weighted vote weighs samples by their lowest group confidence (Fu et al. 2025): all or "
        f"the surest ones. Early end: the first {WARM_UP} samples set the threshold that so "
        "many of them stay above; a later one ends below it, and has no vote. Tasks of free text "
        "have no votes: one sample counts for every size."
    )
    return f"## Self-consistency\n\n{text}\n\n{format_table(headings, rows)}"


def _occupancy(digest: Digest) -> str:
    rows = [
        [
            setting.name,
            setting.tokens,
            *(_percent(setting.regimes[r], setting.tokens) for r in REGIMES),
        ]
        for setting in digest.settings.values()
    ]
    return f"## Regimes\n\n{format_table(['setting', 'tokens', *REGIMES], rows)}"


def _actions(digest: Digest) -> str:
    settings = digest.settings.values()
    actions = _names_in(setting.actions for setting in settings)
    rows = [
        [
            setting.name,
            *(_percent(setting.actions[action], setting.tokens) for action in actions),
            _percent(setting.retracted, setting.tokens),
            f"{setting.positions / max(setting.tokens, 1):.2f}",
        ]
        for setting in settings
    ]
    headings = ["setting", *actions, "retracted", "forwards per token"]
    return f"## Actions\n\nShares of the tokens.\n\n{format_table(headings, rows)}"


def _texts(digest: Digest) -> str:
    settings = digest.settings.values()
    reasons = _names_in(setting.finish for setting in settings)
    rows = [
        [
            setting.name,
            f"{setting.tokens / max(setting.rows, 1):.1f}",
            *(_percent(setting.finish[reason], setting.rows) for reason in reasons),
            *(f"{setting.measure(name):.3f}" for name in MEASURES),
        ]
        for setting in settings
    ]
    headings = ["setting", "tokens per text", *(f"ends by {reason}" for reason in reasons)]
    headings += [name.replace("_", "-") for name in MEASURES]
    return f"## Texts\n\n{format_table(headings, rows)}"


def _predictors(findings: Findings) -> str:
    rows = [
        [name, task, *(auroc[key] for key in PREDICTORS)]
        for (name, task), auroc in findings.predictors.items()
    ]
    text = (
        "The area under the ROC curve of a text's own measures as predictors of a score below 1: "
        "0.5 is chance, 1 is perfect. Over all tasks it also reflects which tasks are hard; within "
        "a task it does not."
    )
    headings = ["setting", "task", *(key.replace("_", " ") for key in PREDICTORS)]
    return f"## Predictors of error\n\n{text}\n\n{format_table(headings, rows)}"


def _reliability(findings: Findings) -> str:
    tables = []
    for name, bins in findings.bins.items():
        rows = [
            [f"{b.low:.3f} to {b.high:.3f}", f"{b.mean:.3f}", b.number, f"{b.score:.3f}"]
            for b in bins
        ]
        headings = ["mean entropy of the text, bits", "mean", "texts", "mean score"]
        tables.append(f"`{name}`:\n\n{format_table(headings, rows)}")
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
        f"On {total} positions of held-out text whose true next-token distributions are known. "
        "Regimes follow the model's own entropy."
    )
    headings = ["regime", "share", "true entropy", "model's", "mean absolute error"]
    headings += ["true varentropy", "model's", "mean absolute error"]
    return f"## Entropy against the truth\n\n{text}\n\n{format_table(headings, rows)}"


def _tuning(tuned: Sequence[Tuned]) -> str:
    rows = [
        [
            row.sampler,
            row.candidates,
            f"{row.default_score:.3f}",
            f"{row.score:.3f}",
            ", ".join(f"`{key}={value}`" for key, value in row.values.items()) or "unchanged",
        ]
        for row in tuned
    ]
    text = (
        "Each sampler's best candidate on the tuning split, which shares no item with the test "
        "split; on a tie the cheaper one. The unchanged sampler is the first candidate."
    )
    headings = ["sampler", "candidates", "unchanged", "best score", "chosen"]
    return f"## Tuning\n\n{text}\n\n{format_table(headings, rows)}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _names_in(counters: Iterable[Mapping[str, int]]) -> list[str]:
    return sorted({name for counter in counters for name in counter})
