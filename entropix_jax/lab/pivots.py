"""`entropix-jax pivots`: finds the tokens that decide greedy answers, and what predicts them.

At each token of a greedy answer the second most likely token is forced, and the answer is finished
greedily. A token is a pivot if the final answer then differs, and a mistake if the greedy answer is
wrong and the other one right. With `--outcomes` every likely token is forced, too, and the answer
is sampled several times: see `lab.strength`. For the predictions see `lab.prediction`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from entropix_jax.cli.options import EXIT_OK, Count, File, Text, model_name
from entropix_jax.cli.status import StatusLine, show_waits
from entropix_jax.errors import UserError, check_range, require
from entropix_jax.lab.command import Names, RunOptions
from entropix_jax.version import __version__

if TYPE_CHECKING:
    from entropix_jax.lab.tasks.task import Task
    from entropix_jax.sampler.sampler import Sampler

_SAMPLER, _VALUES = "temperature", {"base.temperature": 1.0}  # the model's own distribution


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions):
    """Finds the tokens that decide greedy answers, and measures what predicts them beyond their
    index and the two highest probabilities.

    Example:
        --task word-problems --model tiny --output build/pivots
    """

    output: Annotated[str, "DIR"] = ""
    """Folder of the results. The same command resumes an interrupted run."""
    task: Names = ()
    """Tasks of `evaluate` whose answers can be compared."""
    items: Count = 100
    """Number of items per task; 0 for all."""
    slots: Count = 32
    """Number of rows that run in parallel."""
    tokens: Count = 64
    """Maximum number of tokens in an answer."""
    outcomes: Count = 0
    """Number of sampled continuations after each token with a probability of at least 0.05, for the
    fork strength; 0 for none."""
    sampler: Annotated[Text, "PRESET_OR_FILE"] = None
    """Sampler of the continuations (default: the model's own distribution)."""
    seed: Count = 0
    """Seed of the continuations."""
    rows: File = None
    """A tokens.jsonl of an earlier run, possibly compressed (.gz, .xz): prints its summary and runs
    nothing."""

    def choose_sampler(self) -> Sampler:
        """Returns the sampler of the continuations."""
        from entropix_jax.sampler.presets import load_sampler

        if self.sampler is None:
            return load_sampler(_SAMPLER).with_values(_VALUES)
        return load_sampler(self.sampler)


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    require("lab", "pandas", "tabulate")
    if arguments.rows is not None:
        print(summarise(arguments.rows))
        return EXIT_OK
    for name, least in (("items", 0), ("slots", 1), ("tokens", 1), ("outcomes", 0)):
        check_range(f"--{name}", getattr(arguments, name), least)
    if arguments.outcomes > arguments.slots:
        raise UserError(
            f"--outcomes {arguments.outcomes}: more than the {arguments.slots} rows that run in"
            " parallel: raise --slots"
        )
    if not arguments.output:
        raise UserError("--output must be given (see --help)")
    tasks = _find_tasks(arguments)
    sampler = arguments.choose_sampler()
    folder = Path(arguments.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: the folder cannot be created: {error.strerror}") from None
    status = _measure(arguments, tasks, sampler, folder)
    if status == EXIT_OK:
        text = summarise(str(folder / "tokens.jsonl"))
        (folder / "summary.md").write_text(text, encoding="utf-8")
        print(text)
    return status


def _find_tasks(arguments: Arguments) -> list[Task]:
    from entropix_jax.lab.tasks.registry import find_task, locate_task

    if not arguments.task:
        raise UserError("--task must be given (see --help)")
    tasks = [find_task(locate_task(name, arguments.data)) for name in dict.fromkeys(arguments.task)]
    for task in tasks:
        if not task.votes:
            raise UserError(f"task '{task.name}': free text has no answers to compare")
    return tasks


def _measure(arguments: Arguments, tasks: Sequence[Task], sampler: Sampler, folder: Path) -> int:
    """Measures the tokens that the folder does not have. Returns the exit status."""
    from entropix_jax.batch.output import Store
    from entropix_jax.engine.calibrated import calibrate_sampler
    from entropix_jax.engine.loop import Engine
    from entropix_jax.host.interrupts import deferred_interrupts
    from entropix_jax.lab.outcomes import RECORDING, ForkedAnswer, Sampling, measure
    from entropix_jax.lab.trials import read_questions

    model = arguments.load(model_name(arguments.model))
    questions = [
        question
        for task in tasks
        for question in read_questions(model, task, "test", arguments.items, arguments.tokens)
    ]
    sampling = Sampling(arguments.outcomes, calibrate_sampler(sampler, model), arguments.seed)
    make = partial(ForkedAnswer, sampling=sampling)
    identity: dict[str, Any] = {
        "run": "pivots",
        "model": model.fingerprint,
        "precision": model.precision.to_json(),
        "tokens": arguments.tokens,
        "outcomes": arguments.outcomes,
        "version": __version__,
    }
    if arguments.outcomes:
        values = dict(sampling.sampler.sampler.values)
        identity |= {"seed": arguments.seed, "sampler": values}
    longest = max(len(question.prompt) + question.max_new_tokens for question in questions)
    capacity = min(-(-longest // 64) * 64, model.config.max_positions)
    engine = Engine(model, slots=arguments.slots, capacity=capacity, recording=RECORDING)
    with (
        Store(str(folder / "tokens.jsonl"), identity) as store,
        deferred_interrupts(engine.stop, (signal.SIGINT, signal.SIGTERM)) as pressed,
        show_waits(status := StatusLine(), lambda: engine.programs),
    ):
        for done in measure(model, engine, questions, store, make):
            status.show(f"{done} of {len(questions)} answers")
        if pressed:
            print("interrupted: run the same command again to continue", file=sys.stderr)
            return 128 + pressed[0]
    return EXIT_OK


def summarise(address: str) -> str:
    """Returns the tables of a `tokens.jsonl` as Markdown: what predicts which tokens decide an
    answer, what a low varentropy announces and, for a task that has them, how far sampled fork
    strengths agree with the true ones.

    Raises:
        UserError: the file cannot be read, has lines of another kind, or has no tokens.
    """
    from entropix_jax.lab import prediction

    tasks = prediction.read_tokens(address)
    table, omitted = prediction.compare_predictors(tasks)
    parts = []
    if len(table):
        table = table.fillna({"difference": ""}).astype({"difference": str})
        table = table.rename(columns={"difference": "difference from the base [joint 95 %]"})
        parts.append(str(table.to_markdown(index=False, floatfmt=".3f")))
    claims, others = prediction.compare_claims(tasks)
    if len(claims):
        parts.append(str(claims.to_markdown(index=False, floatfmt=".3f")))
    lines = (prediction.agreement(task, tokens) for task, tokens in tasks.items())
    parts += [line for line in lines if line]
    parts += [f"Left out: {line}." for line in dict.fromkeys(omitted + others)]
    return "\n\n".join(parts) + "\n"
