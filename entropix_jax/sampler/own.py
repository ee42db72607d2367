"""Functions of a user's own in a mechanism: an error in one is one line that says where."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from entropix_jax.errors import UserError
from entropix_jax.sampler.context import Proposal
from entropix_jax.sampler.mechanism import Mechanism

_RETURNS = {"propose": Proposal}
_HERE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Own:
    """A user's function, as a part of a mechanism. Equal to another one of the same function."""

    function: Callable[..., Any]
    what: str  # in errors
    returns: type = object

    def __call__(self, *arguments: Any) -> Any:
        """What the function makes; a UserError if that fails, or is nothing of `returns`."""
        try:
            made = self.function(*arguments)
        except UserError:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            raise UserError(
                f"{self.what}: {type(error).__name__}: {reason}{self._place(error)}"
            ) from error
        if not isinstance(made, self.returns):
            wanted, found = self.returns.__name__, type(made).__name__
            raise UserError(f"{self.what} must return a {wanted}, not {found}")
        return made

    def _place(self, error: Exception) -> str:
        """The last line of the function's file on the way to the error; empty where none is."""
        code = getattr(self.function, "__code__", None)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f for f in frames if code is not None and f.filename == code.co_filename]
        return f" ({lines[-1].filename}, line {lines[-1].lineno})" if lines else ""


def guard(mechanism: Mechanism) -> Mechanism:
    """The mechanism with its user's functions as `Own`. Those of this package stay as they are: an
    error in one is a defect."""
    parts: dict[str, Any] = {}
    for field in fields(Mechanism):
        part, what = getattr(mechanism, field.name), f"mechanism '{mechanism.name}': `{field.name}`"
        if _is_users(part):
            parts[field.name] = Own(part, what, _RETURNS.get(field.name, object))
    return replace(mechanism, **parts)


def unguard(part: Any) -> Any:
    """The function that a part of a mechanism is, or holds."""
    return getattr(part, "function", part)


def _is_users(part: Any) -> bool:
    module = str(getattr(part, "__module__", _HERE)).partition(".")[0]
    return callable(part) and not isinstance(part, type) and module != _HERE
