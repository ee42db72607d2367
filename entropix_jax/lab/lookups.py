"""`entropix-jax lookups`: measures which answers should be looked up, and before which token.

Every question is answered greedily: without a lookup, and with its result before each token.
From these rows every trigger, threshold and rate of lookups is computed without another run: see
`lab.triggers`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from entropix_jax.cli.options import EXIT_OK, Count, File, Text, model_name
from entropix_jax.cli.status import StatusLine, show_waits
from entropix_jax.errors import UserError, check_range, require
from entropix_jax.lab.command import Names, RunOptions
from entropix_jax.version import __version__

if TYPE_CHECKING:
    from entropix_jax.lab.lookup_answers import Case
    from entropix_jax.model.loading import LanguageModel

_FORMS = {"asking": ("[", "]")}  # by model, of an inserted result
_FORM = (" (Reference: ", ") So the answer is")
_MOST = 64  # tokens of a result, as in the arm `lookup`


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions):
    """Measures which answers should be looked up, and before which token.

    Example:
        --task FILE.py:FACTS --lookup FILE.csv --output DIR
    """

    output: Annotated[str, "DIR"] = ""
    """Folder of the results. The same command resumes an interrupted run."""
    task: Names = ()
    """Tasks of `evaluate` whose answers can be compared. Their questions are pooled."""
    ambiguous: Names = ()
    """Tasks whose questions have several readings. They are not looked up."""
    lookup: File = None
    """Table of the results, as in generate: a .csv or .jsonl file. It is asked for the question."""
    before: Text = None
    """Text before an inserted result (default: "[" for the model asking, else " (Reference: ")."""
    after: Text = None
    """Text after an inserted result (default: "]" for the model asking, else ") So the answer is").
    It should lead on to the answer: models end their turn after a complete one."""
    items: Count = 100
    """Number of items per task and split; 0 for all."""
    trial: bool = False
    """Use only tuning items, every second one in place of a test item."""
    slots: Count = 32
    """Number of rows that run in parallel."""
    tokens: Count = 24
    """Maximum number of tokens in an answer, without the lookup."""
    samples: Count = 0
    """Number of sampled answers of each test question, for the entropy over intents; 0 for none."""
    seed: Count = 0
    """Seed of the samples."""
    rows: File = None
    """Rows of an earlier run, possibly compressed (.gz, .xz): prints their tables, runs nothing."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    require("lab", "pandas", "tabulate")
    from entropix_jax.lab.triggers import read_rows, summarise

    if arguments.rows is not None:
        print(summarise(read_rows(arguments.rows)))
        return EXIT_OK
    for name, least in (("items", 0), ("slots", 1), ("tokens", 1), ("samples", 0)):
        check_range(f"--{name}", getattr(arguments, name), least)
    for name in ("output", "task", "lookup"):
        if not getattr(arguments, name):
            raise UserError(f"--{name} must be given (see --help)")
    if str(arguments.lookup).startswith(("http://", "https://", "exec:")):
        raise UserError(f"--lookup {arguments.lookup}: must be a table, a .csv or .jsonl file")
    folder = Path(arguments.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: the folder cannot be created: {error.strerror}") from None
    if (status := _measure(arguments, folder)) == EXIT_OK:
        from entropix_jax.lab.results import write_rows

        rows = read_rows(str(folder / "rows.jsonl"))
        keys = {"line", "digest"}
        kept = [{key: row[key] for key in row if key not in keys} for row in rows]
        write_rows(kept, folder / "rows.jsonl.xz")
        text = summarise(rows)
        (folder / "summary.md").write_text(text, encoding="utf-8")
        print(text)
    return status


def read_cases(arguments: Arguments, model: LanguageModel) -> Iterator[Case]:
    """Yields the questions with the tokens of their lookups. A question that an earlier task has is
    skipped.

    Raises:
        UserError: an invalid task or source.
    """
    from entropix_jax.engine.hooks import result_tokens
    from entropix_jax.host.lookup import open_lookup
    from entropix_jax.lab.lookup_answers import Case
    from entropix_jax.lab.tasks.registry import find_task, locate_task
    from entropix_jax.lab.tasks.task import Split
    from entropix_jax.lab.trials import read_questions

    lookup = open_lookup(str(arguments.lookup))
    own = _FORMS.get(model_name(arguments.model), _FORM)
    before, after = (
        default if given is None else given
        for given, default in zip((arguments.before, arguments.after), own, strict=True)
    )
    splits: tuple[Split, ...] = ("tuning",) if arguments.trial else ("tuning", "test")
    seen: set[tuple[int, ...]] = set()
    values = {"lookup.before": before, "lookup.after": after, "lookup.most": _MOST}
    for name in dict.fromkeys((*arguments.task, *arguments.ambiguous)):
        task = find_task(locate_task(name, arguments.data))
        if not task.votes:
            raise UserError(f"task '{task.name}': free text has no answers to compare")
        is_ambiguous = name in arguments.ambiguous
        for split in splits:
            asked = read_questions(model, task, split, arguments.items, arguments.tokens)
            for number, question in enumerate(asked):
                if question.prompt in seen:
                    continue
                seen.add(question.prompt)
                prompt = question.item.prompt
                text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                found = lookup(text)
                assert not isinstance(found, Future)  # a table
                ids = result_tokens(model.tokenizer, values, found or "")
                role = "test" if arguments.trial and number % 2 else split
                if role == "test" or not is_ambiguous:
                    yield Case(question, role, is_ambiguous, ids)


def _measure(arguments: Arguments, folder: Path) -> int:
    """Measures the answers that the folder does not have. Returns the exit status."""
    from entropix_jax.batch.output import Store
    from entropix_jax.batch.records import Record, content_hash
    from entropix_jax.engine.calibrated import calibrate_sampler
    from entropix_jax.engine.loop import Engine
    from entropix_jax.host.interrupts import deferred_interrupts
    from entropix_jax.lab.lookup_answers import Intents, LookupAnswer
    from entropix_jax.lab.outcomes import RECORDING, measure
    from entropix_jax.lab.trials import Question
    from entropix_jax.sampler.presets import load_sampler

    model = arguments.load(model_name(arguments.model))
    cases = {case.id: case for case in read_cases(arguments, model)}
    sampler = load_sampler("temperature").with_values({"base.temperature": 1.0})
    intents = Intents(arguments.samples, calibrate_sampler(sampler, model), arguments.seed)
    inserted = {name: [case.split, *case.inserted] for name, case in cases.items()}
    identity: dict[str, Any] = {
        "run": "lookups",
        "model": model.fingerprint,
        "precision": model.precision.to_json(),
        "tokens": arguments.tokens,
        "samples": arguments.samples,
        "seed": arguments.seed,
        "lookups": content_hash(repr(inserted).encode()),
        "version": __version__,
    }
    longest = max(len(case.question.prompt) + len(case.inserted) for case in cases.values())
    longest += arguments.tokens
    capacity = min(-(-longest // 64) * 64, model.config.max_positions)
    engine = Engine(model, slots=arguments.slots, capacity=capacity, recording=RECORDING)

    def make(question: Question, record: Record) -> LookupAnswer:
        case = cases[f"{question.task.name}/{question.item.id}"]
        return LookupAnswer(question, record, case, intents)

    questions = [case.question for case in cases.values()]
    with (
        Store(str(folder / "rows.jsonl"), identity) as store,
        deferred_interrupts(engine.stop, (signal.SIGINT, signal.SIGTERM)) as pressed,
        show_waits(status := StatusLine(), lambda: engine.programs),
    ):
        for done in measure(model, engine, questions, store, make):
            status.show(f"{done} of {len(questions)} answers")
        if pressed:
            print("interrupted: run the same command again to continue", file=sys.stderr)
            return 128 + pressed[0]
    return EXIT_OK
