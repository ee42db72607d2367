"""The Markdown page of a study's findings, `summary.md`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from entropix_jax.lab.digest import PREDICTORS, Digest
from entropix_jax.lab.findings import Findings, Tuned
from entropix_jax.lab.markdown import format_difference, format_name, format_share, format_table
from entropix_jax.lab.task_tables import format_tasks
from entropix_jax.lab.truth import Truth
from entropix_jax.lab.votes import CHOICES, WARM_UP
from entropix_jax.names import REGIMES

_MEASURES = ("perplexity", "logprob", "distinct_1", "distinct_2", "repetition")


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
    parts += [format_tasks(findings.comparison, findings.digest)]
    if findings.lines:
        parts += [_scores(findings)]
        if len(findings.sizes) > 1:
            parts += [_several(findings)]
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


def _scores(findings: Findings) -> str:
    changes = any(line.over_base for line in findings.lines)
    rows = []
    for line in findings.lines:
        setting = line.setting
        rows.append(
            [
                setting.name,
                line.score,
                f"{line.cost:.1f}",
                *format_difference(line.over_baseline),
                *(format_difference(line.at_equal_cost) if len(findings.sizes) > 1 else ()),
                *(format_difference(line.over_base) if changes else ()),
            ]
        )
    headings = ["setting", "score [95 %]", "forwards"]
    headings += [f"over {findings.baseline}", ""]
    if len(findings.sizes) > 1:
        headings += ["at equal forwards", ""]
    if changes:
        headings += ["over its base", ""]
    text = (
        "The mean over the scored tasks. `forwards` counts the token positions evaluated per "
        "answer beyond its prompt, rollouts and retracted tokens included, and is averaged like "
        f"the score. The intervals over `{findings.baseline}` are joint, as above; the others "
        "stand each for itself."
    )
    if len(findings.sizes) > 1:
        text += (
            " `at equal forwards` is the difference from the score of majority votes of "
            f"`{findings.baseline}` (of {', '.join(map(str, findings.sizes))} samples) with the "
            "same forwards, interpolated linearly; below the cost of one sample, from one sample."
        )
    return f"## Scores\n\n{text}\n\n{format_table(headings, rows)}"


def _several(findings: Findings) -> str:
    """All kinds over all tasks, and of the most samples by task."""
    rows = [
        [*of, *(f"{score} ({cost:.0f})" for cost, score in sizes)]
        for of, sizes in findings.several.items()
    ]
    numbers = ["1 sample", *(f"{k} samples" for k in findings.sizes[1:])]
    headings = ["setting", "kind", *(f"{number} (forwards)" for number in numbers)]
    text = (
        "One answer from several samples, by a vote or by the choice of one of them. A weighted "
        "vote weighs samples by their lowest group confidence (Fu et al. 2025): all or the surest "
        f"ones. Early end: the first {WARM_UP} samples set the threshold that so many of them stay "
        "above; a later one ends below it, and has no vote. Best: the sample with the highest "
        "score, as a perfect verifier would choose: a bound. Likeliest: by the mean ln p per "
        "token. Surest: by the lowest group confidence. Tasks of free text have no votes: in a "
        "mean over tasks one of their samples counts for every size."
    )
    parts = [f"## Several samples\n\n{text}", format_table(headings, rows)]
    if len(findings.several_by_task) > 1:
        most = findings.sizes[-1]
        parts += [
            f"`{task}`, {most} samples (forwards):\n\n{_several_of_task(findings, task)}"
            for task in findings.several_by_task
        ]
    return "\n\n".join(parts)


def _several_of_task(findings: Findings, task: str) -> str:
    several = findings.several_by_task[task]
    kinds = dict.fromkeys(kind for _, kind in several)
    if task in findings.digest.free:
        kinds = dict.fromkeys(CHOICES)
    rows = []
    for name in findings.digest.settings:
        last = [several[name, kind][-1] for kind in kinds]
        rows.append([name, *(f"{score} ({cost:.0f})" for cost, score in last)])
    return format_table(["setting", *kinds], rows)


def _occupancy(digest: Digest) -> str:
    rows = [
        [
            setting.name,
            setting.tokens,
            *(format_share(setting.regimes[r], setting.tokens) for r in REGIMES),
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
            *(format_share(setting.actions[action], setting.tokens) for action in actions),
            format_share(setting.retracted, setting.tokens),
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
            *(format_share(setting.finish[reason], setting.rows) for reason in reasons),
            *(f"{setting.mean(name):.3f}" for name in _MEASURES),
        ]
        for setting in settings
    ]
    headings = ["setting", "tokens per text", *(f"ends by {reason}" for reason in reasons)]
    headings += [format_name(name) for name in _MEASURES]
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
            format_share(truth.number, total),
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


def _names_in(counters: Iterable[Mapping[str, int]]) -> list[str]:
    return sorted({name for counter in counters for name in counter})
