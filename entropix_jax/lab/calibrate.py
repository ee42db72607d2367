"""`entropix-jax calibrate`: quantile tables of a model's own answers."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropix_jax.cli.options import EXIT_OK, Count, Dtype, File, Model, model_name
from entropix_jax.cli.status import show_status
from entropix_jax.errors import UserError, check_range
from entropix_jax.host.files import check_apart, check_writable, replacing

_PERCENTS = (5, 25, 50, 75, 95, 99)
_UNITS = {"entropy": "bits", "varentropy": "bits²"}
PROMPTS_FILE = "calibration_prompts.jsonl"  # in a model's folder: the default of --prompts


@dataclass(frozen=True)
class Arguments:
    """Measures the entropy and varentropy of a model's own answers, for samplers with percentiles
    as thresholds.

    Writes the model's quantile tables, and prints some of the quantiles.

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
    dtype: Dtype = None
    """Dtype of the weights in memory (default: the checkpoint's)."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    # Check what can be checked before the model is loaded.
    check_range("--seed", arguments.seed, 0)
    check_range("--samples", arguments.samples, 1)
    if arguments.output is not None:
        _check_output(Path(arguments.output), arguments)
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
    from entropix_jax.host.compile_cache import use_compilation_cache
    from entropix_jax.model.loading import load
    from entropix_jax.sampler.calibration import Calibration

    name = model_name(arguments.model)
    use_compilation_cache()
    with show_status("loading the model"):
        model = load(name, arguments.dtype)
    output = Path(arguments.output or model.calibration_file)
    _check_output(output, arguments)
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
    with replacing(output) as scratch:
        scratch.write_text(calibration.to_text(), encoding="utf-8", errors="backslashreplace")
    _print_quantiles(calibration)
    print(f"{output}: written", file=sys.stderr)
    return EXIT_OK


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
