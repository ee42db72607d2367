"""Formats a study's findings as a Markdown page, `summary.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pandas as pd

from entropix_jax.lab.findings import SCORE, SELF_BLEU, TEXT_MEASURES, Findings
from entropix_jax.lab.measures import UNCERTAINTY
from entropix_jax.lab.statistics import NOT_SIGNIFICANT, Interval
from entropix_jax.lab.sweep import Comparison
from entropix_jax.lab.uncertainty import QUALITIES
from entropix_jax.lab.votes import VOTES
from entropix_jax.names import REGIMES

_MEASURES = ("perplexity", "logprob", "distinct_1", "distinct_2", "repetition")
_NAMES = {
    "logprob": "ln p per token",
    "distinct_1": "distinct-1",
    "distinct_2": "distinct-2",
    "self_bleu": "Self-BLEU",
    "repeated_4grams": "repeated 4-grams",
}


def format_name(measure: str) -> str:
    """Formats a measure's name for headings."""
    return _NAMES.get(measure, measure.replace("_", " "))


def format_table(table: pd.DataFrame) -> str:
    """Formats a Markdown table without the index. Escapes pipes and line breaks in cells."""

    def cell(value: Any) -> str:
        return str(value).replace("|", "\\|").replace("\n", " ")

    table = table.astype(object).map(cell).rename(columns=cell)
    text: str = table.to_markdown(index=False, disable_numparse=True)
    return text


def format_page(findings: Findings, about: Mapping[str, Any]) -> str:
    """Formats the page. `about` describes the run: JSON values by name."""
    described = (
        f"- {name}: {_describe(value)}" for name, value in about.items() if name != "description"
    )
    title = f"# {about['description'] or 'A study of samplers'}\n"
    return "\n\n".join([title, "\n".join(described), *_sections(findings)]) + "\n"


def _describe(value: Any) -> str:
    """Formats a JSON value as one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _sections(findings: Findings) -> Iterator[str]:
    yield from _tasks(findings)
    for baseline in findings.baselines if len(findings.differences) else ():
        yield from _differences(findings, baseline)
    if findings.overall:
        yield from _scores(findings)
    if len(findings.several):
        yield from _several(findings)
    for number, compared in enumerate(findings.comparisons, 1):
        yield from _comparison(number, *compared)
    yield from _shares(findings)
    if len(findings.uncertainty):
        yield from _uncertainty(findings)
    if len(findings.tuned):
        yield from _tuning(findings.tuned)


def _spread(frame: pd.DataFrame, column: str, cell: Callable[[Any], str] = str) -> pd.DataFrame:
    """Pivots the estimates of a frame to a table of settings by the values of a column."""
    cells = frame.assign(estimate=frame["estimate"].map(cell))
    table = cells.pivot(index="setting", columns=column, values="estimate")
    table = table.reindex(index=frame["setting"].unique(), columns=frame[column].unique())
    return table.reset_index()


def _difference(interval: Interval | None, verdict: str | None = None) -> str:
    """Formats a difference with its interval, and its verdict unless it is not significant."""
    if interval is None or not (text := interval.format("+.3f")):
        return ""
    verdict = verdict or interval.verdict
    return text if verdict == NOT_SIGNIFICANT else f"{text} **{verdict}**"


def _tasks(findings: Findings) -> Iterator[str]:
    """Formats scores, and measures by task: a scored task's own, and its samples' diversity."""
    values = findings.values
    hidden = [name for name in TEXT_MEASURES if name != SELF_BLEU]
    measures = values[
        (values["measure"] != SCORE) & (values["compared"] | ~values["measure"].isin(hidden))
    ]
    yield "## Tasks"
    text = (
        "A score is a mean over seeds, then items; over all tasks, the mean of the scored ones. A "
        "measure is a sum over all texts over another, such as words over all words. Intervals "
        "are 95 % bootstrap intervals over items."
    )
    if SELF_BLEU in [*values["measure"]]:
        text += (
            " Self-BLEU (Zhu et al. 2018) compares the samples of an item with each other; 1: all "
            "are the same."
        )
    yield text
    if findings.overall:
        yield format_table(_spread(values[values["measure"] == SCORE], "task"))
    for task, own in measures.groupby("task", sort=False):
        costs = findings.costs[findings.costs["task"] == task][["tokens", "forwards"]]
        table = _spread(own, "measure").rename(columns=format_name)
        table[["tokens", "forwards"]] = costs.map("{:.1f}".format).to_numpy()
        yield f"`{task}`:\n\n{format_table(table)}"


def _differences(findings: Findings, baseline: str) -> Iterator[str]:
    yield f"## Differences from {baseline}"
    yield (
        "Paired differences with joint 95 % intervals (max-t bootstrap): in 95 % of studies, the "
        "intervals of a column of scores, or of all columns of a task without a score, all contain "
        "the true differences. **higher** and **lower** mark differences that are significant at "
        "the joint 95 % level. The others are not significant."
    )
    found = findings.differences[findings.differences["baseline"] == baseline]
    by_score = found["measure"] == SCORE
    if findings.overall:
        yield format_table(_spread(found[by_score], "task", _difference))
    for task, own in found[~by_score].groupby("task", sort=False):
        table = _spread(own, "measure", _difference).rename(columns=format_name)
        yield f"`{task}`:\n\n{format_table(table)}"


def _scores(findings: Findings) -> Iterator[str]:
    baseline, scores = findings.baselines[0], findings.scores
    values, differences = (
        frame[(frame["task"] == findings.overall) & (frame["measure"] == SCORE)]
        for frame in (findings.values, findings.differences)
    )
    over = differences[differences["baseline"] == baseline].set_index("setting")["estimate"]
    columns = {
        "setting": scores["setting"],
        "score [95 %]": [*values["estimate"]],
        "forwards": scores["forwards"].map("{:.1f}".format),
        f"over {baseline}": [_difference(over.get(name)) for name in scores["setting"]],
    }
    yield "## Scores"
    text = (
        "The mean over the scored tasks. `forwards` counts the token positions evaluated per "
        "answer beyond its prompt, rollouts and retracted tokens included, and is averaged like "
        f"the score. Differences from `{baseline}` have joint intervals, as above."
    )
    if len(findings.sizes) > 1:
        columns["at equal forwards"] = scores["at_equal_forwards"].map(_difference)
        text += (
            " `at equal forwards` is the difference from the score of majority votes of "
            f"`{baseline}` (of {', '.join(map(str, findings.sizes))} samples) with the "
            "same forwards, interpolated linearly; below the cost of one sample, from one sample. "
            "Its intervals are single ones, without a correction for many comparisons, so it is "
            "exploratory until another study replicates it."
        )
    yield text
    yield format_table(pd.DataFrame(columns))


def _several(findings: Findings) -> Iterator[str]:
    """Formats all kinds over all tasks, and those with the most samples by task."""
    several = findings.several
    cells = [
        f"{estimate} ({forwards:.0f})"
        for estimate, forwards in zip(several["estimate"], several["forwards"], strict=True)
    ]
    several = several.assign(estimate=cells)
    yield "## Several samples"
    yield (
        "One answer from several samples, by a vote or by the choice of one of them. A weighted "
        "vote weighs samples by their lowest group confidence (Fu et al. 2025). Best: the sample "
        "with the highest score, as a perfect verifier would choose: a bound. Likeliest: by the "
        "mean ln p per token. Surest: by the lowest group confidence. Tasks of free text have no "
        "votes: in a mean over tasks one of their samples counts for every size."
    )
    whole = several[several["task"] == findings.overall]
    table = whole.pivot(index=["setting", "kind"], columns="samples", values="estimate")
    table = table.reindex(pd.MultiIndex.from_frame(whole[["setting", "kind"]].drop_duplicates()))
    headings = {k: f"{k} sample{'s' * (k > 1)} (forwards)" for k in findings.sizes}
    yield format_table(table.rename(columns=headings).reset_index())
    tasks = [task for task in several["task"].unique() if task != findings.overall]
    for task in tasks:
        last = several[(several["task"] == task) & (several["samples"] == findings.sizes[-1])]
        if task in findings.free:
            last = last[~last["kind"].isin(VOTES)]
        table = format_table(_spread(last, "kind"))
        yield f"`{task}`, {findings.sizes[-1]} samples (forwards):\n\n{table}"


def _comparison(number: int, comparison: Comparison, found: pd.DataFrame) -> Iterator[str]:
    cost = format_name(comparison.by)
    yield f"## Comparison {number}: at equal {cost}"
    text = (
        f"Differences of scores over {', '.join(comparison.tasks) or 'the scored tasks'} from a "
        f"curve at the same {cost}: straight lines between the points marked `curve`, and beyond "
        "them the score of the nearest point (`below`, `above`). All differences of the table have "
        "joint 95 % intervals (max-t bootstrap)."
    )
    if comparison.margin is not None:
        text += f" **equivalent**: not significant, and within +-{comparison.margin:g}."
    yield text
    differences = map(_difference, found["difference"], found["verdict"])
    columns = {
        "setting": found["setting"],
        "": found["place"],
        cost: found[comparison.by],
        "score [95 %]": found[SCORE],
        "difference": [*differences],
    }
    yield format_table(pd.DataFrame(columns).fillna(""))


def _shares(findings: Findings) -> Iterator[str]:
    """Formats tables of regimes, actions and finish reasons."""
    rows = findings.rows.groupby("setting", sort=False)
    sums, tokens = rows.sum(numeric_only=True), rows["tokens"].sum()
    yield "## Regimes"
    regimes = _percent(sums[[f"regime_{regime}" for regime in REGIMES]], tokens)
    table = regimes.set_axis([*REGIMES], axis=1)
    table.insert(0, "tokens", tokens)
    yield format_table(table.reset_index())

    yield "## Actions\n\nShares of the tokens."
    names = sorted(name for name in sums if name.startswith("action_") and sums[name].any())
    table = _percent(sums[[*names, "retracted"]], tokens)
    table = table.rename(columns=lambda name: name.removeprefix("action_"))
    table["forwards per token"] = (sums["forwards"] / tokens.clip(1)).map("{:.2f}".format)
    yield format_table(table.reset_index())

    yield "## Texts"
    ends = pd.crosstab(findings.rows["setting"], findings.rows["finish_reason"]).loc[sums.index]
    table = _percent(ends, rows.size()).rename(columns="ends by {}".format)
    table.insert(0, "tokens per text", rows["tokens"].mean().map("{:.1f}".format))
    table[[*map(format_name, _MEASURES)]] = findings.means[[*_MEASURES]].map("{:.3f}".format)
    yield format_table(table.reset_index())


def _percent(parts: pd.DataFrame, whole: pd.Series) -> pd.DataFrame:
    """Formats shares as percentages. Empty if the whole is 0."""
    shares = 100 * parts.div(whole.where(whole > 0), axis=0)
    return shares.map("{:.1f} %".format, na_action="ignore").fillna("")


def _uncertainty(findings: Findings) -> Iterator[str]:
    yield "## Uncertainty"
    yield (
        "How well a measure of an answer tells wrong answers (a score below 1) from right ones. "
        "`+`: a higher value means more uncertainty; `-`: less. AUROC: 0.5 is chance, 1 perfect. "
        "AURC: the area under the risk-coverage curve, the share of wrong answers among the most "
        "certain ones; E-AURC: its excess over the best order. ECE: the expected calibration error "
        "of P(wrong), an isotonic regression on the other half of the items, in 15 bins of equal "
        "mass; small samples bias it upwards. Intervals are 95 % bootstrap intervals over items, "
        "those of AUROC joint over the measures of a table."
    )
    for (task, setting), own in findings.uncertainty.groupby(["task", "setting"], sort=False):
        names = own["measure"]
        columns = {
            "measure": names.map(format_name),
            "": names.map(lambda name: "+" if UNCERTAINTY[name] > 0 else "-"),
            **{name.upper().replace("_", "-"): own[name] for name in QUALITIES},
        }
        answers, wrong = own[["answers", "wrong"]].iloc[0]
        table = format_table(pd.DataFrame(columns))
        yield f"`{task}`, {setting}: {answers} answers, {wrong} wrong\n\n{table}"


def _tuning(tuned: pd.DataFrame) -> Iterator[str]:
    yield "## Tuning"
    yield (
        "Each sampler's best candidate on the tuning split, which shares no item with the test "
        "split; on a tie the cheaper one. The unchanged sampler is the first candidate."
    )
    chosen = [
        ", ".join(f"`{key}={value}`" for key, value in values.items()) or "unchanged"
        for values in tuned["values"]
    ]
    scores = tuned[["unchanged", "score"]].map("{:.3f}".format)
    table = tuned[["sampler", "candidates"]].assign(
        **{"unchanged": scores["unchanged"], "best score": scores["score"], "chosen": chosen}
    )
    yield format_table(table)
