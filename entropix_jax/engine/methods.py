"""The methods of `engine.search`, by name.

Self-consistency: Wang et al. 2022. Weighted vote: Fu et al. 2025. DTS: arXiv 2511.00640. EAGer:
arXiv 2510.11170. The presets `dts` and `eager` have the published thresholds and temperatures.
"""

from collections.abc import Mapping
from types import MappingProxyType

from entropix_jax.engine.beam import Beam
from entropix_jax.engine.request import Request
from entropix_jax.engine.search import Method
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.errors import UserError, nearest


def _is_forked(request: Request, token: TokenRecord) -> bool:
    return token.regime == "lehv"


def _is_uncertain(request: Request, token: TokenRecord) -> bool:
    return token.regime in ("helv", "hehv")


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            Method("self-consistency"),
            Method("weighted-vote", choice="weighted"),
            Method("best-of-n", choice="likeliest"),
            Method("surest-of-n", choice="surest"),
            Method("dts", _is_forked, 3, replaces=True),
            Method("dts-greedy", _is_forked, 3, "first", replaces=True),
            Method("eager", _is_uncertain, 2),
            Method("beam", width=0, choice="beam", make=Beam),
        )
    }
)


def find_method(name: str, methods: Mapping[str, Method] = METHODS) -> Method:
    """Returns one of the methods by its name. UserError for an unknown name."""
    if name not in methods:
        raise UserError(f"no method '{name}'{nearest(name, [*methods])}")
    return methods[name]
