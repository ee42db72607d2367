"""`python -m entropix_jax.batch`: a file of prompts in, a file of completions out."""

import itertools
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from entropix_jax.cli.options import (
    EXIT_OK,
    Count,
    Dtype,
    Flag,
    Model,
    Text,
    Texts,
    flat_settings,
    model_name,
    parse,
    run_command,
)
from entropix_jax.errors import UserError, check_range
from entropix_jax.host.distributed import check_place, join
from entropix_jax.host.interrupts import deferred_interrupts, exit_status
from entropix_jax.version import __version__

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from entropix_jax.batch.output import Store
    from entropix_jax.batch.records import BadRecord, Record
    from entropix_jax.batch.run import BatchRun, Defaults
    from entropix_jax.engine.calibrated import May
    from entropix_jax.model.loading import LanguageModel

_LARGEST = 2**31 - 1  # of what is counted
_MAX_CONTEXT = 2048  # unless another number is asked for


@dataclass(frozen=True)
class Arguments:
    """Generates a text for each record of a file, many at a time.

    Input: JSON Lines, {"id", "prompt" or "messages", optional "sampler", "max_new_tokens",
    "seed"}, or CSV with a column "prompt". Output: one JSON object for each record, as they end. A
    run that is started again resumes. Addresses are paths or URLs that fsspec knows, such as
    s3://bucket/key.
    """

    input: Annotated[str, tyro.conf.arg(metavar="ADDRESS")]
    """The records; - for JSON Lines from standard input."""
    output: Annotated[str, tyro.conf.arg(metavar="ADDRESS")]
    """Where the results go."""
    model: Model = None
    """smollm2, tiny, a folder in the Hugging Face layout, a GGUF file, or a hub id owner/name
    (default: smollm2 where its package is installed, else tiny)."""
    sampler: Annotated[str, tyro.conf.arg(metavar="PRESET_OR_FILE")] = "entropix"
    """The sampler of records that name none."""
    set: Annotated[Texts, tyro.conf.arg(metavar="sampler.KEY=VALUE ...")] = ()
    """Change settings of that sampler."""
    slots: Count = 32
    """Rows that run side by side."""
    context: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Most tokens of a row, prompt included (default: the model's positions, at most 2048)."""
    max_new_tokens: Count = 256
    """Most tokens to generate for a record that does not say."""
    seed: Count = 0
    """Seed of all random numbers, for records that have none."""
    chat: Flag = False
    """Put a prompt as a turn of a chat (default for Instruct models)."""
    no_chat: Flag = False
    """Continue a prompt as plain text (default for other models)."""
    system: Text = None
    """A system message for prompts that are put as a chat."""
    stop: Texts = ()
    """Texts that end a row; they are not part of its text."""
    ignore_eos: Flag = False
    """Go on past end tokens."""
    dtype: Dtype = None
    """Type of the weights in memory (default: as in the checkpoint)."""
    check: Flag = False
    """Look for NaN and infinity in all weights and activations: an error then names the tensor, or
    the layer and the position."""
    mesh: Annotated[
        str | None,
        tyro.conf.arg(metavar="data=N,model=M", constructor=str, help_behavior_hint=""),
    ] = None
    """How devices share the work: rows are split over data, each row's heads and matrices over
    model (default: all devices on data)."""
    trace: Annotated[
        str | None, tyro.conf.arg(metavar="DIR", constructor=str, help_behavior_hint="")
    ] = None
    """Write each record's full trace into this folder."""
    trace_top: Count = 0
    """Add this many of the likeliest tokens to each token of the traces."""
    trace_layers: Flag = False
    """Add the attention entropy of each layer and head to each token of the traces."""
    distributed: Flag = False
    """Run one share of the records: this process is one of several, as a TPU VM or Slurm says. Each
    writes its own part of the output."""
    coordinator: Annotated[
        str | None, tyro.conf.arg(metavar="HOST:PORT", constructor=str, help_behavior_hint="")
    ] = None
    """The address of process 0, where the environment does not say; without it a process whose
    number is given runs alone."""
    processes: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """How many processes there are, where the environment does not say."""
    process: Annotated[int | None, tyro.conf.arg(metavar="I", help_behavior_hint="")] = None
    """Which of them this is, from 0, where the environment does not say."""
    merge: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Only join the outputs of N processes, once each record has its result."""
    strict: Flag = False
    """End at the first record that cannot be run, instead of writing an error as its result."""
    mix: Flag = False
    """Resume an output even if another run wrote it."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.batch") -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: _main(parse(Arguments, argv, prog)))


def _main(arguments: Arguments) -> int:
    # Without JAX, whose import takes most of a second: the command line and its files.
    _check(arguments)
    from entropix_jax.batch.merge import merge, part_address
    from entropix_jax.batch.output import Store, check_output
    from entropix_jax.batch.records import check_input

    if arguments.merge is not None:
        number = merge(arguments.output, arguments.merge, input=arguments.input)
        parts = "1 part" if arguments.merge == 1 else f"{arguments.merge} parts"
        print(f"{arguments.output}: {_records(number)} of {parts} joined", file=sys.stderr)
        return EXIT_OK
    check_input(arguments.input)

    from entropix_jax.batch.run import BatchRun, Defaults, count_records
    from entropix_jax.engine.state import Recording
    from entropix_jax.host.compile_cache import use_compilation_cache
    from entropix_jax.model.loading import load
    from entropix_jax.sampler.presets import choose_sampler

    defaults = Defaults(
        sampler=choose_sampler(arguments.sampler, flat_settings(arguments.set)),
        max_new_tokens=arguments.max_new_tokens,
        seed=arguments.seed,
        chat=True if arguments.chat else False if arguments.no_chat else None,
        system=arguments.system,
        stop=list(itertools.chain(*arguments.stop)),
        ignore_eos=arguments.ignore_eos,
    )
    share = (0, 1)
    output = arguments.output
    if arguments.distributed:
        share = join(arguments.coordinator, arguments.processes, arguments.process)
        output = part_address(output, *share)

    # Whether everything fits, before anything large is loaded.
    check_output(output, input=arguments.input)
    _check_traces(arguments.trace, arguments.input, arguments.output)
    arguments = replace(arguments, model=model_name(arguments.model))
    use_compilation_cache()
    mesh = _mesh(arguments)
    recording = Recording(
        top=arguments.trace_top, layers=arguments.trace_layers, check=arguments.check
    )
    context = _check_memory(arguments, mesh)

    # The model, its calibrated sampler, and the run.
    spread = mesh if mesh.size > 1 else None
    model = load(arguments.model, arguments.dtype, spread, check=arguments.check)
    # Processes that share a run must agree on the thresholds, so none calibrates its own.
    thresholds: May = "read" if arguments.distributed else "make"
    run = BatchRun(
        model,
        defaults,
        slots=arguments.slots,
        capacity=context,
        recording=recording,
        traces=None if arguments.trace is None else Path(arguments.trace),
        name=str(arguments.model),
        thresholds=thresholds,
    )
    for note in run.sampler.notes:
        print(f"note: {note}", file=sys.stderr)

    # Reading long files takes a while, but nothing can be lost yet: a signal ends the process.
    total = count_records(arguments.input, share)
    identity = _identity(arguments, defaults, run.sampler.values, model, context)
    store = Store(output, identity, mix=arguments.mix)
    with deferred_interrupts(run.stop, (signal.SIGINT, signal.SIGTERM)) as pressed, store:
        _run(arguments, run, store, share, total)
        if not pressed:
            store.finish()
            return EXIT_OK
    print("interrupted: the same command goes on from here", file=sys.stderr)
    return exit_status(pressed[0])


def _run(
    arguments: Arguments,
    run: "BatchRun",
    store: "Store",
    share: tuple[int, int],
    total: int | None,
) -> None:
    from entropix_jax.batch.progress import ProgressView, Standing
    from entropix_jax.batch.records import read_records

    if arguments.trace is not None:
        _make_folder(Path(arguments.trace))
    progress, engine = run.progress, run.engine
    progress.done = store.done
    if store.done:
        print(f"note: {_records(store.done)} done already", file=sys.stderr)

    def write(record: "Record | BadRecord", result: Mapping[str, Any]) -> None:
        # A row that failed has a text beside its error; a record that cannot be run has none.
        if arguments.strict and "text" not in result:
            raise UserError(f"{arguments.input}: line {record.line}: {result['error']}")
        store.write(record, result)

    def standing() -> Standing:
        return Standing(progress.done, progress.tokens, engine.steps, engine.used)

    started = time.perf_counter()
    records = read_records(arguments.input, share=share)
    with ProgressView(standing, total) as view:
        run.run(records, write, store.is_done, view.looked)
    seconds = time.perf_counter() - started
    end = standing()
    speed = f" ({view.speed(end):.0f} tok/s once compiled)" if view.speed(end) else ""
    failed = f" ({progress.failed} of them with an error)" if progress.failed else ""
    print(
        f"{_records(end.done)} done{failed} | {end.tokens} tokens in {seconds:.1f} s{speed}"
        f" | {end.used:.0%} of slots used",
        file=sys.stderr,
    )


def _records(number: int) -> str:
    return f"{number} record" if number == 1 else f"{number} records"


def _check(arguments: Arguments) -> None:
    """Checks the command line by itself."""
    if arguments.chat and arguments.no_chat:
        raise UserError("give only one of --chat and --no-chat")
    check_range("--slots", arguments.slots, 1, _LARGEST)
    check_range("--context", arguments.context, 2, _LARGEST)
    check_range("--max-new-tokens", arguments.max_new_tokens, 1, _LARGEST)
    check_range("--trace-top", arguments.trace_top, 0, _LARGEST)
    check_range("--merge", arguments.merge, 1)
    place = (arguments.coordinator, arguments.processes, arguments.process)
    if not arguments.distributed and any(given is not None for given in place):
        raise UserError("--coordinator, --processes and --process need --distributed")
    check_place(*place)
    if arguments.distributed and arguments.input == "-":
        raise UserError("--distributed: each process reads all of --input: give a file, not -")
    if not all(map(all, arguments.stop)):
        raise UserError("--stop: an empty text ends nothing")
    if (arguments.trace_top or arguments.trace_layers) and arguments.trace is None:
        raise UserError("--trace-top and --trace-layers need --trace DIR")
    if "://" in (arguments.trace or ""):
        raise UserError(f"--trace {arguments.trace}: traces need a folder on this machine")


def _check_traces(folder: str | None, *others: str) -> None:
    """Refuses a folder of traces in which a record's trace could overwrite the input or output."""
    from entropix_jax.batch.storage import local_path

    for other in others:
        path = None if folder is None else local_path(other)
        # Either a link itself or its target would be overwritten.
        for place in () if path is None else (path, path.resolve()):
            if place.suffix == ".jsonl" and place.parent.resolve() == Path(folder or "").resolve():
                raise UserError(
                    f"--trace {folder}: {other} lies there, whose name a record's trace could "
                    "have: give another folder"
                )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made a folder: {error.strerror}") from None


def _mesh(arguments: Arguments) -> "Mesh":
    import jax

    from entropix_jax.model.loading import check_backend
    from entropix_jax.model.mesh import parse_mesh

    check_backend()
    return parse_mesh(arguments.mesh, jax.local_devices())


def _check_memory(arguments: Arguments, mesh: "Mesh") -> int:
    """Checks that the batch fits, says what it takes, and returns a row's cache positions."""
    from entropix_jax.engine.memory import check_memory
    from entropix_jax.model.loading import open_model, resolve_model, weights_dtype
    from entropix_jax.model.mesh import check_mesh
    from entropix_jax.model.precision import choose_precision

    files = open_model(resolve_model(arguments.model))
    config = files.config
    if arguments.context is not None and arguments.context > config.max_positions:
        raise UserError(
            f"--context {arguments.context}: the model has {config.max_positions} positions"
        )
    context = arguments.context or min(config.max_positions, _MAX_CONTEXT)
    check_mesh(mesh, config, arguments.slots)
    needs = check_memory(
        config,
        choose_precision(weights_dtype(files, arguments.dtype)),
        slots=arguments.slots,
        capacity=context,
        mesh=mesh,
    )
    print(needs, file=sys.stderr)
    return context


def _identity(
    arguments: Arguments,
    defaults: "Defaults",
    sampler_values: Mapping[str, Any],
    model: "LanguageModel",
    context: int,
) -> dict[str, Any]:
    """What defines a run: everything that its results depend on, and its input."""
    return {
        "model": arguments.model,
        "model_fingerprint": model.fingerprint,
        "precision": model.precision.to_json(),
        "sampler": dict(sampler_values),
        "max_new_tokens": defaults.max_new_tokens,
        "context": context,
        "seed": defaults.seed,
        "chat": defaults.chat,
        "system": defaults.system,
        "stop": list(defaults.stop),
        "ignore_eos": defaults.ignore_eos,
        "input": arguments.input,
        "version": __version__,
    }
