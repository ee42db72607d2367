"""Checks of the results of a user's functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from entropix_jax.errors import UserError
from entropix_jax.sampler.control import rewind
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.state import Proposal

ONE, NO = jnp.int32(1), jnp.float32(0.0)
CTX = SimpleNamespace(states={"own": NO})


def proposal(temperature: Any) -> Proposal:
    return Proposal(ONE, temperature, ONE, NO, NO, ONE)


@pytest.mark.parametrize(
    ("part", "valid", "wrong", "message"),
    [
        ("propose", proposal(NO), proposal(jnp.zeros(3)), "Proposal with 0 axes in `temperature`"),
        ("control", rewind(ONE), rewind(jnp.ones(2, int)), "Verdict with 0 axes in `back`"),
        ("may", jnp.bool_(True), jnp.ones(2, bool), "bool [], not bool [2]"),
        ("holds", ONE, NO, "int32 [], not float32 []"),
        ("advance", NO, jnp.zeros(2), "float32 [], not float32 [2]"),
        ("advance", NO, {"a": NO}, "float32 [], not dict(float32 [])"),
        ("learn", NO, ONE, "float32 [], not int32 []"),
    ],
)
def test_results_are_checked(part: str, valid: Any, wrong: Any, message: str) -> None:
    def of(result: Any) -> Callable[..., Any]:
        parts: dict[str, Any] = {part: lambda *arguments: result}
        function: Callable[..., Any] = getattr(Mechanism("own", **parts).guarded(), part)
        return function

    arguments = {"learn": (None, CTX), "control": (CTX, ONE)}.get(part, (CTX,))
    assert of(valid)(*arguments) is valid
    with pytest.raises(UserError, match=re.escape(f"mechanism 'own': `{part}` must return ")):
        of(wrong)(*arguments)
    with pytest.raises(UserError, match=re.escape(message)):
        of(wrong)(*arguments)
