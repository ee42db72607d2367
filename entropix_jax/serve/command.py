"""`entropix-jax serve`: a resident model with an OpenAI-compatible API."""

import logging
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from entropix_jax.cli.options import (
    EXIT_OK,
    Count,
    File,
    Flag,
    ModelOptions,
    OptionalCount,
    choose_context,
    model_name,
    option,
)
from entropix_jax.cli.status import StatusLine
from entropix_jax.errors import UserError, check_range, require
from entropix_jax.host.interrupts import deferred_interrupts, exit_at_once

if TYPE_CHECKING:
    from entropix_jax.sampler.sampler import Sampler
    from entropix_jax.serve.request import ServedModel

_MAX_CONTEXT = 2048  # by default
_LOOK = 0.04  # seconds of a chunk of steps
_LARGEST = 2**31 - 1
# Smallest and largest values.
_RANGES = {
    "port": (0, 65535),
    "slots": (1, _LARGEST),
    "context": (4, _LARGEST),
    "queue": (0, _LARGEST),
    "keep": (0, _LARGEST),
    "top_logprobs": (0, 20),
}
_origins = tyro.conf.arg(metavar="ORIGIN ...", help_behavior_hint="")


@dataclass(frozen=True)
class Arguments:
    """Serves a model over HTTP with an OpenAI-compatible API that also returns uncertainty.

    Requests run in parallel, each with its own sampler. Ctrl-C or SIGTERM finishes running requests
    and rejects new ones. A second one ends the server at once.

    Example:
        --model tiny --slots 8
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
    cold: Flag = False
    """Accept requests at once. By default the usual programs are compiled first: of the default
    sampler, the API's sampling options and the usual prompt lengths."""
    name: Annotated[str | None, option("NAME")] = None
    """Name of the model in the API (default: the model's own name, or its folder's)."""
    api_key_file: File = None
    """A file of API keys, one per line. Requests must send one of them."""
    allow_origin: Annotated[tuple[str, ...], _origins] = ()
    """Allowed origins of other pages, such as https://example.org. Requests may also name this
    server by their hosts."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    # Mistakes in the options are reported before the model is loaded.
    require("serve", "pydantic", "starlette", "uvicorn")
    from entropix_jax.serve.guard import read_keys, read_origin
    from entropix_jax.serve.http import BACKLOG

    for name, limits in _RANGES.items():
        check_range(f"--{name.replace('_', '-')}", getattr(arguments, name), *limits)
    if not 0 < arguments.time_limit < _LARGEST:
        raise UserError(f"--time-limit must be above 0, not {arguments.time_limit:g}")
    access = {
        "host": arguments.host,
        "origins": [*map(read_origin, arguments.allow_origin)],
        "keys": [] if arguments.api_key_file is None else read_keys(Path(arguments.api_key_file)),
    }
    sampler = arguments.model.choose_sampler()
    place = (arguments.host, arguments.port)
    family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
    try:
        listener = socket.create_server(place, family=family, backlog=BACKLOG)
    except OSError as error:
        where = f"--host {arguments.host} --port {arguments.port}"
        raise UserError(f"{where}: {error.strerror or error}") from None
    with listener:
        return _serve(arguments, access, _load(arguments, sampler), listener)


def _serve(
    arguments: Arguments, access: dict[str, Any], served: "ServedModel", listener: socket.socket
) -> int:
    """Serves the model until a signal comes."""
    import asyncio

    from entropix_jax.engine.engine import Engine
    from entropix_jax.engine.state import Recording
    from entropix_jax.serve.app import make_app
    from entropix_jax.serve.http import HttpServer
    from entropix_jax.serve.warm_up import warm_up
    from entropix_jax.serve.worker import Worker

    keeps = arguments.keep > 0
    recording = Recording(
        top=served.top, check=arguments.model.check, layers=keeps, raw_layers=True, state=keeps
    )
    engine = Engine(
        served.model,
        slots=arguments.slots,
        capacity=served.context,
        recording=recording,
        look=_LOOK,
        widest=True,
        background=True,
    )
    worker = Worker(engine, slots=arguments.slots, queue=arguments.queue)
    app = make_app(served, worker, limit=arguments.time_limit, keep=arguments.keep, **access)
    server = HttpServer(app, worker.idle)

    def stop() -> None:
        worker.refuse()
        server.should_exit = True
        exit_at_once()  # at the next signal

    async def serve() -> None:
        if not arguments.cold:
            status, message = StatusLine(), "compiling the usual programs (minutes, once)"
            if not status.enabled:
                print(f"{message} ...", file=sys.stderr)
            try:
                await warm_up(served, worker, lambda name: status.show(f"{message}: {name} ..."))
            finally:
                status.clear()
        log = logging.getLogger("entropix_jax.engine.programs")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if not server.should_exit:
            ready = f"{served.name}: page at {url}/, API listening on {url}/v1"
            print(ready, file=sys.stderr, flush=True)
        await server.serve([listener])

    worker.start()
    with deferred_interrupts(stop, (SIGINT, SIGTERM)):
        asyncio.run(serve())
        worker.close()
    return EXIT_OK


def _load(arguments: Arguments, sampler: "Sampler") -> "ServedModel":
    """Loads the model after a check of memory, and resolves the sampler for it."""
    from entropix_jax.engine.engine import shared_lanes
    from entropix_jax.engine.memory import check_memory
    from entropix_jax.engine.preparation import calibrate_sampler
    from entropix_jax.host.compile_cache import use_compilation_cache
    from entropix_jax.model.loading import check_backend, open_model, resolve_model
    from entropix_jax.serve.request import ServedModel

    check_backend()
    name = model_name(arguments.model.model)
    use_compilation_cache()
    files = open_model(resolve_model(name))
    context = choose_context(arguments.context, files.config, _MAX_CONTEXT)
    slots, types = arguments.slots + shared_lanes(arguments.slots), arguments.model.dtypes(files)
    needs = check_memory(files.config, types, slots=slots, capacity=context, mesh=None)
    print(needs, file=sys.stderr)
    model = arguments.model.load(name)
    for note in calibrate_sampler(sampler, model).notes:
        print(f"note: {note}", file=sys.stderr)
    if arguments.name is None and Path(name).exists():
        name = Path(name).resolve().name  # clients do not see its folder
    return ServedModel(arguments.name or name, model, sampler, context, arguments.top_logprobs)
