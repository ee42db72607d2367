"""`python -m entropix_jax.calibrate`: fits a sampler's thresholds to a model and its text."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from entropix_jax.cli.options import (
    EXIT_OK,
    Count,
    Dtype,
    Flag,
    Model,
    model_name,
    parse,
    run_command,
)
from entropix_jax.cli.status import show_status
from entropix_jax.errors import UserError, check_range
from entropix_jax.host.files import check_apart, check_writable, read_text

if TYPE_CHECKING:
    import numpy as np

    from entropix_jax.lab.boxes import Boxes
    from entropix_jax.model.loading import LanguageModel
    from entropix_jax.sampler.sampler import Sampler

_OWN_TOKENS = 20_000
_OWN_ROWS = 32  # texts sampled in parallel


@dataclass(frozen=True)
class Arguments:
    """Solves for the four thresholds under which each regime has a wanted share of a text's tokens.

    Writes them as a preset, and prints quantiles and occupancies.
    """

    output: Annotated[str, tyro.conf.arg(metavar="FILE", constructor=str)]
    """The output: a sampler file, .toml, or a model's calibration.json."""
    texts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...", help_behavior_hint="")] = ()
    """Text files to measure (default: text that the model samples)."""
    own: Annotated[bool, tyro.conf.arg(name="self", help_behavior_hint="")] = False
    """Also measure text that the model samples at temperature 1, beside --texts."""
    self_tokens: Count = _OWN_TOKENS
    """Number of tokens to sample."""
    wanted: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="REGIME=SHARE ...", help_behavior_hint="")
    ] = ()
    """Shares of the regimes, mid has the rest (default: lelv=0.6 helv=0.05 lehv=0.05 hehv=0.05).
    If the text does not allow them, the nearest ones."""
    strict: Flag = False
    """Refuse shares that the text does not allow."""
    model: Model = None
    """smollm2, tiny, a folder in the Hugging Face layout, a GGUF file, or a hub id owner/name
    (default: smollm2 if its package is installed, else tiny)."""
    sampler: Annotated[str, tyro.conf.arg(metavar="PRESET_OR_FILE")] = "quadrants"
    """Preset, or sampler file (.toml), whose thresholds are solved for."""
    context: Count = 0
    """Context length in tokens; 0: 1024, or the model's positions."""
    seed: Count = 0
    """Seed of the sampled text."""
    dtype: Dtype = None
    """Type of the weights in memory (default: the checkpoint's)."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.calibrate") -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: _main(parse(Arguments, argv, prog)))


def _main(arguments: Arguments) -> int:
    # Check what can be checked before the model is loaded.
    _check(arguments)
    if not arguments.texts:
        arguments = replace(arguments, own=True)
    wanted = _parse_wanted(arguments.wanted)
    texts = [read_text(Path(name)) for name in arguments.texts]

    from entropix_jax.engine.calibrated import calibrate_sampler
    from entropix_jax.host.compile_cache import use_compilation_cache
    from entropix_jax.lab.boxes import read_boxes
    from entropix_jax.lab.likelihood import measure_entropies
    from entropix_jax.lab.solver import solve
    from entropix_jax.lab.thresholds import write_text
    from entropix_jax.model.loading import load
    from entropix_jax.sampler.presets import lineage, load_sampler

    sampler = load_sampler(arguments.sampler)
    boxes = read_boxes(sampler)
    output = Path(arguments.output)
    if output.suffix == ".toml" and not _is_unicode(arguments.sampler):
        raise UserError(
            f"--sampler {arguments.sampler}: its name is not UTF-8: no sampler file can extend it"
        )
    check_writable(output)
    check_apart(output, *arguments.texts, *lineage(arguments.sampler))

    # Measure the entropy and varentropy of every token.
    use_compilation_cache()
    name = model_name(arguments.model)
    with show_status("loading the model ..."):
        model = load(name, arguments.dtype)
    read = [model.tokenizer.encode(text, add_bos=True) for text in texts]
    if arguments.own:
        with show_status(f"writing {arguments.self_tokens:,} tokens ..."):
            read += _sample_texts(model, arguments.self_tokens, arguments.seed)
    # Measuring needs no thresholds, so the model's own may be missing or damaged.
    neutral = calibrate_sampler(sampler.with_values({"thresholds.calibrated": False}), model)
    with show_status(f"reading {sum(map(len, read)):,} tokens ..."):
        points = measure_entropies(model, read, neutral, context=arguments.context or None)
    before = _thresholds(model, sampler)

    # Solve, and write the thresholds.
    with show_status("solving for the thresholds ..."):
        solution = solve(points, wanted, boxes, nearest=not arguments.strict)
    write_text(output, _content(arguments, solution.thresholds, len(points)))
    _print_report(points, boxes, before, wanted, solution.thresholds)
    if solution.missed is not None:
        print(f"note: {solution.missed}", file=sys.stderr)
    print(f"{output}: written", file=sys.stderr)
    return EXIT_OK


def _check(arguments: Arguments) -> None:
    if Path(arguments.output).suffix not in (".toml", ".json"):
        raise UserError(
            f"--output {arguments.output}: a sampler file ends in .toml, "
            "a model's calibration in .json"
        )
    check_range("--context", arguments.context, 0)
    check_range("--self-tokens", arguments.self_tokens, 2 * _OWN_ROWS)


def _parse_wanted(settings: Sequence[str]) -> dict[str, float]:
    """The wanted shares of the four boxes, with defaults."""
    from entropix_jax.engine.calibrated import WANTED

    wanted = dict(WANTED)
    for setting in settings:
        regime, _, share = setting.partition("=")
        try:
            number = float(share)
        except ValueError:
            number = -1.0
        if regime not in wanted or not 0 <= number <= 1:
            raise UserError(
                f"--wanted {setting}: expected REGIME=SHARE, of {', '.join(wanted)} and 0 to 1"
            )
        wanted[regime] = number
    return wanted


def _is_unicode(name: str) -> bool:
    """Whether a file's name is valid UTF-8."""
    return name == name.encode("utf-8", "ignore").decode()


def _plan_rounds(tokens: int, room: int) -> tuple[int, int]:
    """The number of batches for at least `tokens` tokens, with at most `room` per row, and the
    tokens per row."""
    rounds = -(-tokens // (_OWN_ROWS * room))
    return rounds, -(-tokens // (_OWN_ROWS * rounds))


def _sample_texts(model: "LanguageModel", tokens: int, seed: int) -> list[list[int]]:
    """Samples texts from the model at temperature 1, without a prompt, in batches: at least
    `tokens` tokens in all.

    Raises:
        UserError: NaN or infinite logits, or a model without room for a token.
    """
    from entropix_jax.engine.calibrated import calibrate_sampler, start_of_text
    from entropix_jax.engine.generation import Generation
    from entropix_jax.engine.results import Request
    from entropix_jax.sampler.presets import load_sampler

    changes = {"base.temperature": 1.0, "thresholds.calibrated": False}
    sampler = calibrate_sampler(load_sampler("temperature").with_values(changes), model)
    start = start_of_text(model)
    room = max(model.config.max_positions - len(start), 1)  # with no room the run reports it
    rounds, length = _plan_rounds(tokens, room)
    texts = []
    for first in range(0, rounds * _OWN_ROWS, _OWN_ROWS):
        requests = [
            Request(start, sampler, max_new_tokens=length, row_id=str(first + row), seed=seed)
            for row in range(_OWN_ROWS)
        ]
        rows = Generation(model, requests).run()
        if errors := [row.error for row in rows if row.error is not None]:
            raise UserError(f"--self: {errors[0]}")
        texts += [[*start, *(token.token_id for token in row.tokens)] for row in rows]
    return texts


def _thresholds(model: "LanguageModel", sampler: "Sampler") -> dict[str, float]:
    """The thresholds before this calibration; empty if the stored ones are damaged."""
    from entropix_jax.engine.calibrated import fit_thresholds

    try:
        values = fit_thresholds(sampler, model, "reuse").values
    except UserError as error:
        print(f"note: {error}", file=sys.stderr)
        return {}
    prefix = "thresholds."
    names = [key for key in values if key.startswith(prefix) and key != "thresholds.calibrated"]
    return {name.removeprefix(prefix): float(values[name]) for name in names}


def _content(arguments: Arguments, thresholds: dict[str, float], tokens: int) -> str:
    """The content of the output file."""
    from entropix_jax.engine.calibrated import calibration_text
    from entropix_jax.lab.thresholds import preset_text
    from entropix_jax.model.loading import default_model

    sources = [os.path.basename(name) for name in arguments.texts]
    sources += ["the model's own text"] if arguments.own else []
    source = f"{tokens} tokens of {', '.join(sources)}"
    if arguments.output.endswith(".json"):
        return calibration_text(thresholds, source)
    base = arguments.sampler
    if base.endswith(".toml"):
        # Resolved, since `..` of a linked folder is not that of its target.
        path, folder = Path(base), Path(arguments.output).parent
        base = os.path.relpath(path.parent.resolve() / path.name, folder.resolve())
    model = Path(arguments.model or default_model()).name
    return preset_text(base, thresholds, f"{arguments.sampler}, calibrated for {model} on {source}")


def _print_report(
    points: "np.ndarray",
    boxes: "Boxes",
    before: dict[str, float],
    wanted: dict[str, float],
    after: dict[str, float],
) -> None:
    """Prints quantiles, thresholds, and occupancies before and after."""
    from rich.console import Console
    from rich.table import Table

    from entropix_jax.lab.boxes import QUANTILES, occupancy, quantiles

    console = Console(highlight=False, width=80)
    table = Table("of the tokens below", *(f"{q:.0%}" for q in QUANTILES))
    for name, row in zip(("entropy, bits", "varentropy, bits²"), quantiles(points).T, strict=True):
        table.add_row(name, *(f"{value:.3f}" for value in row))
    console.print(f"{len(points)} tokens")
    console.print(table)

    table = Table("thresholds", *after)
    for name, values in (("before", before), ("after", after)):
        table.add_row(name, *(f"{values[key]:g}" if key in values else "" for key in after))
    console.print(table)

    shares = {
        "before": occupancy(points, before, boxes) if len(before) == len(after) else {},
        "wanted": {**wanted, "mid": 1 - sum(wanted.values())},
        "after": occupancy(points, after, boxes),
    }
    table = Table("occupancy", *shares["after"])
    for name, row in shares.items():
        table.add_row(name, *(f"{row[regime]:.1%}" for regime in row))
    console.print(table)
