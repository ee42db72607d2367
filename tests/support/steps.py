"""Single steps of the sampler, with artificial rows, and logits for each regime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.sampler.draw import row_key
from entropix_jax.sampler.settings import Parts
from entropix_jax.sampler.state import Choice, RowView, SamplerState, Step
from entropix_jax.sampler.step import choose
from tests.support.samplers import PARTS

VOCAB = 128
SLOTS = 96
ROWS = 144

_choose = jax.jit(choose, static_argnames="parts")


def choose_jit(*rows: Any, parts: Parts = PARTS) -> tuple[Choice, Step, SamplerState]:
    """Runs one step of at most `ROWS` rows. Copies of the first one fill the batch, so that all
    tests share one shape and one program."""
    arrays = jax.device_get(rows)
    batch = len(arrays[0])

    def fill(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.repeat(x[:1], ROWS - batch, axis=0)])

    found = jax.device_get(_choose(*jax.tree.map(fill, arrays), parts=parts))
    taken: tuple[Choice, Step, SamplerState] = jax.tree.map(lambda x: x[:batch], found)
    return taken


def rows_of(
    *histories: Sequence[int], generated: int = 0, remaining: int = 50, looks_up: bool = False
) -> RowView:
    """Returns rows with these tokens and different row ids. Junk follows the tokens."""
    batch = len(histories)
    slots = np.full((batch, SLOTS), VOCAB - 1, np.int32)
    for row, history in zip(slots, histories, strict=True):
        row[: len(history)] = [*history]
    return RowView(
        running=jnp.ones(batch, bool),
        key=jnp.asarray(np.stack([row_key(0, str(i)) for i in range(batch)])),
        history=jnp.asarray(slots),
        confidences=jnp.zeros(slots.shape, jnp.float32),
        length=jnp.asarray([len(history) for history in histories], jnp.int32),
        generated=jnp.full(batch, generated, jnp.int32),
        remaining=jnp.full(batch, remaining, jnp.int32),
        eos_ids=jnp.full((batch, 2), -1, jnp.int32),
        looks_up=jnp.full(batch, looks_up),
        clarifies=jnp.zeros(batch, bool),
        branch=jnp.full(batch, -1, jnp.int32),
        vocab_size=VOCAB,
    )


# Bounds with which `logits_for` has logits for each regime.
BOUNDS: Mapping[str, Any] = {
    "regimes.lelv": ["entropy < 1", "varentropy < 0.5"],
    "regimes.helv": ["entropy > 5", "varentropy < 0.5"],
    "regimes.lehv": ["entropy < 5", "varentropy > 0.5"],
    "regimes.hehv": ["entropy > 5", "varentropy > 0.5"],
}


def logits_for(regime: str, top: int = 9) -> np.ndarray:
    """Returns logits of a regime whose most likely token is `top` (the lowest id of a tie is 0)."""
    logits = np.full(VOCAB, -60.0, np.float32)
    if regime == "lelv":
        logits[top] = 0
    elif regime == "helv":
        logits[:] = 0
    elif regime == "lehv":
        logits[top], logits[20:60] = 3.5, 0
    elif regime == "hehv":
        logits[:], logits[top] = 0, 3.0
    else:
        logits[top : top + 4] = 0
    return logits
