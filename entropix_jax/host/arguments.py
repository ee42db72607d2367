"""One rule for types of arguments, and one for integers of arguments, requests and files."""

import inspect
import math
import operator
from collections.abc import Callable
from functools import wraps
from types import UnionType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

from entropix_jax.errors import UserError, check_range

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def checked(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorates a public function to check the types of its arguments, see `check_type`."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        given = signature.bind(*args, **kwargs)
        for name, value in given.arguments.items():
            given.arguments[name] = check_type(name, value, signature.parameters[name].annotation)
        return function(*given.args, **given.kwargs)

    return call


def check_type(name: str, value: Any, annotation: Any) -> Any:
    """Returns the value of an argument, with NumPy's and pandas' types converted to Python's own.
    UserError if it is not of the annotated type, whose own parameters are not checked."""
    if annotation in (Any, inspect.Parameter.empty):
        return value
    parts = get_args(annotation) if isinstance(annotation, UnionType) else [annotation]
    kinds = [get_origin(part) or part for part in parts]
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if int in kinds and (number := as_integer(value)) is not None and abs(number) < 10**4000:
        return number
    # True is not 1, bytes are not a sequence of texts, and longer integers cannot be written.
    strange = bytes if bool in kinds else (bytes, int)
    if isinstance(value, strange) or not isinstance(value, tuple(kinds)):
        names = " or ".join(dict.fromkeys(k.__name__ for k in kinds)).replace("NoneType", "None")
        raise UserError(f"{name} must be of type {names}, not {abbreviate(value)}")
    return value


def as_integer(value: Any) -> int | None:
    """Returns an integer of any type, NumPy's included, as an `int`, and 4 for 4.0, as JavaScript
    and tables write it. None for any other value, booleans included."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def check_integer(name: str, value: Any, least: float = -math.inf, most: int | None = None) -> int:
    """Returns the integer of an argument. UserError if it is not an integer or out of range."""
    if (number := as_integer(value)) is None:
        raise UserError(f"{name} must be an integer, not {abbreviate(value)}")
    check_range(name, number, least, most)
    return number


def abbreviate(value: object) -> str:
    """Returns a value for a message: on one line and not too long."""
    try:
        text = repr(value)
    except Exception:  # an integer of many digits, or an object's own code
        return f"a value of type {type(value).__name__} that cannot be written"
    return text if len(text) <= 60 else f"{text[:57]}..."
