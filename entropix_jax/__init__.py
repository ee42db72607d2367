"""Llama inference in pure JAX with a sampler that reacts to the model's uncertainty.

    import entropix_jax

    model = entropix_jax.load()
    rows = entropix_jax.generate(model, "Once", max_new_tokens=50)
    print(rows[0].text)

Importing the package is cheap: JAX is imported at the first use of one of these names.
"""

import importlib
from typing import TYPE_CHECKING, Any

from entropix_jax.version import __version__ as __version__

_MODULES = {
    "Engine": "engine.loop",
    "Event": "engine.results",
    "Recording": "engine.state",
    "Request": "engine.request",
    "Row": "engine.results",
    "Sampler": "sampler.sampler",
    "UserError": "errors",
    "calibrate_sampler": "engine.calibrated",
    "generate": "engine.api",
    "load": "model.loading",
    "load_sampler": "sampler.presets",
    "score": "engine.api",
    "stream": "engine.api",
    "use_compilation_cache": "host.compile_cache",
}
__all__ = [*_MODULES]

if TYPE_CHECKING:
    from entropix_jax.engine.api import generate as generate
    from entropix_jax.engine.api import score as score
    from entropix_jax.engine.api import stream as stream
    from entropix_jax.engine.calibrated import calibrate_sampler as calibrate_sampler
    from entropix_jax.engine.loop import Engine as Engine
    from entropix_jax.engine.request import Request as Request
    from entropix_jax.engine.results import Event as Event
    from entropix_jax.engine.results import Row as Row
    from entropix_jax.engine.state import Recording as Recording
    from entropix_jax.errors import UserError as UserError
    from entropix_jax.host.compile_cache import use_compilation_cache as use_compilation_cache
    from entropix_jax.model.loading import load as load
    from entropix_jax.sampler.presets import load_sampler as load_sampler
    from entropix_jax.sampler.sampler import Sampler as Sampler


def __dir__() -> list[str]:
    """The public names, imported or not, for completion."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
