"""The search methods of sweeps: those of `engine.methods`, and controls matched to them."""

from dataclasses import replace

from entropix_jax.engine.matched import MatchedForks
from entropix_jax.engine.methods import METHODS as OFFERED

_CONTROLS = [
    replace(OFFERED[name], name=f"{name}-matched", make=MatchedForks) for name in ("dts", "eager")
]
METHODS = {**OFFERED, **{control.name: control for control in _CONTROLS}}
