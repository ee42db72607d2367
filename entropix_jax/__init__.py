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

_HOMES = {
    "Event": "results",
    "Generation": "generation",
    "InspectedToken": "inspection",
    "LanguageModel": "loading",
    "Piece": "results",
    "Proposal": "sampler.proposal",
    "Recording": "decode_state",
    "Request": "results",
    "Retriever": "retrieval",
    "Row": "results",
    "Rows": "results",
    "RowView": "sampler.proposal",
    "Sampler": "sampler.sampler",
    "TokenRecord": "trace",
    "UserError": "errors",
    "encode_prompt": "preparation",
    "generate": "api",
    "inspect_text": "api",
    "load": "loading",
    "load_sampler": "sampler.presets",
    "stream": "api",
    "use_compilation_cache": "programs",
}
__all__ = [
    "Event",
    "Generation",
    "InspectedToken",
    "LanguageModel",
    "Piece",
    "Proposal",
    "Recording",
    "Request",
    "Retriever",
    "Row",
    "RowView",
    "Rows",
    "Sampler",
    "TokenRecord",
    "UserError",
    "encode_prompt",
    "generate",
    "inspect_text",
    "load",
    "load_sampler",
    "stream",
    "use_compilation_cache",
]

if TYPE_CHECKING:
    from entropix_jax.api import generate, inspect_text, stream
    from entropix_jax.decode_state import Recording
    from entropix_jax.errors import UserError
    from entropix_jax.generation import Generation
    from entropix_jax.inspection import InspectedToken
    from entropix_jax.loading import LanguageModel, load
    from entropix_jax.preparation import encode_prompt
    from entropix_jax.programs import use_compilation_cache
    from entropix_jax.results import Event, Piece, Request, Row, Rows
    from entropix_jax.retrieval import Retriever
    from entropix_jax.sampler.presets import load_sampler
    from entropix_jax.sampler.proposal import Proposal, RowView
    from entropix_jax.sampler.sampler import Sampler
    from entropix_jax.trace import TokenRecord


def __dir__() -> list[str]:
    """What there is to complete: the public names, imported or not."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    """Imports what is asked for, when it is asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
