"""The output of a study: tables, plots and summary, all made from its rows alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import pandas as pd

from entropix_jax.batch.records import content_hash
from entropix_jax.errors import UserError, nearest
from entropix_jax.host.files import read_bytes, replacing
from entropix_jax.lab.findings import SELF_BLEU, analyse
from entropix_jax.lab.page import format_page
from entropix_jax.lab.plots import draw_plots
from entropix_jax.lab.results import Row, name_trial, read_rows, results_frame, write_results
from entropix_jax.lab.sweep import NONE, Comparison, Sweep, Tuning, list_names
from entropix_jax.lab.tasks.registry import find_task
from entropix_jax.lab.tasks.task import Task
from entropix_jax.lab.trials import TUNING, user_code

_SIZES = (1, 3, 5, 7, 9, 15, 25, 41)  # samples for one answer; odd, as two that differ tie


def find_tasks(sweep: Sweep) -> list[Task]:
    """Finds the tasks of a sweep, and checks the keys that name tasks.

    Raises:
        UserError: an unknown task, two tasks with one name, or a comparison without a score or
            samples.
    """
    tasks = [find_task(name) for name in sweep.tasks]
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise UserError(f"two tasks are called '{max(names, key=names.count)}'")
    for key in ("items", "skip", "most_seeds", "max_new_tokens"):
        getattr(sweep, key).check_tasks(key, names)
    if sweep.tuning is not None:
        sweep.tuning.items.check_tasks("tuning.items", names)
        if not any(task.scored for task in tasks):
            raise UserError(f"tuning: no score to tune by: {', '.join(names)} has none")
    for comparison in sweep.comparisons:
        _check_comparison(comparison, sweep, {task.name: task for task in tasks})
    return tasks


def _check_comparison(comparison: Comparison, sweep: Sweep, tasks: Mapping[str, Task]) -> None:
    key = comparison.key
    for name in comparison.tasks:
        if name not in tasks:
            raise UserError(f"{key}.tasks = '{name}': no such task{nearest(name, [*tasks])}")
        if not tasks[name].scored:
            raise UserError(f"{key}.tasks = '{name}': has no score")
    compared = comparison.tasks or [name for name, task in tasks.items() if task.scored]
    if not compared:
        raise UserError(f"{key}: no score to compare: {', '.join(tasks)} has none")
    if comparison.by == SELF_BLEU:
        for name in compared:
            if len(_seeds(sweep, name)) < 2:
                raise UserError(f"{key}.by = '{SELF_BLEU}': task '{name}' has one seed: needs two")


def _seeds(sweep: Sweep, task: str) -> tuple[int, ...]:
    return sweep.seeds[: sweep.most_seeds.of(task) or None]


def write_output(
    sweep: Sweep,
    tasks: Sequence[Task],
    settings: Sequence[str],
    tuning: Sequence[Row],
    test: Sequence[Row],
    about: Mapping[str, Any],
    folder: Path,
) -> None:
    """Computes the findings, and writes tables, plots and the summary.

    Args:
        tuning: rows of the candidates; empty without tuning.
        test: rows by item, then setting, then seed.
        about: describes the run, for the summary.
    """
    results = results_frame(test)
    fewest = min(len(_seeds(sweep, task.name)) for task in tasks)
    findings = analyse(
        results,
        {task.name: task.votes for task in tasks},
        baselines=(sweep.baseline, *sweep.baselines),
        sizes=[k for k in _SIZES if k <= fewest],
        watched=list(dict.fromkeys((settings[0], sweep.baseline))),
        tuned=find_best(tuning, sweep.tuning),
        comparisons=sweep.comparisons,
    )
    write_results(results, folder / "results.csv")
    write_json(folder / "findings.json", findings.to_json())
    plots = draw_plots(findings, folder / "plots")
    page = format_page(findings, about)
    page += "".join(f"\n![{name}](plots/{name}.png)\n" for name in plots)
    with replacing(folder / "summary.md") as scratch:
        scratch.write_text(page, encoding="utf-8", errors="backslashreplace")


def describe(sweep: Sweep, tasks: Sequence[Task], settings: int, rows: int) -> dict[str, Any]:
    """Describes a study for its summary."""
    return {
        "tasks": [task.name for task in tasks],  # without paths
        "split": sweep.split,
        "items of each task": sweep.items.to_json() or "all",
        **({"items skipped": sweep.skip.to_json()} if sweep.skip != NONE else {}),
        "seeds": list(sweep.seeds),
        **({"seeds of a task": sweep.most_seeds.to_json()} if sweep.most_seeds != NONE else {}),
        **({"lookup": Path(sweep.lookup).name} if sweep.lookup else {}),
        "settings": settings,
        "rows": rows,
    }


def find_best(rows: Sequence[Row], tuning: Tuning | None) -> pd.DataFrame:
    """Returns `Findings.tuned`, and as `best` the name of each sampler's candidate with the highest
    score; on a tie the cheaper one, then the first."""
    if tuning is None or not rows:
        return pd.DataFrame()
    frame = results_frame(rows)
    items = frame.groupby(["setting", "task", "item"])[["score", "forwards"]].mean()
    scores = items["score"].groupby(["setting", "task"]).mean().groupby("setting").mean()
    costs = items["forwards"].groupby("setting").mean()
    varied = frame.drop_duplicates("setting").set_index("setting")["varied"]
    found = []
    for sampler, group in tuning.candidates.items():
        names = [one.name for one in group]
        best = max(names, key=lambda name: (round(scores[name], 9), -costs[name]))
        found.append((sampler, len(group), scores[names[0]], scores[best], varied[best], best))
    columns = ["sampler", "candidates", "unchanged", "score", "values", "best"]
    return pd.DataFrame(found, columns=columns)


def recompute(sweep: Sweep, path: str, folder: Path) -> None:
    """Writes the output of a study from its stored rows, without a model.

    Args:
        path: a file for `read_rows`.

    Raises:
        UserError: the file is not readable, or its rows are not those of the sweep.
    """
    tasks, settings = find_tasks(sweep), list_names(sweep.settings, sweep.tuning)
    digest, rows = content_hash(read_bytes(Path(path))), read_rows(path)
    test = _match(path, rows, "test", sweep, tasks, settings)
    tuning: list[Row] = []
    if any(row["phase"] == TUNING for row in rows.values()) and (plan := sweep.tuning):
        of_tuning = replace(sweep, split="tuning", items=plan.items, seeds=plan.seeds)
        of_tuning = replace(of_tuning, skip=NONE, most_seeds=NONE)
        candidates = [one.name for group in plan.candidates.values() for one in group]
        scored = [task for task in tasks if task.scored]
        tuning = _match(path, rows, TUNING, of_tuning, scored, candidates)
    if len(rows) > len(test) + len(tuning):
        known = {name_trial(row) for row in (*tuning, *test)}
        other = next(name for name in rows if name not in known)
        raise UserError(f"{path}: has the row '{other}', which the sweep does not have")
    about = {
        "description": sweep.description,
        "rows of": f"{Path(path).name} ({digest})",
        **describe(sweep, tasks, len(settings), len(test)),
    }
    write_output(sweep, tasks, settings, tuning, test, about, folder)


def _match(
    path: str,
    rows: Mapping[str, Row],
    phase: str,
    sweep: Sweep,
    tasks: Sequence[Task],
    settings: Sequence[str],
) -> list[Row]:
    """Returns the rows of a phase in the order of its trials. UserError if one is missing."""
    found = []
    for task in tasks:
        own = (row for row in rows.values() if (row["phase"], row["task"]) == (phase, task.name))
        items = dict.fromkeys(row["item"] for row in own)
        number = _count_items(task, sweep, len(items))
        if len(items) != number:
            raise UserError(
                f"{path}: has {len(items)} items of task '{task.name}' ({phase}), not {number}"
            )
        for key in product([phase], [task.name], items, settings, _seeds(sweep, task.name)):
            name = "/".join(map(str, key))
            if name not in rows:
                raise UserError(f"{path}: lacks the row '{name}' of the sweep")
            found.append(rows[name])
    return found


def _count_items(task: Task, sweep: Sweep, found: int) -> int:
    """The number of items that rows must have: those of the sweep, or all of a smaller task."""
    most, first = sweep.items.of(task.name) or 0, sweep.skip.of(task.name) or 0
    if found >= most:
        return most or max(found, 1)
    try:
        with user_code(f"task '{task.name}': items"):
            items = task.items(sweep.split, chat=False)
            return sum(1 for _ in islice(items, first, first + most))
    except UserError:  # the task's file is missing
        return most


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file. UserError if that fails."""
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
