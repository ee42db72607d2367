"""The exception for user errors, and common parts of messages."""

import difflib
import importlib.util
import unicodedata
from collections.abc import Sequence
from typing import Any

_LONGEST = 1500  # characters of a message: what is quoted in it may have any length


class UserError(Exception):
    """Something that a user caused and can fix.

    The message is one line: where, what, and what to do. Commands print it on standard error and
    exit with status 2; it never comes with a traceback.
    """

    def __init__(self, message: str) -> None:
        # A message may quote another library's, which may have several lines.
        line = " ".join(message.splitlines())
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST - 300]} ... {line[-295:]}"
        super().__init__(line)


class Note(UserWarning):
    """Something that a user should know. Commands print it on standard error, in one line."""


def check_range(name: str, value: int | None, least: float, most: int | None = None) -> None:
    """Raises UserError if the number of an option or argument is less than `least` or more than
    `most`; None stands for an omitted one."""
    if value is not None and value < least:
        raise UserError(f"{name} must be at least {least}, not {value}")
    if value is not None and most is not None and value > most:
        raise UserError(f"{name} must be at most {most}, not {value}")


def require(extra: str, *packages: str) -> None:
    """Raises UserError if a package of an extra is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UserError(f'{package} is not installed: pip install "entropix-jax[{extra}]"')


def nearest(name: str, known: Sequence[str], otherwise: str | None = None) -> str:
    """Returns the end of an error message: the known name closest to a wrong one. If none is close,
    all of them, or `otherwise`."""
    # A key without its section, or the beginning of one.
    ends = [one for one in known if one.endswith(f".{name}")]
    begins = [one for one in known if len(name) > 2 and f".{one}".rfind(f".{name}") >= 0]
    ends.sort(key=lambda one: not one.startswith("base."))
    begins.sort(key=lambda one: (not one.startswith(name), not one.startswith("base.")))
    likely = [*ends, *begins, *difflib.get_close_matches(name, known, n=1, cutoff=0.6)]
    if likely:
        return f", did you mean '{likely[0]}'?"
    return f" (known: {', '.join(known)})" if otherwise is None else otherwise


def check_unicode(text: Any, what: str) -> None:
    """Raises UserError, which names `what`, if a value is not a text or has surrogates."""
    if not isinstance(text, str):
        raise UserError(f"{what} must be a string, not {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} is not valid Unicode at character {error.start}") from None


def printable(text: str) -> str:
    """Replaces control characters, which could control a terminal, by U+FFFD."""
    return "".join(
        "\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
    )
