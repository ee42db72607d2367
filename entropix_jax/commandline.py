"""What all commands share: arguments in, an exit status out, and errors of one line."""

import contextlib
import dataclasses
import difflib
import errno
import io
import os
import re
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from entropix_jax.errors import Note, UserError
from entropix_jax.files import read_text
from entropix_jax.interrupts import EXIT_INTERRUPT

EXIT_OK, EXIT_USAGE = 0, 2


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
        UserError: unknown, missing, malformed or repeated options.
    """
    argv = sys.argv[1:] if argv is None else argv
    if repeated := _repeated(arguments, argv):
        raise UserError(f"{repeated} is given more than once (see {prog} --help)")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = tyro.cli(
                arguments, args=argv, prog=prog, config=(tyro.conf.FlagCreatePairsOff,)
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        message = _one_line(complaint.getvalue())
        raise UserError(f"{message}{_meant(arguments, message)} (see {prog} --help)") from None
    for name, given in vars(parsed).items():
        if isinstance(given, tuple) and () in given:
            raise UserError(f"--{name.replace('_', '-')}: nothing follows it")
    return parsed


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
    """Runs a command and turns what went wrong into one line on standard error and a status.

    0 for success, 2 for whatever a user can mend, 130 for an interrupt. A reader that closes
    standard output early (`| head`) ends the command quietly, with 0.
    """
    _mend_streams()
    try:
        try:
            with _noted_warnings():
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
        return _fail(_told(error))
    except MemoryError:
        return _fail(_NO_MEMORY)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(_NO_MEMORY)


def model_name(name: str | None) -> str:
    """The model that a command is to use: the one that is named, else the default one, which is
    told on standard error."""
    if name is not None:
        return name
    from entropix_jax.loading import TINY, default_model

    name = default_model()
    other = "--model names another" if name != TINY else "a tiny one of an invented world"
    print(f"model: {name} ({other})", file=sys.stderr)
    return name


@contextlib.contextmanager
def _noted_warnings() -> Iterator[None]:
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


def _told(error: OSError) -> str:
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


def printable(text: str) -> str:
    """Text with U+FFFD for control characters, which could steer a terminal."""
    return "".join(
        "\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
    )


def _fail(message: str) -> int:
    with contextlib.suppress(OSError):  # standard error on a full disk
        print(f"error: {printable(message)}", file=sys.stderr)
    return EXIT_USAGE


def _repeated(arguments: type, argv: Sequence[str]) -> str | None:
    """An option that is given twice and may be given once. No option's name is ever a value."""
    hints = get_type_hints(arguments, include_extras=True)
    meant: dict[str, str] = {}  # by each name of an option that may be given once
    for field in dataclasses.fields(arguments):
        if isinstance(field.default, tuple):
            continue
        name = "--" + field.name.replace("_", "-")
        meant[name] = name
        for about in getattr(hints[field.name], "__metadata__", ()):
            meant |= dict.fromkeys(getattr(about, "aliases", None) or (), name)
    seen: set[str] = set()
    for argument in argv:
        option = meant.get(argument.partition("=")[0].replace("_", "-"), "")
        if option in seen:
            return option
        seen |= {option} - {""}
    return None


def _meant(arguments: type, message: str) -> str:
    """The end of the line about an option that does not exist: one that is much like it."""
    unknown = re.match(r"Unrecognized options: (--[\w-]+)", message)
    known = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(arguments)]
    close = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.7) if unknown else ()
    return f", did you mean {close[0]}?" if close else ""


def _mend_streams() -> None:
    """Standard streams that take whatever is written to them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell, `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    # A terminal's encoding may lack characters that a model writes.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _one_line(box: str) -> str:
    """The message in tyro's complaint: below the title, down to a rule, without the frame."""
    lines = [line.strip("│╭╰╮╯ ") for line in box.splitlines()]
    is_rule = [not line.strip("─-") for line in lines]  # hyphens where UTF-8 cannot be written
    first = 2 if is_rule[1:2] == [True] else 1
    last = is_rule.index(True, first) if True in is_rule[first:] else len(lines)
    message = " ".join(lines[first:last])
    if message.startswith("Missing from "):
        # Each option that is missing comes with its whole help text.
        _, _, options = message.partition(": ")
        names = re.findall(r"(?:^|\(required\) )(--[\w-]+|[A-Z_]+)\b", options)
        return f"{' and '.join(names)} must be given" if names else message
    message = message.removeprefix("Error parsing ")
    return re.sub(
        r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not an integer", message
    )
