"""`python -m entropix_jax.calibrate`: quantile tables of a model's own answers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from entropix_jax.cli.options import (
    EXIT_OK,
    Count,
    Dtype,
    File,
    Model,
    model_name,
    parse,
    run_command,
)
from entropix_jax.cli.status import show_status
from entropix_jax.errors import UserError, check_range
from entropix_jax.host.files import check_apart, check_writable, read_text, replacing

if TYPE_CHECKING:
    import numpy as np

    from entropix_jax.lab.answers import AnswerRun
    from entropix_jax.lab.tasks.task import Item
    from entropix_jax.model.loading import LanguageModel

PROMPTS_FILE = "calibration_prompts.jsonl"  # in a model's folder: the default of --prompts


@dataclass(frozen=True)
class Arguments:
    """Measures the entropy and varentropy of a model's own answers, for samplers whose thresholds
    are percentiles.

    Writes the model's quantile tables. Prints quantiles, and the shares of the regimes.

    Example:
        --model tiny --output tiny.json
    """

    model: Model = None
    """smollm2, tiny, a folder in the Hugging Face layout, a GGUF file, or a hub id owner/name
    (default: smollm2 if its package is installed, else tiny)."""
    prompts: File = None
    """Prompts to answer: one per line of a .txt file, else JSON Lines or CSV as for batch
    (default: calibration_prompts.jsonl in the model's folder, else the package's prompts)."""
    texts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...", help_behavior_hint="")] = ()
    """Text files to measure instead of answers."""
    output: File = None
    """Calibration file, .json (default: the file that samplers read for this model). The same
    command resumes an interrupted run."""
    seed: Count = 0
    """Seed of the answers."""
    slots: Count = 64
    """Answers in parallel."""
    dtype: Dtype = None
    """Dtype of the weights in memory (default: the checkpoint's)."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.calibrate") -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: _main(parse(Arguments, argv, prog)))


def _main(arguments: Arguments) -> int:
    # Check what can be checked before the model is loaded.
    check_range("--slots", arguments.slots, 1)
    check_range("--seed", arguments.seed, 0)
    if arguments.prompts is not None and arguments.texts:
        raise UserError("give only one of --prompts and --texts")
    texts = {name: _read_text(name) for name in arguments.texts}
    if arguments.output is not None:
        _check_output(Path(arguments.output), arguments)

    from entropix_jax.lab.answers import packaged_prompts, read_prompts

    file = None if arguments.prompts is None else Path(arguments.prompts)
    prompts = None if file is None else read_prompts(file)

    from entropix_jax.engine.preparation import model_shape
    from entropix_jax.host.compile_cache import use_compilation_cache
    from entropix_jax.lab.answers import MAX_NEW_TOKENS, SAMPLER, remove_answers
    from entropix_jax.lab.calibration_report import print_report
    from entropix_jax.model.loading import load
    from entropix_jax.sampler.calibration import Calibration

    name = model_name(arguments.model)
    use_compilation_cache()
    with show_status("loading the model ..."):
        model = load(name, arguments.dtype)
    output = Path(arguments.output or model.calibration_file)
    _check_output(output, arguments)

    # Measure.
    partial = Path(f"{output}.partial")
    if texts:
        values = _measure_texts(model, texts)
        source = f"the text of {', '.join(Path(name).name for name in texts)}"
    else:
        own = model.folder / PROMPTS_FILE
        if file is None and own.exists():
            file, prompts = own, read_prompts(own)
        prompts = prompts or packaged_prompts(model)
        stopped, values = _measure_answers(model, prompts, partial, arguments)
        if stopped:
            print("interrupted: run the same command again to continue", file=sys.stderr)
            return 128 + stopped
        where = "entropix_jax" if file is None else file.name
        source = f"answers to {len(prompts)} prompts of {where}, by {SAMPLER}"
        source += f", at most {MAX_NEW_TOKENS} tokens each"

    if not len(values["entropy"]):
        raise UserError("the answers are empty: give other prompts by --prompts")

    # Write the tables.
    calibration = Calibration.from_values(values, source, model_shape(model))
    with replacing(output) as scratch:
        scratch.write_text(calibration.to_text(), encoding="utf-8", errors="backslashreplace")
    if not texts:
        remove_answers(partial)
    print_report(model, calibration, values)
    print(f"{output}: written", file=sys.stderr)
    return EXIT_OK


def _read_text(name: str) -> str:
    text = read_text(Path(name))
    if not text.strip():
        raise UserError(f"{name}: contains no text")
    return text


def _check_output(output: Path, arguments: Arguments) -> None:
    """Refuses (UserError) an output that cannot be written or would overwrite an input."""
    if output.suffix != ".json":
        raise UserError(f"--output {output}: the name of a calibration file must end in .json")
    check_writable(output)
    check_apart(output, arguments.prompts, *arguments.texts)


def _measure_texts(model: LanguageModel, texts: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Returns the metrics before each token of the texts but their first ones."""
    from entropix_jax.lab.answers import measuring_sampler
    from entropix_jax.lab.likelihood import measure_entropies

    encoded = [model.tokenizer.encode(text, add_bos=True) for text in texts.values()]
    with show_status(f"reading {sum(map(len, encoded)):,} tokens ..."):
        return measure_entropies(model, encoded, measuring_sampler("greedy", model))


def _measure_answers(
    model: LanguageModel, prompts: Sequence[Item], partial: Path, arguments: Arguments
) -> tuple[int, dict[str, np.ndarray]]:
    """Answers the prompts and returns the metrics of all tokens, and 0 or the signal that
    interrupted the run. Finished answers are stored in the file `partial`."""
    from entropix_jax.batch.output import Store
    from entropix_jax.batch.progress import ProgressView, Standing
    from entropix_jax.host.interrupts import deferred_interrupts
    from entropix_jax.lab.answers import AnswerRun, discard_other_run, read_answers

    run: AnswerRun = AnswerRun(model, prompts, seed=arguments.seed, slots=arguments.slots)
    discard_other_run(partial, run.identity)
    with Store(str(partial), run.identity) as store:
        done = f", {store.done} already done" if store.done else ""
        print(f"answering {len(prompts)} prompts{done}", file=sys.stderr)

        def standing() -> Standing:
            return Standing(store.done, run.tokens, run.engine.steps, run.engine.used)

        with (
            ProgressView(standing, len(prompts)) as view,
            deferred_interrupts(run.stop, (signal.SIGINT, signal.SIGTERM)) as pressed,
        ):
            run.run(store, view.looked)
        if pressed:
            return pressed[0], {}
    return 0, read_answers(partial)
