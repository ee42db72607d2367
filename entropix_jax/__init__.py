"""Llama inference in pure JAX with a sampler that reacts to the model's uncertainty.

    import entropix_jax

    model = entropix_jax.load()
    rows = entropix_jax.generate(model, "Once", max_new_tokens=50)
    print(rows[0].text)

Importing the package is cheap: JAX is imported at the first use of one of these names.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Event",
    "Generation",
    "LanguageModel",
    "Piece",
    "Recording",
    "Request",
    "Row",
    "Sampler",
    "TokenRecord",
    "UserError",
    "encode_prompt",
    "generate",
    "load",
    "load_sampler",
]

if TYPE_CHECKING:
    from entropix_jax.decode import Recording
    from entropix_jax.errors import UserError
    from entropix_jax.generation import (
        Event,
        Generation,
        Piece,
        Request,
        Row,
        encode_prompt,
        generate,
    )
    from entropix_jax.loading import LanguageModel, load
    from entropix_jax.sampler.presets import Sampler, load_sampler
    from entropix_jax.trace import TokenRecord


def __getattr__(name: str) -> Any:
    """Imports what is asked for (PEP 562). `generation` itself uses all but the error's name."""
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    home = "entropix_jax.loading" if name == "load" else "entropix_jax.generation"
    return getattr(importlib.import_module(home), name)
