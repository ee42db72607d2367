"""`entropix-jax generate`: generates text from a prompt, and shows its uncertainty."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from entropix_jax.cli import options
from entropix_jax.cli.status import Speed, StatusLine, show_status, show_waits
from entropix_jax.errors import UserError, check_range
from entropix_jax.host.files import check_apart, check_regular, check_writable, scratch_beside
from entropix_jax.host.interrupts import EXIT_INTERRUPT, deferred_interrupts

if TYPE_CHECKING:
    from entropix_jax.engine.api import Generation
    from entropix_jax.engine.results import Event, Piece
    from entropix_jax.engine.trace import TraceWriter

_REPORT_TOP = 5  # most likely tokens that a page shows


@dataclass(frozen=True)
class Arguments:
    """Generates text from a prompt with an uncertainty-aware sampler.

    The text goes to standard output; notes and a summary go to standard error.

    Example:
        --prompt "The sky is" --report run.html
    """

    prompt: options.Text = None
    """The prompt."""
    prompt_file: options.File = None
    """Read the prompt from a file, - for standard input. One final line break is dropped."""
    messages: options.File = None
    """Read a conversation from a JSON file, - for standard input: a list of {"role": ...,
    "content": ...}."""
    model: options.ModelOptions = field(default_factory=options.ModelOptions)
    text: options.TextOptions = field(default_factory=options.TextOptions)
    samples: options.Count = 1
    """Number of texts to generate from the prompt, in parallel."""
    method: options.Text = None
    """Generate several continuations and choose one: self-consistency, weighted-vote, best-of-n,
    surest-of-n, dts, dts-greedy, eager or beam. The tree goes to standard error."""
    forks: options.Count = 8
    """Maximum number of continuations of a --method, at most 32."""
    vote: bool = False
    """Choose the most frequent answer. An answer is the last number, else the last line."""
    highlight: options.Highlight = "regimes"
    """On a terminal, colour each token by its regime, or only forks and steps back."""
    format: Literal["text", "json"] = "text"
    """text: print the text as it is generated. json: print one object per sample at the end."""
    lookup: options.Source = None
    """Text to insert where the arm lookup serves a token: a table of keys and values, FILE.csv or
    FILE.jsonl, a URL, or exec: and the path of an executable."""
    ask: bool = False
    """On a terminal, ask which branch to take if the two best scores are within the margin."""
    verbose: bool = False
    """Print the means of the metrics at the end."""
    trace: options.File = None
    """Write a trace: JSON Lines, one object per token."""
    trace_top: options.Count = 0
    """Record this many of the most likely tokens at each position of the trace."""
    trace_layers: bool = False
    """Record the attention entropy and varentropy of each layer and head at each position."""
    trace_attention: bool = False
    """Record the five positions that each of the three sharpest heads attends to most."""
    plane: bool = False
    """Print the plane of entropy and varentropy at the end, with a sign in each used cell."""
    report: Annotated[str | None, "FILE.html"] = None
    """Write a web page of the run. By default it has the five most likely tokens and all layers."""


def run(arguments: Arguments) -> int:
    """Runs the command and returns its exit status."""
    _check(arguments)
    # JAX takes most of a second to import: not before the command line is known to be good.
    with show_status("loading JAX"):
        from entropix_jax.cli.terminal import asker, can_ask
        from entropix_jax.engine.api import stream
        from entropix_jax.engine.state import Recording
        from entropix_jax.engine.trace import TraceWriter

    # A mistake in these should not wait for the model.
    sampler = arguments.model.choose_sampler()
    lookup = options.open_source(arguments.lookup, sampler)
    prompt = _read_prompt(arguments)
    top, layers = arguments.trace_top, arguments.trace_layers
    if arguments.trace is not None:
        check_writable(Path(arguments.trace))
        check_apart(Path(arguments.trace), arguments.prompt_file, arguments.messages)
        if arguments.report is not None:
            check_regular(Path(arguments.trace), ": --report reads the trace again")
    if arguments.report is not None:
        from entropix_jax.report.page import check_report, write_report

        inputs = (arguments.trace, arguments.prompt_file, arguments.messages)
        check_report(Path(arguments.report), *inputs)
        top, layers = (top, layers) if top or layers else (_REPORT_TOP, True)

    name, model, calibrated = arguments.model.start(sampler, has_user=False)
    status = StatusLine()
    generation = stream(
        model,
        prompt,
        calibrated,
        **arguments.text.values(),
        samples=arguments.samples,
        recording=Recording(top=top, layers=layers, attention=arguments.trace_attention),
        lookup=lookup,
        ask=asker(status) if arguments.ask and can_ask() else None,
    )
    if arguments.method is not None:
        from entropix_jax.cli.search import run_search
        from entropix_jax.engine.methods import find_method

        request = generation.rows[0].request
        method = find_method(arguments.method).with_vote(arguments.vote)
        as_json = arguments.format == "json"
        return run_search(model, request, method, arguments.forks, as_json=as_json)

    if arguments.trace is not None and Path(arguments.trace).is_fifo():
        print(f"note: {arguments.trace}: a pipe, which waits for its reader", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        trace = stack.enter_context(_trace_file(arguments))
        # Opened while a signal still ends the process: a pipe without a reader blocks for ever.
        writer = None if trace is None else stack.enter_context(TraceWriter(trace))
        stack.enter_context(deferred_interrupts(generation.stop))
        if trace is None or writer is None:
            return _run(arguments, generation, None, status)
        assert generation.rows.header is not None
        writer.write({**generation.rows.header, "model": name})
        try:
            return _run(arguments, generation, writer, status)
        finally:
            # However the run ended, the trace says how far it came.
            for event in generation.interrupt():
                if event.token is not None:
                    writer.write(event.token.to_json(retracted=event.retracted))
            writer.write(generation.rows.footer())
            if arguments.report is not None:
                write_report(trace, Path(arguments.report))
                print(f"page: {arguments.report}", file=sys.stderr)


def _check(arguments: Arguments) -> None:
    """Refuses what is wrong by the command line alone."""
    sources = (arguments.prompt, arguments.prompt_file, arguments.messages)
    given = sum(source is not None for source in sources)
    if given == 0:
        raise UserError("--prompt is missing: give it, or --prompt-file or --messages")
    if given > 1:
        raise UserError("give only one of --prompt, --prompt-file and --messages")
    if arguments.prompt == "":
        raise UserError("the prompt is empty")
    arguments.text.check()
    if arguments.messages is not None and arguments.text.no_chat:
        raise UserError("--no-chat cannot be used with --messages, which is a chat")
    if arguments.messages is not None and arguments.text.system is not None:
        raise UserError("--system cannot be used with --messages: put it into the messages")
    check_range("--samples", arguments.samples, 1, 1024)  # see `results.MAX_SAMPLES`
    check_range("--trace-top", arguments.trace_top, 0)
    for name, file in (("--trace", arguments.trace), ("--report", arguments.report)):
        if file == "-":
            raise UserError(f"{name} -: standard output is for the text: give a file's name")
    if arguments.method is None and arguments.vote:
        raise UserError("--vote needs --method")
    if arguments.method is not None:
        from entropix_jax.engine.methods import find_method
        from entropix_jax.engine.search import MAX_FORKS

        find_method(arguments.method)
        check_range("--forks", arguments.forks, 1, MAX_FORKS)
        alone = (arguments.samples > 1, arguments.trace, arguments.report, arguments.ask)
        if any(alone) or arguments.verbose or arguments.plane:
            names = "--samples, --trace, --report, --ask, --verbose, --plane"
            raise UserError(f"--method excludes {names}")
    if arguments.ask and (arguments.samples > 1 or arguments.format == "json"):
        raise UserError("--ask needs one sample and --format text")
    traced = arguments.trace or arguments.report
    parts = arguments.trace_top, arguments.trace_layers, arguments.trace_attention
    if any(parts) and not traced:
        names = "--trace-top, --trace-layers and --trace-attention"
        raise UserError(f"{names} need --trace FILE or --report FILE.html")


def _read_prompt(arguments: Arguments) -> Any:
    """The prompt's text, or the decoded file of messages."""
    if arguments.prompt_file is not None:
        return options.read_input(arguments.prompt_file, "--prompt")
    if arguments.messages is None:
        return arguments.prompt
    messages = options.read_messages(arguments.messages)
    return [messages] if isinstance(messages, str) else messages  # a text alone is a prompt


@contextlib.contextmanager
def _trace_file(arguments: Arguments) -> Iterator[Path | None]:
    """Yields the file of the run's trace; for a page alone, a temporary one in its folder."""
    if arguments.trace is not None or arguments.report is None:
        yield None if arguments.trace is None else Path(arguments.trace)
    else:
        with scratch_beside(Path(arguments.report)) as folder:
            yield folder / f"{Path(arguments.report).stem}.jsonl"


def _run(
    arguments: Arguments, generation: "Generation", writer: "TraceWriter | None", status: StatusLine
) -> int:
    """Iterates over the run: prints samples in order as their text becomes final, writes the trace,
    and sums up. Returns the exit status."""
    from entropix_jax.cli.terminal import TextScreen, means, print_legend, summary

    rows = generation.rows
    actions = arguments.highlight == "actions"
    screen = TextScreen(status, actions=actions) if arguments.format == "text" else None
    if screen is not None and screen.coloured:
        print_legend(rows[0].request.sampler.values, actions=actions)
    waiting: list[list[Piece]] = [[] for _ in rows]
    shown = 0  # the sample that is being printed

    def take(*events: "Event") -> None:
        nonlocal shown
        for event in events:
            if writer is not None and event.token is not None:
                writer.write(event.token.to_json(retracted=event.retracted))
            waiting[event.row.number].extend(event.pieces)
        if screen is not None:
            while shown < len(rows):
                for piece in waiting[shown]:
                    screen.show(piece.text, piece.token)
                waiting[shown].clear()
                if rows[shown].finish_reason is None:
                    break
                screen.end_text()
                shown += 1

    programs = generation.engine.programs
    speed = Speed(lambda: generation.seconds() - programs.waited)
    try:
        with show_waits(status, lambda: programs):
            for event in generation:
                speed.add(event.token is not None and not event.retracted)
                take(event)
        take(*generation.interrupt())  # where Ctrl-C has ended the iteration
    finally:
        if screen is not None:
            screen.end_text()

    if screen is None:
        for index, row in enumerate(rows):
            options.print_json(
                {
                    "row": index,
                    **row.to_json(),
                    "prompt_tokens": list(row.request.prompt),
                    "token_records": [token.to_json() for token in row.tokens],
                }
            )
    if arguments.verbose:
        print(means(rows), end="", file=sys.stderr)
        assert rows.header is not None
        types = rows.header["precision"]
        line = f"weights {types['weights']}, hidden states {types['activations']}"
        print(line, file=sys.stderr)
    if arguments.plane:
        from rich.console import Console

        from entropix_jax.cli.plane import draw_plane

        console = Console(stderr=True, highlight=False)
        tokens = [token for row in rows for token in row.tokens]
        used = rows[0].request.sampler
        plane = draw_plane(tokens, used.values, used.calibration, console.width)
        console.print(plane, soft_wrap=True)
    print(summary(rows, speed.value), file=sys.stderr)
    if errors := {i: row.error for i, row in enumerate(rows) if row.error is not None}:
        messages = [f"row {i}: {e}" if len(rows) > 1 else e for i, e in errors.items()]
        hint = "" if arguments.model.check else " (--check looks for them in the weights)"
        raise UserError("; ".join(messages) + hint)
    interrupted = any(row.finish_reason == "interrupt" for row in rows)
    return EXIT_INTERRUPT if interrupted else options.EXIT_OK
