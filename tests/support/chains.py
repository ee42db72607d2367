"""A model that depends only on the last token, so that an oracle needs only a table of logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from entropix_jax.model.params import Params
from entropix_jax.names import REGIMES
from tests.support.reference import entropy_bits, log_softmax
from tests.support.samplers import tiny_model

CONFIG, RANDOM = tiny_model()
VOCAB = CONFIG.vocab_size
TYPES = CONFIG.width  # tokens whose ids differ by a multiple of it have the same logits

# Each box is a range of entropies. A chain has logits in the middle of each, given by the number of
# about equally likely tokens.
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

    def heard(self, token: int, epsilon: float) -> np.ndarray:
        """Returns log-probabilities after a token, -inf below the noise floor. An epsilon of 0
        disables the floor."""
        logits = self.logits(token)
        log_probs = log_softmax(logits)
        audible = log_probs >= np.log(epsilon or 1e-300) - 0.5 * np.log(logits.size)
        return log_softmax(np.where(audible, logits, -np.inf)) if audible.any() else log_probs


def regime_of(log_probs: np.ndarray) -> str:
    """Returns the regime with BOUNDS."""
    entropy = entropy_bits(np.exp(log_probs))
    assert all(abs(entropy - bound) > 0.01 for bound in (1, 2, 3, 4)), "too close to tell"
    return REGIMES[min(int(entropy), 4)]


def chain(kinds: Sequence[str], seed: int = 0) -> Chain:
    """Returns a chain in which a token of type i is followed by a distribution of the regime
    `kinds[i]`. For LELV, the most likely token has the next type."""
    rng = np.random.default_rng(seed)
    table = -12 + rng.normal(size=(TYPES, VOCAB))
    for i, (row, kind) in enumerate(zip(table, kinds, strict=True)):
        order = rng.permutation(VOCAB)
        if kind == "lelv":
            order = np.roll(order, -int(np.argmax(order % TYPES == (i + 1) % TYPES)))
            row[order[1:11]] = -6 + 0.5 * rng.normal(size=10)
        row[order[: LIKELY[kind]]] = rng.uniform(0, 0.5, LIKELY[kind])
    # The norm of a one-hot row, which is the only input of the head.
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
