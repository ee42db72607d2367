"""What all commands share: parsing arguments, the exit status, and errors of one line."""

import contextlib
import difflib
import errno
import gc
import io
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from entropix_jax.errors import Note, UserError, printable
from entropix_jax.host.files import read_text
from entropix_jax.host.interrupts import EXIT_INTERRUPT

EXIT_OK, EXIT_USAGE = 0, 2
# JAX keeps a million small objects for good. Python's default threshold of 700 scans them so often
# that it takes a quarter of the start-up.
_GC_THRESHOLD = 50_000


def _option(metavar: str) -> Any:
    # With the constructor, the text "None" is text. An absent option needs no "(default: None)".
    return tyro.conf.arg(metavar=metavar, constructor=str, help_behavior_hint="")


# Types of options, for the fields of a command's arguments.
Text = Annotated[str | None, _option("TEXT")]
File = Annotated[str | None, _option("FILE")]
Model = Annotated[str | None, _option("MODEL")]
_Weights = Literal["bfloat16", "float32", "int8"]
_weights: Any = _Weights
_dtype = tyro.conf.arg(
    metavar="{bfloat16,float32,int8}",
    constructor=_weights,
    help_behavior_hint="",
    aliases=["--weights"],
)
Dtype = Annotated[_Weights | None, _dtype]
Count = Annotated[int, tyro.conf.arg(metavar="N")]
Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
_several = tyro.conf.arg(metavar="TEXT ...", help_behavior_hint="")
Texts = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, _several]

Arguments = TypeVar("Arguments")


def parse(arguments: type[Arguments], argv: Sequence[str] | None, prog: str) -> Arguments:
    """The command line as an instance of the dataclass `arguments`. `--help` prints and exits.

    Raises:
        UserError: unknown, missing or malformed options.
    """
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            parsed, unknown = tyro.cli(
                arguments,
                args=argv,
                prog=prog,
                config=(tyro.conf.FlagCreatePairsOff,),
                return_unknown_args=True,
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise UserError(f"{_first_paragraph(error.getvalue())} (see {prog} --help)") from None
    if unknown:
        options = [f"--{name.replace('_', '-')}" for name in vars(parsed)]
        close = difflib.get_close_matches(unknown[0], options, n=1, cutoff=0.7)
        hint = f", did you mean {close[0]}?" if close else ""
        raise UserError(f"unknown options: {' '.join(unknown)}{hint} (see {prog} --help)")
    for name, value in vars(parsed).items():
        if isinstance(value, tuple) and () in value:
            raise UserError(f"--{name.replace('_', '-')}: nothing follows it")
    return parsed


def _first_paragraph(box: str) -> str:
    """The message in the box that tyro draws: below its title, down to a rule."""

    def is_rule(line: str) -> bool:
        return not line.strip("─-")  # hyphens where UTF-8 cannot be written

    lines = [line.strip("│╭╰╮╯ ") for line in box.splitlines()[1:]]
    message = itertools.dropwhile(is_rule, lines)
    return " ".join(itertools.takewhile(lambda line: not is_rule(line), message))


def flat_settings(given: Sequence[Sequence[str]]) -> list[str]:
    """The texts of all `--set`.

    Raises:
        UserError: one of them is empty.
    """
    settings = [text for texts in given for text in texts]
    if "" in settings:
        raise UserError("--set: an empty text sets nothing: expected sampler.KEY=VALUE")
    return settings


def run_command(command: Callable[[], int]) -> int:
    """Runs a command; errors become one line on standard error.

    Returns the exit status: 0 for success, 2 for an error that the user can correct, 130 for an
    interrupt. A reader that closes standard output early (`| head`) ends the command quietly, with
    0.
    """
    _repair_streams()
    gc.set_threshold(_GC_THRESHOLD)
    try:
        try:
            with _print_notes():
                status = command()
        except SystemExit as exit_:  # of --help, or with a message, of a library
            if isinstance(exit_.code, str):
                raise UserError(exit_.code) from None
            status = exit_.code or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    except BrokenPipeError:
        return EXIT_OK
    except OSError as error:
        return _fail(_describe(error))
    except MemoryError:
        return _fail(_NO_MEMORY)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(_NO_MEMORY)


def model_name(name: str | None) -> str:
    """The model that a command uses: `name`, else the default one, with a line on standard error
    that says which."""
    if name is not None:
        return name
    from entropix_jax.model.loading import TINY, default_model

    name = default_model()
    other = "--model names another" if name != TINY else "a tiny one of an invented world"
    print(f"model: {name} ({other})", file=sys.stderr)
    return name


@contextlib.contextmanager
def _print_notes() -> Iterator[None]:
    """Prints each `Note` as a line of its own; other warnings stay as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", Note)
        show = warnings.showwarning

        def print_note(
            message: Warning | str, category: type[Warning], *rest: Any, **named: Any
        ) -> None:
            if issubclass(category, Note):
                with contextlib.suppress(OSError):  # standard error on a full disk
                    print(f"note: {printable(str(message))}", file=sys.stderr)
            else:
                show(message, category, *rest, **named)

        warnings.showwarning = print_note
        yield


def _describe(error: OSError) -> str:
    """What went wrong, and where, as far as the error says."""
    reason = error.strerror or str(error) or type(error).__name__
    where = error.filename
    if where is None and error.errno in _OF_OUTPUT:  # standard output has no name
        where = "the output cannot be written"
    return reason if where is None else f"{where}: {reason}"


_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_NO_MEMORY = "not enough memory: fewer rows, fewer new tokens or a smaller model need less"


def read_input(name: str, instead: str) -> str:
    """The text of a file, or of standard input where the name is `-`; one final line break is
    dropped.

    Raises:
        UserError: it cannot be read, or is not UTF-8. `instead` is the option that gives the text
            itself.
    """
    if name != "-":
        return read_text(Path(name)).removesuffix("\n")
    if sys.stdin is None:
        raise UserError(f"standard input is closed: give {instead}, or the name of a file")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: not UTF-8 at byte {error.start}") from None


def _fail(message: str) -> int:
    with contextlib.suppress(OSError):  # standard error on a full disk
        print(f"error: {printable(message)}", file=sys.stderr)
    return EXIT_USAGE


def _repair_streams() -> None:
    """Makes the standard streams take whatever is written to them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    # A terminal's encoding may lack characters that a model writes.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
