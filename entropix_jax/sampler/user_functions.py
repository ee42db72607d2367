"""Functions of a user's mechanisms: their errors are one line, and their results are checked."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from entropix_jax.errors import UserError
from entropix_jax.sampler.control import Verdict
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.state import Proposal

_RETURNS: dict[str, type] = {"propose": Proposal, "observe": Metrics, "control": Verdict}
_SCALARS = {"may": "bool", "holds": "int32"}
_FILTERS = "logits", "rule", "reweigh"
_STATES = {"advance": 0, "learn": 1}  # which argument the context is


@dataclass(frozen=True)
class UserFunction:
    """A user's function in a mechanism. Instances of the same function are equal."""

    function: Callable[..., Any]
    mechanism: str  # its name
    part: str  # the field of `Mechanism`

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function. Raises UserError if the call fails, or if the type or a shape of the
        result is not that of its part of a mechanism."""
        what = f"mechanism '{self.mechanism}': `{self.part}`"
        try:
            made = self.function(*arguments)
        except UserError:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            place = self._place(error)
            raise UserError(f"{what}: {type(error).__name__}: {reason}{place}") from error
        expected, found = self._compare(made, arguments)
        if expected != found:
            raise UserError(f"{what} must return {expected}, not {found}")
        return made

    def _compare(self, made: Any, arguments: Any) -> tuple[str, str]:
        """Returns the descriptions of a valid result and of this one: equal if it is valid."""
        found = _describe(made)
        if kind := _RETURNS.get(self.part):
            if not isinstance(made, kind):
                return kind.__name__, found
            for name, value in vars(made).items():
                axes = 1 if name == "tokens" else 0
                if name != "state" and jnp.ndim(value) != axes:
                    return f"{kind.__name__} with {axes} axes in `{name}`", _describe(value)
        elif self.part in _FILTERS:
            return _describe(arguments[0]), found
        elif self.part in _STATES:
            return _describe(arguments[_STATES[self.part]].states.get(self.mechanism)), found
        elif self.part in _SCALARS:
            return f"{_SCALARS[self.part]} []", found
        return found, found

    def _place(self, error: Exception) -> str:
        """Returns the last line of the function's file on the way to the error; "" if there is
        none."""
        file = getattr(getattr(self.function, "__code__", None), "co_filename", None)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        return f" ({file}, line {frames[-1].lineno})" if frames else ""


def _describe(made: Any) -> str:
    """Returns the types and shapes of arrays, or else the type of a value."""
    leaves = jax.tree.leaves(made)
    if not leaves or not all(hasattr(x, "dtype") or isinstance(x, int | float) for x in leaves):
        return type(made).__name__
    arrays = [f"{jnp.result_type(leaf)} {list(jnp.shape(leaf))}" for leaf in leaves]
    return arrays[0] if leaves[0] is made else f"{type(made).__name__}({', '.join(arrays)})"
