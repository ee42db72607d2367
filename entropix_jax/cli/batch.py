"""`entropix-jax batch`: generates a file of completions for a file of prompts."""

import contextlib
import math
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from entropix_jax.cli import options
from entropix_jax.cli.status import ProgressView, plural, show_status
from entropix_jax.errors import UserError, check_range
from entropix_jax.host.interrupts import deferred_interrupts
from entropix_jax.version import __version__

if TYPE_CHECKING:
    from entropix_jax.batch.output import Store
    from entropix_jax.batch.records import BadRecord, Record
    from entropix_jax.batch.run import BatchRun
    from entropix_jax.batch.spread import SpreadRun

Description = tuple[tuple[str, ...], dict[str, Any]]  # notes for the user; identity of the run
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LARGEST = 2**31 - 1  # of what is counted


@dataclass(frozen=True)
class Arguments:
    """Generates a text for each record of a file, many in parallel.

    Input: JSON Lines, {"id", "prompt" or "messages", optional "sampler", "max_new_tokens",
    "seed"}, or CSV with a column "prompt". A record's own values override the options.

    Output: one JSON object for each record, in order of completion. The same command resumes a run.
    Addresses are paths or URLs that fsspec can open, such as s3://bucket/key.

    Example:
        --input prompts.jsonl --output answers.jsonl
    """

    input: Annotated[str, "ADDRESS"]
    """File of records; - for JSON Lines from standard input."""
    output: Annotated[str, "ADDRESS"]
    """File of results."""
    model: options.ModelOptions = field(default_factory=options.ModelOptions)
    text: options.TextOptions = field(default_factory=options.TextOptions)
    lookup: options.Source = None
    """Source of the arm lookup, see generate. With --ray every node opens its own file."""
    slots: options.Count = 32
    """Number of rows that run in parallel."""
    context: options.OptionalCount = None
    """Maximum tokens of a row, prompt included (default: the model's positions, at most 2048)."""
    mesh: Annotated[str | None, "data=N,model=M"] = None
    """Mesh of devices: rows are split over data, each row's heads and matrices over model (default:
    all devices on data)."""
    trace: Annotated[str | None, "DIR"] = None
    """Write the trace of each record to this folder."""
    trace_top: options.Count = 0
    """Record this many of the most likely tokens at each position of the traces."""
    trace_layers: bool = False
    """Add the attention entropy of each layer and head to each token of the traces."""
    ray: options.RayAddress = None
    """Run on all nodes of the Ray cluster with this head (default: that of RAY_ADDRESS or of this
    machine, else a new one on this machine)."""
    cpus_per_actor: options.OptionalCount = None
    """With --ray: cores of a process on a node without accelerators (default: all of the node)."""
    strict: bool = False
    """Stop at the first record that cannot run instead of writing an error as its result."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    # Without JAX, whose import takes most of a second: the command line and its files.
    _check(arguments)
    from entropix_jax.batch.output import check_output
    from entropix_jax.batch.records import check_input

    check_input(arguments.input)
    check_output(arguments.output, input=arguments.input)
    if arguments.trace is not None:
        _check_traces(arguments.trace, arguments.input, arguments.output)
    if arguments.ray is None:
        return _run(arguments, *_prepare(arguments))

    from entropix_jax.batch.spread import SpreadRun
    from entropix_jax.host.cluster import Cluster

    cluster = Cluster(
        partial(_host, arguments),
        address=arguments.ray,
        cpus=arguments.cpus_per_actor,
        devices=math.prod(map(int, re.findall(r"=\s*(\d+)", arguments.mesh or ""))),
    )
    traces = None if arguments.trace is None else Path(arguments.trace)
    with contextlib.ExitStack() as stack:
        with show_status("connecting to Ray"):
            stack.enter_context(cluster)
        with (
            show_status("starting actors") as status,
            deferred_interrupts(cluster.stop, _SIGNALS) as pressed,
        ):
            description = cluster.describe(status.show)
        if pressed:
            return _interrupted(pressed)
        return _run(arguments, SpreadRun(cluster, traces), description)


def _prepare(arguments: Arguments) -> "tuple[BatchRun, Description]":
    """Loads the model. Returns the run, with its notes and everything that its results depend
    on."""
    with show_status("loading JAX"):
        import jax

        from entropix_jax.batch.run import BatchRun, Defaults
        from entropix_jax.engine.state import Recording
        from entropix_jax.model.loading import check_backend
        from entropix_jax.model.mesh import parse_mesh
        from entropix_jax.sampler.presets import code_identity

    # Whether everything fits, before anything large is loaded.
    sampler = arguments.model.choose_sampler()
    lookup = options.open_source(arguments.lookup, sampler)
    name = options.model_name(arguments.model.model)
    check_backend()
    mesh = parse_mesh(arguments.mesh, jax.local_devices())
    slots = arguments.slots
    context = arguments.model.fit(name, arguments.context, slots=slots, mesh=mesh)

    # The model, its calibrated sampler, and the run.
    model = arguments.model.load(name, mesh if mesh.size > 1 else None)
    defaults = Defaults(sampler, **arguments.text.values(), lookup=lookup)
    run = BatchRun(
        model,
        defaults,
        slots=slots,
        capacity=context,
        recording=Recording(top=arguments.trace_top, layers=arguments.trace_layers),
        traces=None if arguments.trace is None else Path(arguments.trace),
        name=name,
    )
    identity = {
        "model": name,
        "model_fingerprint": model.fingerprint,
        "precision": model.precision.to_json(),
        **{name: value for name, value in vars(defaults).items() if name != "lookup"},
        "sampler": dict(run.sampler.values),
        **({} if lookup is None else {"lookup": lookup.identity}),
        "context": context,
        "input": arguments.input,
        "version": __version__,
        **code_identity(run.sampler.mechanisms),
    }
    return run, (run.sampler.notes_without_user, identity)


def _host(arguments: Arguments) -> "tuple[BatchRun, Description]":
    """Makes the batch of an actor."""
    from entropix_jax.batch.spread import pass_trace

    run, description = _prepare(arguments)
    run.save_trace = run.save_trace and pass_trace
    return run, description


def _run(arguments: Arguments, run: "BatchRun | SpreadRun", description: Description) -> int:
    """Runs the records that have no result, and returns the exit status."""
    from entropix_jax.batch.output import Store
    from entropix_jax.batch.run import count_records

    notes, identity = description
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    # Reading long files takes a while, but nothing can be lost yet: a signal ends the process.
    total = count_records(arguments.input)
    store = Store(arguments.output, identity)
    with deferred_interrupts(run.stop, _SIGNALS) as pressed, store:
        _run_records(arguments, run, store, total)
    return _interrupted(pressed) if pressed else options.EXIT_OK


def _interrupted(pressed: list[int]) -> int:
    print("interrupted: run the same command again to continue", file=sys.stderr)
    return 128 + pressed[0]


def _run_records(
    arguments: Arguments, run: "BatchRun | SpreadRun", store: "Store", total: int | None
) -> None:
    """Runs the records that are not done, shows the progress, and sums up."""
    from entropix_jax.batch.records import read_records

    if arguments.trace is not None:
        Path(arguments.trace).mkdir(parents=True, exist_ok=True)
    if store.done:
        print(f"note: {plural(store.done, 'record')} done already", file=sys.stderr)

    def write(record: "Record | BadRecord", result: Mapping[str, Any]) -> None:
        # A row that failed has a text and an error; a record that cannot run has only an error.
        if arguments.strict and "text" not in result:
            raise UserError(f"{arguments.input}: line {record.line}: {result['error']}")
        store.write(record, result)

    started = time.perf_counter()
    records = read_records(arguments.input)
    run.left = None if total is None else total - store.done
    view = ProgressView(store, run, total)
    with view.follow():
        run.run(records, write, store.is_done)
    seconds = time.perf_counter() - started
    speed = f" ({rate:.0f} tok/s after the start)" if (rate := view.speed.value) else ""
    done = f"{plural(store.done, 'record')} done"
    done += f" ({run.failed} of them with an error)" if run.failed else ""
    tokens = f"{run.tokens} tokens in {seconds:.1f} s{speed}"
    print(f"{done} | {tokens} | {run.usage}", file=sys.stderr)


def _check(arguments: Arguments) -> None:
    """Checks the command line by itself."""
    arguments.text.check()
    check_range("--slots", arguments.slots, 1, _LARGEST)
    check_range("--context", arguments.context, 2, _LARGEST)
    check_range("--max-new-tokens", arguments.text.max_new_tokens, 1, _LARGEST)
    check_range("--trace-top", arguments.trace_top, 0, _LARGEST)
    options.check_cluster(arguments.ray, arguments.cpus_per_actor)
    if (arguments.trace_top or arguments.trace_layers) and arguments.trace is None:
        raise UserError("--trace-top and --trace-layers need --trace DIR")
    if "://" in (arguments.trace or ""):
        raise UserError(f"--trace {arguments.trace}: traces need a folder on this machine")


def _check_traces(folder: str, *others: str) -> None:
    """Refuses a folder of traces in which a record's trace could overwrite the input or output."""
    from entropix_jax.batch.storage import local_path

    for path in filter(None, (local_path(other) for other in others if other != "-")):
        # Either a link itself or its target would be overwritten.
        if Path(folder).resolve() in (path.parent.resolve(), path.resolve().parent):
            raise UserError(f"--trace {folder}: contains {path}: give another folder")
