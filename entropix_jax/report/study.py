"""The page of a study: what `ablate` and `evaluate` leave in a folder, to sort, filter and open.

All figures are the study's own: `findings.json` has them, and nothing is computed anew here.
`study.json` says what was run and each setting's parameters, `results.csv`, where it is there, what
was answered.
"""

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.files import allow_long_cells, opening, read_bytes
from entropix_jax.names import FINDINGS_FORMAT
from entropix_jax.report.embedding import packed
from entropix_jax.report.page import ended, render
from entropix_jax.report.records import MOST_BYTES
from entropix_jax.report.shapes import Each, Maybe, check_regimes, check_shape, json_object
from entropix_jax.templating import as_text

_ABOUT, _FINDINGS, _RESULTS = "study.json", "findings.json", "results.csv"

_INTERVAL = {"value": Maybe(float), "low": Maybe(float), "high": Maybe(float)}
_DIFFERENCE = Maybe(_INTERVAL | {"verdict": str})
_BIN = dict.fromkeys(("low", "high", "mean", "right"), float) | {"number": int}
_COUNTS = ("tokens", "rows", "positions", "errors", "retracted")
_ABOUT_SHAPE = {
    "settings": Each({"sampler": str, "parameters": dict}),
    "description?": Maybe(str),
}
_FINDINGS_SHAPE = {
    "tasks": [str],
    "baseline": str,
    "items": [{"task": str, "item": str}],
    "settings": [
        {
            "name": str,
            "sampler": str,
            "varied": dict,
            **dict.fromkeys(_COUNTS, int),
            "regimes": Each(int),
            **dict.fromkeys(("actions", "finish"), dict),
            "scores": [Maybe(float)],
            "forwards": [float],
            "line": Maybe(
                {
                    "score": _INTERVAL,
                    "by_task": [float],
                    "forwards": float,
                    **dict.fromkeys(
                        ("over_baseline", "at_equal_forwards", "over_base"), _DIFFERENCE
                    ),
                    "votes": [{"samples": int, "forwards": float, "score": _INTERVAL}],
                }
            ),
        }
    ],
    "predictors": [{"setting": str, "task": str, "auroc": Each(_INTERVAL)}],
    "reliability": [{"setting": str, "bins": [_BIN]}],
    "truth": [{"regime": str, "true_entropy": float, "model_entropy": float}],
    "tuned": [{"sampler": str, "candidates": int, "score": float, "values": dict}],
}
_COLUMNS = {"task", "item", "setting", "seed", "score", "answer", "expected", "finish_reason"}
_COLUMNS |= {"error", "tokens", "forwards", "text"}


def study_page(folder: Path) -> str:
    """The page of a study's folder.

    The answers' texts are left out where the page would be larger than `MOST_BYTES` with them; a
    note on standard error says so.

    Raises:
        UserError: the folder lacks what a study that came to its end leaves, or it is damaged.
    """
    about, findings = _about(folder), _findings(folder)
    settings = [one["name"] for one in findings["settings"]]
    for name in settings:
        if name not in about["settings"]:
            raise UserError(f"{folder / _ABOUT}: lacks setting {json.dumps(name)}")
    facts = {
        "name": folder.resolve().name,
        "about": {k: as_text(v) for k, v in about.items() if k not in ("settings", "description")},
        "description": about.get("description") or "",
        "settings": len(settings),
        "items": len(findings["items"]),
        "scored": any(one["line"] for one in findings["settings"]),
        "votes": any(one["line"] and len(one["line"]["votes"]) > 1 for one in findings["settings"]),
        "truth": bool(findings["truth"]),
        "tuned": bool(findings["tuned"]),
        "predictors": bool(findings["predictors"]),
        "responses": bool(_varied(findings)),
    }
    study = {**findings, "parameters": {name: about["settings"][name] for name in settings}}
    figures = packed([json.dumps(study).encode()])
    results = folder / _RESULTS
    answers = list(_answers(results, findings)) if results.is_file() else None
    for texts in (True, False):
        facts |= {"answers": answers is not None, "texts": texts and answers is not None}
        payload = packed(_lines(answers or [], texts))
        page = render("study", {"facts": facts}, {"figures": figures, "answers": payload})
        if len(page) <= MOST_BYTES or answers is None:
            break
    if answers is not None and not facts["texts"]:
        print(
            f"note: the texts of the answers would make the page too large: {results} has them",
            file=sys.stderr,
        )
    return page


def _about(folder: Path) -> dict[str, Any]:
    path = folder / _ABOUT
    if not path.is_file():
        raise UserError(
            f"{folder}: no {_ABOUT}: not the folder of a study, or of one that has not come to its"
            " end: the command that began it goes on with it"
        )
    about = json_object(read_bytes(path), str(path))
    check_shape(about, _ABOUT_SHAPE, str(path))
    return about


def _findings(folder: Path) -> dict[str, Any]:
    path = folder / _FINDINGS
    if not path.is_file():
        raise UserError(
            f"{folder}: no {_FINDINGS}: an earlier version made this study: the same command"
            " writes it, and runs no row again"
        )
    findings = json_object(read_bytes(path), str(path))
    version = findings.get("format_version")
    if version != FINDINGS_FORMAT:
        raise UserError(f"{path}: of format {version}, this version reads {FINDINGS_FORMAT}")
    check_shape(findings, _FINDINGS_SHAPE, str(path))
    for number, one in enumerate(findings["settings"]):
        where = f"{path}: settings[{number}]"
        for name in ("scores", "forwards"):
            if len(one[name]) != len(findings["items"]):
                raise UserError(f"{where}.{name}: not one for each of the items")
        check_regimes(one["regimes"], f"{where}.regimes")
    _agree(findings, path)
    return findings


def _agree(findings: Mapping[str, Any], path: Path) -> None:
    """Refuses figures that are not of the same things in all settings."""
    lines = [one["line"] for one in findings["settings"]]
    for number, line in enumerate(lines):
        where = f"{path}: settings[{number}].line"
        if line is None:
            if any(lines):
                raise UserError(f"{where}: null, where other settings have one")
            continue
        if len(line["by_task"]) != len(findings["tasks"]):
            raise UserError(f"{where}.by_task: not one for each of the tasks")
        sizes = [[vote["samples"] for vote in one["votes"]] for one in (lines[0] or line, line)]
        if sizes[0] != sizes[1]:
            raise UserError(f"{where}.votes: not as those of settings[0]")
    items = [(one["task"], one["item"]) for one in findings["items"]]
    if len(set(items)) < len(items):
        raise UserError(f"{path}: items: one stands there twice")
    for number, one in enumerate(findings["predictors"]):
        if one["auroc"].keys() != findings["predictors"][0]["auroc"].keys():
            raise UserError(
                f"{path}: predictors[{number}].auroc: not of the same measures as predictors[0]"
            )


def _answers(path: Path, findings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Item by item, in the study's order: what was expected, and its rows: the number of the
    setting, seed, score, answer, tokens, forwards, what ended it, error, text."""
    settings = {one["name"]: i for i, one in enumerate(findings["settings"])}
    items = {(one["task"], one["item"]): i for i, one in enumerate(findings["items"])}
    found: list[dict[str, Any]] = [{"expected": None, "rows": []} for _ in items]
    for line, row in _rows(path):
        where = f"{path}: line {line}"
        item = items.get((row["task"], row["item"]))
        setting = settings.get(row["setting"])
        if item is None or setting is None:
            name = row["item"] if item is None else row["setting"]
            raise UserError(f"{where}: {json.dumps(name)} is not in {_FINDINGS}")
        try:
            numbers = [int(row["seed"]), float(row["score"]) if row["score"] else None]
            sizes = [int(row["tokens"]), int(row["forwards"])]
        except ValueError:
            raise UserError(f"{where}: a number is none") from None
        found[item]["expected"] = row["expected"]
        end = ended(row["finish_reason"] or None)
        answered = [row["answer"], *sizes, end, row["error"], row["text"]]
        found[item]["rows"].append([setting, *numbers, *answered])
    yield from found


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    allow_long_cells()
    reader: Any = None
    try:
        with opening(path) as file:
            lines = io.TextIOWrapper(file, encoding="utf-8", newline="")
            reader = csv.DictReader(lines, strict=True)
            missing = sorted(_COLUMNS - set(reader.fieldnames or ()))
            if missing:
                raise UserError(f"{path}: line 1: no column '{missing[0]}'")
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(
                        f"{path}: line {reader.line_num}: cells are missing or too many"
                    )
                yield reader.line_num, row
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: not CSV: {error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8") from None


def _lines(answers: list[dict[str, Any]], texts: bool) -> Iterator[bytes]:
    for one in answers:
        rows = one["rows"] if texts else [row[:-1] for row in one["rows"]]
        yield json.dumps({**one, "rows": rows}).encode() + b"\n"


def _varied(findings: Mapping[str, Any]) -> set[str]:
    """The keys that take several values."""
    values: dict[str, set[str]] = {}
    for one in findings["settings"]:
        for key, value in one["varied"].items():
            values.setdefault(key, set()).add(json.dumps(value))
    return {key for key, found in values.items() if len(found) > 1}
