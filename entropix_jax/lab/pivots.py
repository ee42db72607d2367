"""`entropix-jax pivots`: finds the tokens that decide greedy answers, and what predicts them.

At each token of a greedy answer the second most likely token is forced, and the answer is finished
greedily. A token is a pivot if the final answer then differs, and a mistake if the greedy answer is
wrong and the other one right. Pivots and mistakes are predicted by logistic regression from the
measures of the token's distribution. Predictions for a prompt come from a regression on other
prompts, and intervals are bootstrapped over prompts.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from entropix_jax.cli.options import EXIT_OK, Count, model_name
from entropix_jax.cli.status import StatusLine
from entropix_jax.errors import UserError, check_range, require
from entropix_jax.lab.command import Names, RunOptions
from entropix_jax.version import __version__

if TYPE_CHECKING:
    from entropix_jax.batch.output import Store
    from entropix_jax.batch.records import Record
    from entropix_jax.engine.engine import Engine
    from entropix_jax.engine.results import Row
    from entropix_jax.lab.trials import Question
    from entropix_jax.model.loading import LanguageModel

MEASURES = (
    *("entropy", "varentropy", "attn_entropy_norm", "attn_varentropy", "agreement"),
    "interaction_strength",
)
PREDICTORS: Mapping[str, tuple[str, ...]] = {
    "entropy": ("entropy",),
    "varentropy": ("varentropy",),
    "entropy and varentropy": ("entropy", "varentropy"),
    "attention": MEASURES[2:],
    "all": MEASURES,
}
LABELS = ("pivot", "mistake")
_FOLDS = 10


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions):
    """Finds the tokens that decide greedy answers, and measures whether entropy, varentropy and
    attention predict them.

    Example:
        --task word-problems --model tiny --output build/pivots
    """

    task: Names
    """Tasks of `evaluate` whose answers can be compared."""
    items: Count = 100
    """Number of items per task; 0 for all."""
    slots: Count = 32
    """Number of rows that run in parallel."""
    tokens: Count = 64
    """Maximum number of tokens in an answer."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    require("lab", "pandas", "tabulate")
    check_range("--items", arguments.items, 0)
    check_range("--slots", arguments.slots, 1)
    check_range("--tokens", arguments.tokens, 1)
    from entropix_jax.batch.output import Store
    from entropix_jax.engine.engine import Engine
    from entropix_jax.engine.state import Recording
    from entropix_jax.host.interrupts import deferred_interrupts
    from entropix_jax.lab.tasks.registry import find_task, locate_task
    from entropix_jax.lab.trials import read_questions

    names = [name for texts in arguments.task for name in texts]
    if not names:
        raise UserError("--task must be given (see --help)")
    tasks = [find_task(locate_task(name, arguments.data)) for name in dict.fromkeys(names)]
    for task in tasks:
        if not task.votes:
            raise UserError(f"task '{task.name}': free text has no answers to compare")
    folder = Path(arguments.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: the folder cannot be created: {error.strerror}") from None
    model = arguments.load(model_name(arguments.model))
    questions = [
        question
        for task in tasks
        for question in read_questions(model, task, "test", arguments.items, arguments.tokens)
    ]
    identity = {
        "run": "pivots",
        "model": model.fingerprint,
        "precision": model.precision.to_json(),
        "tokens": arguments.tokens,
        "version": __version__,
    }
    longest = max(len(question.prompt) + question.max_new_tokens for question in questions)
    capacity = min(-(-longest // 64) * 64, model.config.max_positions)
    recording = Recording(top=2, state=True)
    engine = Engine(model, slots=arguments.slots, capacity=capacity, recording=recording)
    status = StatusLine()
    with (
        Store(str(folder / "tokens.jsonl"), identity) as store,
        deferred_interrupts(engine.stop, (signal.SIGINT, signal.SIGTERM)) as pressed,
    ):
        for done in measure(model, engine, questions, store):
            status.show(f"{done} of {len(questions)} answers")
        status.clear()
        if pressed:
            print("interrupted: run the same command again to continue", file=sys.stderr)
            return 128 + pressed[0]
    text = summarise(folder / "tokens.jsonl")
    (folder / "summary.md").write_text(text, encoding="utf-8")
    print(text)
    return EXIT_OK


def measure(
    model: LanguageModel, engine: Engine, questions: Sequence[Question], store: Store
) -> Iterator[int]:
    """Answers the questions without a stored result, replaces each token of the answers, and stores
    the tokens. Yields the number of stored results after each answer. A question that cannot be
    answered gets a result without tokens."""
    from entropix_jax.batch.records import Record, content_hash
    from entropix_jax.engine.preparation import calibrate_sampler
    from entropix_jax.engine.results import Request
    from entropix_jax.sampler.presets import load_sampler

    greedy = calibrate_sampler(load_sampler("greedy"), model)

    def requests() -> Iterator[Request]:
        for number, question in enumerate(questions, 1):
            name = f"{question.task.name}/{question.item.id}"
            record = Record(number, name, content_hash(name.encode() + question.digest))
            if store.is_done(record):
                continue
            request = Request(
                question.prompt,
                greedy,
                max_new_tokens=question.max_new_tokens,
                row_id=name,
                eos_ids=question.ends,
                stop=question.task.stop,
                tag=_Answer(question, record),
            )
            try:
                engine.check(request)
            except UserError as error:  # the prompt is too long
                store.write(record, {"task": question.task.name, "error": str(error)})
                continue
            yield request

    for event in engine.run(requests()):
        row, answer = event.row, event.row.request.tag
        if row.finish_reason is None:
            continue
        if answer.row is None:
            answer.row = row
            for token in row.tokens if row.error is None else ():
                other = next(i for i, *_ in token.top or () if i != token.token_id)
                (fork,) = engine.fork(row, 1, position=token.position)
                engine.force(fork, [other])
                answer.forks.append(fork)
        if all(fork.finish_reason is not None for fork in answer.forks):
            store.write(answer.record, answer.result())
            yield store.done


class _Answer:
    """A greedy answer, and one more for each of its tokens."""

    def __init__(self, question: Question, record: Record) -> None:
        self.question, self.record = question, record
        self.row: Row | None = None  # until the answer has ended
        self.forks: list[Row] = []

    def result(self) -> dict[str, Any]:
        """The measures and labels of each token, as columns."""
        from entropix_jax.lab.trials import user_code

        task, item = self.question.task, self.question.item

        def read(row: Row) -> tuple[str | None, float]:
            with user_code(f"task '{task.name}': item {item.id!r}"):
                found = task.extract(item, row.text)
                return found, task.score(item, found)

        assert self.row is not None
        if self.row.error is not None:
            return {"task": task.name, "error": self.row.error}
        answer, score = read(self.row)
        kept = [index for index, fork in enumerate(self.forks) if fork.error is None]
        others = [read(self.forks[index]) for index in kept]
        tokens = [self.row.tokens[index] for index in kept]
        return {
            "task": task.name,
            "answer": answer,
            "score": score,
            "pivot": [found != answer for found, _ in others],
            "mistake": [score < 1 <= other for _, other in others],
            **{name: [getattr(token, name) for token in tokens] for name in MEASURES},
        }


def summarise(path: Path) -> str:
    """Returns a Markdown table of the AUROC of each predictor, with 95 % intervals, and of its
    difference from entropy alone. Labels that all or no tokens of a task have are omitted."""
    import pandas as pd

    from entropix_jax.lab.statistics import percentile_interval, resampled_auroc

    answers = pd.read_json(path, lines=True)
    if "pivot" not in answers:
        raise UserError(f"{path}: no question was answered")
    columns = [*LABELS, *MEASURES]
    tokens = answers.explode(columns).dropna(subset=columns).astype(dict.fromkeys(columns, float))
    rows = []
    for task, group in tokens.groupby("task"):
        prompts = group["id"].astype("category").cat.codes.to_numpy()
        for label in LABELS:
            positive = group[label].to_numpy() > 0
            if positive.all() or not positive.any():
                continue
            scores = {
                name: predict(group[[*used]].to_numpy(), positive, prompts)
                for name, used in PREDICTORS.items()
            }
            found = {name: resampled_auroc(own, positive, prompts) for name, own in scores.items()}
            base, base_each = found["entropy"]
            for name, (value, each) in found.items():
                difference = percentile_interval(value - base, each - base_each)
                rows.append(
                    {
                        "task": task,
                        "label": label,
                        "tokens": len(group),
                        "positive": int(positive.sum()),
                        "predictor": name,
                        "AUROC": str(percentile_interval(value, each)),
                        "difference from entropy": "" if name == "entropy" else str(difference),
                    }
                )
    return str(pd.DataFrame(rows).to_markdown(index=False)) + "\n"


def predict(x: np.ndarray, positive: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Returns the log-odds of each token, float64 [n], by logistic regression on the measures
    `x[n, k]` and their logarithms, fitted on the prompts of other folds."""
    features = np.concatenate([x, np.log(np.abs(x) + 0.01)], axis=1)
    features = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-9)
    features = np.concatenate([np.ones((len(x), 1)), features], axis=1)
    scores = np.zeros(len(x))
    for fold in range(_FOLDS):
        test = prompts % _FOLDS == fold
        weights = fit_logistic(features[~test], positive[~test])
        scores[test] = features[test] @ weights
    return scores


def fit_logistic(features: np.ndarray, positive: np.ndarray, ridge: float = 1.0) -> np.ndarray:
    """Returns the weights of a logistic regression with a ridge penalty, float64 [k], by Newton's
    method."""
    weights = np.zeros(features.shape[1])
    penalty = ridge * np.eye(len(weights))
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(features @ weights, -30, 30)))
        gradient = features.T @ (p - positive) + penalty @ weights
        curvature = (features.T * (p * (1 - p))) @ features + penalty
        step = np.linalg.solve(curvature, gradient)
        weights -= step
        if np.abs(step).max() < 1e-8:
            break
    return weights
