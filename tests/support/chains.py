"""A model that looks at the last token alone: a table of logits is all that an oracle needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from entropix_jax.model.params import Params
from tests.support.samplers import tiny_model

CONFIG, RANDOM = tiny_model()
VOCAB = CONFIG.vocab_size
TYPES = CONFIG.width  # tokens whose ids differ by a multiple of it are followed by the same

# Each box is a stretch of entropies, and a chain has logits in the middle of each: so many tokens
# that are about as likely.
BOUNDS: Mapping[str, Any] = {
    "regimes.lelv": ["entropy < 1"],
    "regimes.helv": ["entropy > 1", "entropy < 2"],
    "regimes.lehv": ["entropy > 2", "entropy < 3"],
    "regimes.hehv": ["entropy > 3", "entropy < 4"],
}
LIKELY = {"lelv": 1, "helv": 3, "lehv": 6, "hehv": 12, "mid": 40}


@dataclass
class Chain:
    """The model, and its logits [TYPES, V], float64."""

    table: np.ndarray
    params: Params

    def logits(self, token: int) -> np.ndarray:
        return self.table[token % TYPES]


def chain(kinds: Sequence[str], seed: int = 0) -> Chain:
    """A chain in which a token of type i is followed by a distribution of the regime `kinds[i]`;
    where that is LELV, most likely by a token of the next type."""
    rng = np.random.default_rng(seed)
    table = -12 + rng.normal(size=(TYPES, VOCAB))
    for i, (row, kind) in enumerate(zip(table, kinds, strict=True)):
        order = rng.permutation(VOCAB)
        if kind == "lelv":
            order = np.roll(order, -int(np.argmax(order % TYPES == (i + 1) % TYPES)))
            row[order[1:11]] = -6 + 0.5 * rng.normal(size=10)
        row[order[: LIKELY[kind]]] = rng.uniform(0, 0.5, LIKELY[kind])
    # The norm of a one-hot row, which is all that reaches the head.
    scale = 1 / np.sqrt(1 / TYPES + CONFIG.norm_eps)
    head = (table.T / scale).astype(np.float32)
    params = replace(
        RANDOM,
        embedding=jnp.asarray(np.eye(TYPES, dtype=np.float32)[np.arange(VOCAB) % TYPES]),
        layers=tuple(
            replace(layer, output=jnp.zeros_like(layer.output), down=jnp.zeros_like(layer.down))
            for layer in RANDOM.layers
        ),
        final_norm=jnp.ones_like(RANDOM.final_norm),
        head=jnp.asarray(head),
    )
    return Chain(head.T.astype(np.float64) * scale, params)
