"""`entropix-jax calibrate`: quantile tables of a model's own answers, and its table of P(wrong)."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from entropix_jax.cli.options import EXIT_OK, Count, Dtype, File, Model, Text, model_name
from entropix_jax.cli.status import show_status
from entropix_jax.errors import UserError, check_range
from entropix_jax.host.files import check_apart, check_writable, replacing

if TYPE_CHECKING:
    from entropix_jax.model.loading import LanguageModel

_PERCENTS = (5, 25, 50, 75, 95, 99)
_UNITS = {"entropy": "bits", "varentropy": "bits²"}
PROMPTS_FILE = "calibration_prompts.jsonl"  # in a model's folder: the default of --prompts


@dataclass(frozen=True)
class Arguments:
    """Measures the entropy and varentropy of a model's own answers, for samplers with percentiles
    as thresholds.

    Writes the model's quantile tables, and prints some of the quantiles. With --task it adds the
    table of P(wrong), the probability that an answer is wrong, to these tables.

    Example:
        --model tiny --output tiny.json
    """

    model: Model = None
    """smollm2, tiny, asking, a folder in the Hugging Face layout, a GGUF file, or a hub id
    owner/name (default: smollm2 if its package is installed, else tiny)."""
    prompts: File = None
    """Prompts to answer: one per line of a .txt file, else JSON Lines or CSV as for batch
    (default: calibration_prompts.jsonl in the model's folder, else the package's prompts)."""
    output: File = None
    """Calibration file to write, .json (default: the file that samplers read for this model)."""
    seed: Count = 0
    """Seed of the answers."""
    samples: Count = 1
    """Number of answers to each prompt."""
    task: Annotated[Text, "TASK"] = None
    """Task of evaluate, whose answers in the tuning split P(wrong) is fitted to."""
    items: Count = 0
    """Number of items of the task; 0 for all."""
    sampler: Annotated[Text, "PRESET_OR_FILE"] = None
    """Sampler of the answers to the task (default: greedy)."""
    dtype: Dtype = None
    """Dtype of the weights in memory (default: the checkpoint's)."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    # Check what can be checked before the model is loaded.
    check_range("--seed", arguments.seed, 0)
    check_range("--samples", arguments.samples, 1)
    if arguments.output is not None:
        _check_output(Path(arguments.output), arguments)
    others, fault = ("items", "sampler"), "needs --task"
    if arguments.task is not None:
        others, fault = ("prompts", "samples"), "cannot be used with --task"
    for option in others:
        if getattr(arguments, option) != getattr(Arguments, option):
            raise UserError(f"--{option} {fault}")
    if arguments.task is not None:
        return _fit(arguments)
    from entropix_jax.lab.answers import (
        MAX_NEW_TOKENS,
        SAMPLER,
        measure_answers,
        packaged_prompts,
        read_prompts,
    )

    file = None if arguments.prompts is None else Path(arguments.prompts)
    prompts = None if file is None else read_prompts(file)

    from entropix_jax.engine.calibrated import model_shape
    from entropix_jax.sampler.calibration import Calibration

    model, output = _load(arguments)
    own = model.folder / PROMPTS_FILE
    if file is None and own.exists():
        file, prompts = own, read_prompts(own)
    prompts = prompts or packaged_prompts(model)

    # Measure.
    seeds = range(arguments.seed, arguments.seed + arguments.samples)
    number = len(prompts) * len(seeds)
    print(f"answering {len(prompts)} prompts", file=sys.stderr)
    done = iter(range(1, number + 1))
    with show_status(f"0 of {number} answered") as status:
        values = measure_answers(
            model, prompts, seeds, lambda: status.show(f"{next(done)} of {number} answered")
        )
    if not len(values["entropy"]):
        raise UserError("the answers are empty: give other prompts with --prompts")

    # Write the tables.
    where = "entropix_jax" if file is None else file.name
    source = f"{number} answers to {len(prompts)} prompts of {where}, by {SAMPLER}"
    source += f", at most {MAX_NEW_TOKENS} tokens each"
    calibration = Calibration.from_values(values, source, model_shape(model))
    _write(output, calibration)
    _print_quantiles(calibration)
    print(f"{output}: written", file=sys.stderr)
    return EXIT_OK


def _fit(arguments: Arguments) -> int:
    """Adds the table of P(wrong) to the model's tables."""
    check_range("--items", arguments.items, 0)
    from entropix_jax.lab.answers import measure_task
    from entropix_jax.lab.tasks.registry import find_task, locate_task
    from entropix_jax.lab.trials import read_questions
    from entropix_jax.lab.wrong import FOLDS, cross_validate, fit_wrong
    from entropix_jax.sampler.presets import load_sampler

    task = find_task(locate_task(str(arguments.task)))
    sampler = load_sampler(arguments.sampler or "greedy")

    from entropix_jax.engine.calibrated import calibrate_sampler

    model, output = _load(arguments)
    calibrated = calibrate_sampler(sampler, model)
    if calibrated.calibration.generic:
        first = f"run entropix-jax calibrate --model {model.folder} without --task first"
        raise UserError(f"{model.calibration_file}: no such file: {first}")
    questions = [*read_questions(model, task, "tuning", arguments.items)]
    print(f"answering {len(questions)} questions of {task.name}", file=sys.stderr)
    done = iter(range(1, len(questions) + 1))
    with show_status(f"0 of {len(questions)} answered") as status:
        measures, wrong = measure_task(
            model,
            questions,
            calibrated,
            arguments.seed,
            lambda: status.show(f"{next(done)} of {len(questions)} answered"),
        )
    error = cross_validate(measures, wrong)
    weights, *knots = fit_wrong(measures, wrong).to_rows()
    entry = {"weights": weights, "knots": knots, "task": task.name, "items": len(questions)}
    entry["ece"] = float(f"{error:.3g}")
    _write(output, replace(calibrated.calibration, wrong=entry))
    print(f"{wrong.sum()} of {len(wrong)} answers by {sampler.name} are wrong")
    print(f"calibration error of P(wrong) at a token, {FOLDS} folds of items: {error:.3f}")
    print(f"{output}: written", file=sys.stderr)
    return EXIT_OK


def _load(arguments: Arguments) -> "tuple[LanguageModel, Path]":
    """Returns the model and the file to write. UserError if that cannot be written."""
    from entropix_jax.host.compile_cache import use_compilation_cache
    from entropix_jax.model.loading import load

    name = model_name(arguments.model)
    use_compilation_cache()
    with show_status("loading the model"):
        model = load(name, arguments.dtype)
    output = Path(arguments.output or model.calibration_file)
    _check_output(output, arguments)
    return model, output


def _write(output: Path, calibration: Any) -> None:
    with replacing(output) as scratch:
        scratch.write_text(calibration.to_text(), encoding="utf-8", errors="backslashreplace")


def _print_quantiles(calibration: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(f"{calibration.tokens} tokens", *(f"{percent}%" for percent in _PERCENTS))
    for name in calibration.quantiles:
        quantiles = (calibration.value(name, percent) for percent in _PERCENTS)
        label = f"{name}, {_UNITS[name]}" if name in _UNITS else name
        table.add_row(label, *(f"{value:.3f}" for value in quantiles))
    Console(highlight=False, width=80).print(table)


def _check_output(output: Path, arguments: Arguments) -> None:
    """Raises UserError if the output cannot be written or would overwrite an input."""
    if output.suffix != ".json":
        raise UserError(f"--output {output}: the name of a calibration file must end in .json")
    check_writable(output)
    check_apart(output, arguments.prompts)
