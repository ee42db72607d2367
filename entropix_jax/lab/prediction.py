"""Predicts which tokens decide an answer from measures of their distributions.

The base model has the index of the token in the answer and the probabilities of the two most likely
tokens. Further measures are judged by what they add to it. All predictions are by ridge regression,
cross-validated over prompts. The bootstrap resamples prompts and repeats the cross-validation, with
all copies of a prompt in one fold. A resample has fewer distinct prompts to learn from, so its
predictions are worse and the intervals wide.

Legend: T tokens, P prompts, D features with the intercept, K targets, R resamples, F folds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from entropix_jax.batch.storage import open_file, read_lines
from entropix_jax.errors import UserError
from entropix_jax.lab.outcomes import ATTENTION, MEASURES
from entropix_jax.lab.statistics import joint_intervals
from entropix_jax.lab.uncertainty import separate

Floats = NDArray[np.float64]

BASE = ("index", "p1", "p2")
ADDITIONS: Mapping[str, tuple[str, ...]] = {
    "h": ("entropy",),
    "u": ("varentropy",),
    "h and u": ("entropy", "varentropy"),
    "attention": ATTENTION,
    "attention per head": ("heads",),
}
SINGLE: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*BASE, "margin")},
    **ADDITIONS,
}
# What varentropy adds to entropy: the difference of two additions.
BEYOND = {"u beyond base + h": ("h and u", "h")}
_HEADS = "heads"
# Columns of targets with their names. A binary target has an AUROC, another one Spearman's rho.
TARGETS = {"pivot": "pivot", "mistake": "mistake", "strength": "F", "excess": "F excess"}
# Labels of tokens that a low varentropy announces according to document 004, with their names.
CLAIMS = {
    "end": "is the end token",
    "before": "the end token is next",
    "settled": "no pivot from here on",
}
# Measures that are compared as they are, with a sign: the higher the more likely the label.
DIRECTED: Mapping[str, tuple[str, int]] = {
    "low u": ("varentropy", -1),
    "low h": ("entropy", -1),
    "high p1": ("p1", 1),
    "high index": ("index", 1),
}
_BINARY = ("pivot", "mistake", *CLAIMS)
_MEASURED = (*BASE, "pivot", "mistake", *MEASURES, _HEADS)  # of every token
_FEWEST = 20  # positive tokens of a target, and negative ones
FOLDS = 5
_RESAMPLES = 1000
_BLOCK = 20  # resamples that are fitted together
_EPSILON = 1e-6  # penalty of the intercept, and the least deviation of a feature


@dataclass(frozen=True)
class Tokens:
    """The tokens of a task's answers: columns of T rows, and the prompt of each token as an index
    from 0."""

    columns: Mapping[str, Floats]
    prompts: NDArray[np.int64]

    @property
    def folds(self) -> NDArray[np.int64]:
        """The fold of each token: that of its prompt."""
        return self.prompts % FOLDS

    def features(self, blocks: Sequence[Sequence[str]]) -> tuple[Floats, Floats]:
        """Returns the features [T, D], standardised over all tokens: an intercept, and each measure
        with its logarithm, except for heads, which have none. Also their penalties [D]: the number
        of features in the block, as for a block that is expected to explain half of the variance.
        """
        parts, penalties = [np.ones((len(self.prompts), 1))], [np.array([_EPSILON])]
        for block in blocks:
            own = [column for name in block for column in self._columns(name)]
            values = np.concatenate(own, axis=1)
            parts.append((values - values.mean(axis=0)) / np.maximum(values.std(axis=0), _EPSILON))
            penalties.append(np.full(values.shape[1], float(values.shape[1])))
        return np.concatenate(parts, axis=1), np.concatenate(penalties)

    def claims(self) -> Iterator[tuple[str, Tokens]]:
        """Yields each of `CLAIMS` and its tokens, with the label as a column. End tokens are left
        out of "before"."""
        pivots, end = self.columns["pivot"], self.columns["end"]
        last = np.append(np.diff(self.prompts) > 0, True)
        until = np.cumsum(pivots)
        labels = {
            "end": end,
            "before": np.append(end[1:], 0) * ~last,
            "settled": until[last][self.prompts] - until + pivots == 0,
        }
        for name, label in labels.items():
            chosen = (end == 0) | (name != "before")
            columns = {key: self.columns[key] for key in (*BASE, *ADDITIONS["h and u"])}
            columns[name] = label.astype(float)
            own = {key: values[chosen] for key, values in columns.items()}
            yield name, Tokens(own, self.prompts[chosen])

    def _columns(self, name: str) -> Iterator[Floats]:
        values = self.columns[name].reshape(len(self.prompts), -1)
        yield values
        if name != _HEADS:
            yield np.log(np.abs(values) + 0.01)


def read_tokens(address: str) -> dict[str, Tokens]:
    """Reads the tokens of each task from a `tokens.jsonl`, possibly compressed.

    Raises:
        UserError: the file cannot be read, has a line that `pivots` does not write, or no tokens.
    """
    answers: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    with open_file(address) as file:
        for number, line in enumerate(read_lines(address, file), 1):
            try:
                answer = json.loads(line)
                if "error" not in answer and all(answer[name] for name in ("line", *_MEASURED)):
                    _to_tokens([answer])  # raises for columns that are not numbers of one length
                    answers[answer["task"]].append(answer)
            except (ValueError, TypeError, KeyError):
                raise UserError(f"{address}: line {number} is not a result of pivots") from None
    if not answers:
        raise UserError(f"{address}: no question was answered")
    # Lines are in the order in which answers ended. Folds depend on the order.
    return {
        task: _to_tokens(sorted(group, key=lambda answer: answer["line"]))
        for task, group in answers.items()
    }


def _to_tokens(answers: Sequence[Mapping[str, Any]]) -> Tokens:
    sampled = ("strength", "permuted", "true")
    names = [*_MEASURED, *(name for name in sampled if all(name in each for each in answers))]
    columns = {
        name: np.array([value for answer in answers for value in answer[name]], float)
        for name in names
    }
    columns["margin"] = columns["p1"] - columns["p2"]
    texts = [each["text"] for each in answers]
    # The end token is the last one and has no text.
    columns["end"] = np.array(
        [at == len(text) and not token for text in texts for at, token in enumerate(text, 1)], float
    )
    if "strength" in columns:
        columns["excess"] = columns["strength"] - columns["permuted"]
        forks = (token for answer in answers for token in answer["alternatives"])
        columns["alternatives"] = np.array([len(token) for token in forks], float)
    sizes = [len(answer["index"]) for answer in answers]
    return Tokens(columns, np.repeat(np.arange(len(answers)), sizes))


def agreement(task: str, tokens: Tokens) -> str:
    """Returns a line with Spearman's rho of sampled and true fork strengths, over the tokens with
    several alternatives whose outcome was open; empty for a task without true strengths."""
    if "true" not in tokens.columns:
        return ""
    true = tokens.columns["true"]
    chosen = (tokens.columns["alternatives"] > 1) & ~np.isnan(true)
    if chosen.sum() < 2:
        return ""
    rho = {
        TARGETS[name]: spearman(tokens.columns[name][chosen], true[chosen])
        for name in ("strength", "excess")
    }
    values = " and ".join(f"{value:.3f} of {name}" for name, value in rho.items())
    return f"{task}: Spearman's rho with the true F is {values}, over {chosen.sum()} tokens."


class Ridge:
    """Cross-validated ridge regression of K targets, for any weights of the prompts. A prompt's
    part of the normal equations is computed once."""

    def __init__(
        self, features: Floats, penalties: Floats, targets: Floats, tokens: Tokens
    ) -> None:
        """Prepares the regression of `targets[T, K]` on `features[T, D]` with `penalties[D]`."""
        prompts = tokens.prompts
        self._features, self._penalty = features, np.diag(penalties)
        self._rows = [np.flatnonzero(tokens.folds == fold) for fold in range(FOLDS)]
        self._kinds = targets.shape[1]
        both = np.concatenate([features, targets], axis=1)
        count, width = int(prompts.max()) + 1, features.shape[1]
        self._equations = np.empty((count, width, both.shape[1]))  # [P, D, D + K]
        for prompt in range(count):
            own = prompts == prompt
            self._equations[prompt] = features[own].T @ both[own]
        self._folds = np.arange(count) % FOLDS

    def predict(self, weights: Floats) -> Floats:
        """Returns the predictions of each resample, [R, T, K], where `weights[R, P]` count the
        copies of the prompts. The weights of a token come from the other folds."""
        width = len(self._penalty)
        flat = self._equations.reshape(len(self._equations), -1)
        sums = np.stack(
            [weights[:, self._folds == f] @ flat[self._folds == f] for f in range(FOLDS)], axis=1
        ).reshape(len(weights), FOLDS, width, -1)
        others = sums.sum(axis=1, keepdims=True) - sums
        solved = np.linalg.solve(others[..., :width] + self._penalty, others[..., width:])
        predictions = np.empty((len(weights), len(self._features), self._kinds))
        for fold, rows in enumerate(self._rows):
            predictions[:, rows] = self._features[rows] @ solved[:, fold]
        return predictions


def weighted_ranks(values: Floats, weights: Floats) -> Floats:
    """Returns the mean rank of each value, from 1, where a value occurs `weights` times."""
    order = np.argsort(values, kind="stable")
    ordered, ends = values[order], np.cumsum(weights[order])
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))  # of equal values
    upper = ends[last]
    lower = np.append(0.0, upper[:-1])
    ranks = np.empty(len(values))
    ranks[order] = np.repeat((lower + upper + 1) / 2, np.diff(last, prepend=-1))
    return ranks


def association(ranks: Floats, target: Floats, weights: Floats, *, binary: bool) -> float:
    """Returns the AUROC of scores with these weighted ranks for a binary target, else Spearman's
    rho for a target that is given by its weighted ranks. NaN if either does not vary."""
    if binary:
        positives, negatives = weights @ target, weights @ (1 - target)
        total = (weights * target) @ ranks - positives * (positives + 1) / 2
        return float(total / (positives * negatives)) if positives * negatives else float("nan")
    mean = (weights.sum() + 1) / 2
    x, y = ranks - mean, target - mean
    scale = np.sqrt((weights @ x**2) * (weights @ y**2))
    return float((weights * x) @ y / scale) if scale else float("nan")


def spearman(one: Floats, other: Floats) -> float:
    """Returns Spearman's rho of two columns."""
    even = np.ones(len(one))
    ranks = weighted_ranks(one, even), weighted_ranks(other, even)
    return association(*ranks, even, binary=False)


def _associations(
    ridge: Ridge, tokens: Tokens, targets: Mapping[str, Floats], weights: Floats
) -> Floats:
    """The association of each target with its predictions, for weights [R, P]: [K, R]."""
    found = np.empty((len(targets), len(weights)))
    for begin in range(0, len(weights), _BLOCK):
        block = weights[begin : begin + _BLOCK]
        for at, (counts, predicted) in enumerate(
            zip(block, ridge.predict(block), strict=True), begin
        ):
            each = counts[tokens.prompts]
            drawn = each > 0
            each = each[drawn]
            for k, (name, target) in enumerate(targets.items()):
                binary = name in _BINARY
                own = target[drawn] if binary else weighted_ranks(target[drawn], each)
                ranks = weighted_ranks(predicted[drawn, k], each)
                found[k, at] = association(ranks, own, each, binary=binary)
    return found


def _resamples(prompts: int) -> Floats:
    """Copies of each prompt in each resample, [R, P]; the first row has each prompt once."""
    share = np.full(prompts, 1 / prompts)
    drawn = np.random.default_rng(0).multinomial(prompts, share, _RESAMPLES)
    return np.concatenate([np.ones((1, prompts)), drawn])


def compare_predictors(tasks: Mapping[str, Tokens]) -> tuple[pd.DataFrame, list[str]]:
    """Compares the predictors of each target of each task.

    Returns:
        One row for each task, target and set of predictors. `difference` from the base model is an
        interval for its additions and for `BEYOND`, joint over all of them, else None. And a line
        for each task or target that is left out.
    """
    rows: list[dict[str, Any]] = []
    omitted: list[str] = []
    for task, tokens in tasks.items():
        targets = _targets(task, tokens, TARGETS, omitted)
        if targets:
            rows += _compare(task, tokens, targets)
    table = pd.DataFrame(rows)
    if rows:
        compared = table["difference"].dropna()
        each = np.stack([*compared])
        table["difference"] = pd.Series(
            joint_intervals(each[:, 0].tolist(), each[:, 1:]), compared.index, object
        )
    return table, omitted


def compare_claims(tasks: Mapping[str, Tokens]) -> tuple[pd.DataFrame, list[str]]:
    """Measures how well single measures separate tokens with a label of `CLAIMS` from the others.

    Returns:
        One row for each task and claim: the share of labelled tokens among all and among the tenth
        with the lowest varentropy, the AUROC of each of `DIRECTED`, the differences of the first
        one from the others, and `BEYOND`. All intervals are joint over the table. And a line for
        each task or claim that is left out.
    """
    rows: list[dict[str, Any]] = []
    omitted: list[str] = []
    for task, tokens in tasks.items():
        for name, own in tokens.claims():
            if targets := _targets(task, own, CLAIMS, omitted):
                u, label = own.columns["varentropy"], own.columns[name]
                rows.append(
                    {
                        "task": task,
                        "token": CLAIMS[name],
                        "tokens": len(u),
                        "share": label.mean(),
                        "share, lowest tenth by u": label[u <= np.quantile(u, 0.1)].mean(),
                        **_separations(own, targets),
                    }
                )
    table = pd.DataFrame(rows)
    if rows:
        names = [*table.columns[5:]]
        each = np.stack([*table[names].to_numpy().ravel()])
        intervals = np.empty(len(each), object)
        intervals[:] = joint_intervals(each[:, 0].tolist(), each[:, 1:])
        table[names] = intervals.reshape(len(rows), -1)
    return table, omitted


def _separations(tokens: Tokens, targets: Mapping[str, Floats]) -> dict[str, Floats]:
    """The estimates of a claim, each with its resamples, [1 + R]."""
    weights = _resamples(int(tokens.prompts.max()) + 1)
    (label,) = targets.values()
    counts = weights.astype(int)[:, tokens.prompts]
    found = {
        measure: separate(sign * tokens.columns[column], label > 0, counts)[0]
        for measure, (column, sign) in DIRECTED.items()
    }
    first, *others = found
    found |= {f"{first} - {other}": found[first] - found[other] for other in others}
    for beyond, additions in BEYOND.items():
        fits = [
            Ridge(*tokens.features([BASE, ADDITIONS[name]]), label[:, None], tokens)
            for name in additions
        ]
        more, less = (_associations(fit, tokens, targets, weights)[0] for fit in fits)
        found[beyond] = more - less
    return found


def _targets(
    task: str, tokens: Tokens, names: Mapping[str, str], omitted: list[str]
) -> dict[str, Floats]:
    """The targets that can be predicted. Appends a line for each other one to `omitted`."""
    prompts, size = int(tokens.prompts.max()) + 1, len(tokens.prompts)
    if prompts < 2 * FOLDS:
        omitted.append(f"{task}: {prompts} answers, at least {2 * FOLDS} are needed")
        return {}
    targets = {name: tokens.columns[name] for name in names if name in tokens.columns}
    for name, values in [*targets.items()]:
        positive = int((values > 0).sum())
        if min(positive, size - positive) < _FEWEST:
            omitted.append(
                f"{task}, {names[name]}: positive at {positive} of {size} tokens, at least"
                f" {_FEWEST} of each kind are needed"
            )
            del targets[name]
    return targets


def _compare(task: str, tokens: Tokens, targets: Mapping[str, Floats]) -> Iterator[dict[str, Any]]:
    """The rows of a task. `difference` has the difference of each resample, [1 + R]."""
    weights = _resamples(int(tokens.prompts.max()) + 1)
    wanted = np.stack([*targets.values()], axis=1)

    def associate(*blocks: Sequence[str], resamples: int | None = None) -> Floats:
        ridge = Ridge(*tokens.features(blocks), wanted, tokens)
        return _associations(ridge, tokens, targets, weights[:resamples])

    base = associate(BASE)
    added = {name: associate(BASE, used) for name, used in ADDITIONS.items()}
    found = {
        " + ".join(BASE): base,
        **{f"base + {name}": each for name, each in added.items()},
        **{f"{name} only": associate(used, resamples=1) for name, used in SINGLE.items()},
    }
    differences = {f"base + {name}": each - base for name, each in added.items()}
    for name, (more, less) in BEYOND.items():
        found[name], differences[name] = added[more], added[more] - added[less]
    for k, name in enumerate(targets):
        for predictors, each in found.items():
            difference = differences.get(predictors)
            yield {
                "task": task,
                "target": TARGETS[name],
                "tokens": len(wanted),
                "positive": int((wanted[:, k] > 0).sum()),
                "predictors": predictors,
                "measure": "AUROC" if name in _BINARY else "Spearman",
                "value": each[k, 0],
                "difference": None if difference is None else difference[k],
            }
