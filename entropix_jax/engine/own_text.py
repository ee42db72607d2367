"""Entropy and varentropy of text that a model writes itself at temperature 1.

The loop has no sampler in it, so it compiles in a few seconds.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from entropix_jax.model.cache import KVCache, init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.loading import LanguageModel
from entropix_jax.model.params import Params
from entropix_jax.stats import entropy_and_varentropy

# About 4,000 tokens give each regime's share to half a percentage point or so; in texts as long as
# an answer, since a model is less certain where a text begins.
TOKENS = 4096
_LENGTH = 256  # tokens of a text
_CHUNK = 16  # steps between two looks at the clock
_MOST_ROWS = 256
_SEED = 0

_Carry = tuple[KVCache, jax.Array]


def start_of_text(model: LanguageModel) -> list[int]:
    """The tokens that a text begins with, at least one.

    Where the tokenizer adds none: the checkpoint's beginning-of-text token, an end token (training
    puts it between two texts), or a line break.
    """
    tokenizer = model.tokenizer
    if start := tokenizer.encode("", add_bos=True):
        return start
    named = (tokenizer.named_token_id(name) for name in ("bos_token", "eos_token"))
    found = [i for i in (*named, *model.generation.eos_ids) if i is not None]
    return (found or tokenizer.encode_within("\n") or [0])[:1]


def measure_own_text(model: LanguageModel, seconds: float) -> np.ndarray | None:
    """Entropy (bits) and varentropy (bits^2) before each token that the model writes: float32
    [n, 2], with n about TOKENS, the same ones each time. None where it takes more than `seconds`;
    compiling and the first chunk are not interrupted."""
    began = time.perf_counter()
    length = min(_LENGTH, model.config.max_positions)
    chunk = min(_CHUNK, length)
    chunks = length // chunk
    rows = min(-(-TOKENS // (chunk * chunks)), _MOST_ROWS)
    cache = init_cache(model.config, rows, chunk * chunks, model.precision.activations)
    tokens = jnp.full(rows, start_of_text(model)[0], jnp.int32)
    key = jax.random.key(_SEED)
    points = []
    for left in reversed(range(chunks)):
        before = time.perf_counter()
        cache, tokens, found = _write(
            model.params, cache, tokens, key, config=model.config, steps=chunk
        )
        points.append(np.asarray(found).reshape(-1, 2))
        now = time.perf_counter()
        # The first chunk compiles, so its time says little about the others.
        pace = now - before if len(points) > 1 else 0.0
        if left and now - began + left * pace > seconds:
            return None
    return np.concatenate(points)


@partial(jax.jit, static_argnames=("config", "steps"), donate_argnames="cache")
def _write(
    params: Params,
    cache: KVCache,
    tokens: jax.Array,
    key: jax.Array,
    *,
    config: ModelConfig,
    steps: int,
) -> tuple[KVCache, jax.Array, jax.Array]:
    """Samples `steps` tokens: the cache, the last tokens int32 [B], and entropy and varentropy of
    each step, float32 [steps, B, 2]."""

    def step(carry: _Carry, _: None) -> tuple[_Carry, jax.Array]:
        cache, tokens = carry
        number = cache.length[0]
        hidden, _stats, cache = forward(
            params, config, tokens[:, None], jnp.ones_like(tokens), cache, window=cache.capacity
        )
        logits = unembed(params, hidden[:, 0])
        pair = entropy_and_varentropy(jax.nn.log_softmax(logits, axis=-1))
        drawn = jax.random.categorical(jax.random.fold_in(key, number), logits, axis=-1)
        return (cache, drawn.astype(jnp.int32)), jnp.stack(pair, axis=-1)

    (cache, tokens), points = lax.scan(step, (cache, tokens), length=steps)
    return cache, tokens, points
