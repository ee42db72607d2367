"""The one exception that a user is meant to see."""

_LONGEST = 1500  # characters of a message: what is quoted in it may have any length


class UserError(Exception):
    """Something that a user caused and can mend.

    The message is one line: where, what, and what to do. Commands print it on standard error and
    exit with status 2; it never comes with a traceback.
    """

    def __init__(self, message: str) -> None:
        # A message may quote another library's, which may have several lines.
        line = " ".join(message.splitlines())
        if len(line) > _LONGEST:
            line = f"{line[: _LONGEST - 300]} ... {line[-295:]}"
        super().__init__(line)
