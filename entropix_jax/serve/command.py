"""`python -m entropix_jax.serve`: a resident model behind the OpenAI API."""

import itertools
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING, Annotated

import tyro

from entropix_jax.cli.options import (
    EXIT_OK,
    Count,
    File,
    Flag,
    ModelOptions,
    OptionalCount,
    Texts,
    model_name,
    option,
    parse,
    run_command,
)
from entropix_jax.cli.status import StatusLine
from entropix_jax.errors import UserError, check_range, nearest, require
from entropix_jax.host.interrupts import deferred_interrupts, exit_at_once

if TYPE_CHECKING:
    from entropix_jax.sampler.sampler import Sampler
    from entropix_jax.serve.wanted import Served

_MAX_CONTEXT = 2048  # unless another number is asked for
_LOOK = 0.04  # seconds of a chunk of steps
_LARGEST = 2**31 - 1  # of what is counted
_MOST_TOP = 20
_NONE = "none"  # of --warm
_origins = tyro.conf.arg(metavar="ORIGIN ...", help_behavior_hint="")


@dataclass(frozen=True)
class Arguments:
    """Serves a model over HTTP with an OpenAI-compatible API that also returns uncertainty.

    Requests run in parallel, each with its own sampler. Ctrl-C or SIGTERM finishes running requests
    and rejects new ones. A second one ends the server at once.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    host: Annotated[str, tyro.conf.arg(metavar="HOST")] = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for all of this machine."""
    port: Count = 8000
    """The port; 0 takes a free one."""
    slots: Count = 8
    """Number of rows that run in parallel."""
    context: OptionalCount = None
    """Maximum tokens of a row, prompt included (default: the model's positions, at most 2048)."""
    queue: Count = 64
    """Number of rows that may wait for a slot; more are refused (429)."""
    time_limit: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 600.0
    """Time limit of a request. Its rows then end with the tokens they have."""
    top_logprobs: Count = 10
    """Maximum alternatives per token that a request may ask for, at most 20. They cost all rows."""
    keep: Count = 32768
    """Total tokens of retained rows (rows that can be continued later). 0 retains none, and records
    no attention entropies of layers."""
    warm: Texts = ()
    """Sampler presets whose programs are compiled before the port opens, besides those of the
    default sampler, the API's penalties and the usual prompt lengths. "none" disables it."""
    name: Annotated[str | None, option("NAME")] = None
    """Name of the model in the API (default: the model's own name, or its folder's)."""
    api_key_file: File = None
    """A file of API keys, one per line. Requests must send one of them."""
    strict: Flag = False
    """Refuse requests with unknown keys. By default the answer names them under `warnings`."""
    allow_origin: Annotated[tuple[str, ...], _origins] = ()
    """Origins of other pages that may use the API, such as https://example.org. Requests may also
    name this server by their hosts."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m entropix_jax.serve") -> int:
    """Runs the command and returns its exit status."""
    return run_command(lambda: _main(parse(Arguments, argv, prog)))


def _main(arguments: Arguments) -> int:
    # What can be wrong without a model comes first: it takes no time.
    require("serve", "pydantic", "starlette", "uvicorn")
    from entropix_jax.serve.guard import read_keys, read_origin

    check_range("--port", arguments.port, 0, 65535)
    check_range("--slots", arguments.slots, 1, _LARGEST)
    check_range("--context", arguments.context, 4, _LARGEST)
    check_range("--queue", arguments.queue, 0, _LARGEST)
    check_range("--keep", arguments.keep, 0, _LARGEST)
    check_range("--top-logprobs", arguments.top_logprobs, 0, _MOST_TOP)
    if not 0 < arguments.time_limit < _LARGEST:
        raise UserError(f"--time-limit must be above 0, not {arguments.time_limit:g}")
    origins = [*map(read_origin, arguments.allow_origin)]
    keys = [] if arguments.api_key_file is None else read_keys(Path(arguments.api_key_file))
    sampler = arguments.model.choose_sampler()
    _check_warm(arguments)
    with _listen(arguments.host, arguments.port) as listener:
        return _serve(arguments, keys, origins, sampler, listener)


def _check_warm(arguments: Arguments) -> None:
    from entropix_jax.sampler.presets import is_preset, preset_names

    for name in itertools.chain(*arguments.warm):
        if name != _NONE and not is_preset(name):
            told = f"no sampler preset {name!r}{nearest(name, preset_names())}"
            raise UserError(f"--warm: {told} (or '{_NONE}')")


@contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens. UserError if the address cannot be taken."""
    from entropix_jax.serve.http import BACKLOG

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}") from None
    with listener:
        yield listener


def _serve(
    arguments: Arguments,
    keys: Sequence[str],
    origins: Sequence[str],
    sampler: "Sampler",
    listener: socket.socket,
) -> int:
    """Loads the model and serves it until a signal comes."""
    import asyncio

    from entropix_jax.engine.engine import Engine
    from entropix_jax.engine.state import Recording
    from entropix_jax.serve.app import make_app
    from entropix_jax.serve.http import HttpServer, log_programs
    from entropix_jax.serve.warm_up import warm_up
    from entropix_jax.serve.worker import Worker

    served = _load(arguments, sampler)
    engine = Engine(
        served.model,
        slots=arguments.slots,
        capacity=served.context,
        recording=Recording(
            top=served.top,
            check=arguments.model.check,
            layers=arguments.keep > 0,
            raw_layers=True,
            state=arguments.keep > 0,
        ),
        look=_LOOK,
        widest=True,
        background=True,
    )
    worker = Worker(engine, slots=arguments.slots, queue=arguments.queue)
    app = make_app(
        served,
        worker,
        limit=arguments.time_limit,
        keep=arguments.keep,
        host=arguments.host,
        keys=keys,
        origins=origins,
        strict=arguments.strict,
    )
    server = HttpServer(app, worker.idle)

    def stop() -> None:
        worker.refuse()
        server.should_exit = True
        exit_at_once()  # at the next signal

    async def serve() -> None:
        presets = [*itertools.chain(*arguments.warm)]
        if _NONE not in presets:
            status = StatusLine()
            if not status.enabled:
                print("compiling the usual programs (minutes, once) ...", file=sys.stderr)

            def show(program: str) -> None:
                status.show(f"compiling the usual programs (minutes, once): {program} ...")

            try:
                await warm_up(served, worker, presets, show)
            finally:
                status.clear()
        log_programs()
        host, port = listener.getsockname()[:2]
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if not server.should_exit:
            told = f"page at http://{place}/, API listening on http://{place}/v1"
            print(f"{served.name}: {told}", file=sys.stderr, flush=True)
        await server.serve([listener])

    worker.start()
    with deferred_interrupts(stop, (SIGINT, SIGTERM)):
        asyncio.run(serve())
        worker.close()
    return EXIT_OK


def _load(arguments: Arguments, sampler: "Sampler") -> "Served":
    """Loads the model after a check of memory, and resolves the sampler for it."""
    from entropix_jax.engine.engine import shared_lanes
    from entropix_jax.engine.memory import check_memory
    from entropix_jax.engine.preparation import calibrate_sampler
    from entropix_jax.host.compile_cache import use_compilation_cache
    from entropix_jax.model.loading import check_backend, open_model, resolve_model
    from entropix_jax.serve.wanted import Served

    check_backend()
    name = model_name(arguments.model.model)
    use_compilation_cache()
    files = open_model(resolve_model(name))
    positions = files.config.max_positions
    if arguments.context is not None and arguments.context > positions:
        raise UserError(f"--context {arguments.context}: the model has {positions} positions")
    context = arguments.context or min(positions, _MAX_CONTEXT)
    slots = arguments.slots + shared_lanes(arguments.slots)
    needs = check_memory(
        files.config,
        arguments.model.dtypes(files),
        slots=slots,
        capacity=context,
        mesh=None,
    )
    print(needs, file=sys.stderr)
    model = arguments.model.load(name)
    for note in calibrate_sampler(sampler, model).notes:
        print(f"note: {note}", file=sys.stderr)
    if arguments.name is None and Path(name).exists():
        name = Path(name).resolve().name  # where it lies is nobody's business
    return Served(arguments.name or name, model, sampler, context, arguments.top_logprobs)
