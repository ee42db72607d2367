"""A loaded model as a replay reads it: chunks of tokens in one forward pass, not step by step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.model.cache import KVCache, init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.loading import LanguageModel
from entropix_jax.model.params import Params
from entropix_jax.replay.state import Reading
from entropix_jax.stats import AttnStats
from entropix_jax.text.turns import stop_ids

_SIZES = 8, 64  # tokens of one call
_MIN_CAPACITY = 256


class ModelReader:
    """Readings and texts of a loaded model. `epsilon` is that of its hidden states."""

    def __init__(self, model: LanguageModel, capacity: int) -> None:
        """`capacity` is the number of tokens of the longest row."""
        capacity = max(_MIN_CAPACITY, 1 << (capacity + _SIZES[-1] - 1).bit_length())
        self._model, self._tokens = model, list[int]()
        self._cache = init_cache(model.config, 1, capacity, model.precision.activations)
        self.epsilon = float(jnp.finfo(model.precision.activations).eps)

    @cached_property
    def texts(self) -> list[str]:
        """The text of each token."""
        texts, size = self._model.tokenizer.token_texts, self._model.config.vocab_size
        return [*texts[:size], *[""] * (size - len(texts))]

    def read(self, tokens: Sequence[int], start: int) -> list[Reading]:
        """Returns the readings after each of `tokens[start:]`. Cached tokens are not read again."""
        pairs = enumerate(zip(self._tokens, tokens, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(self._tokens), len(tokens)))
        found: list[Reading] = []
        at = min(shared, start)
        while at < len(tokens):
            size = _SIZES[0] if len(tokens) - at <= _SIZES[0] else _SIZES[-1]
            part = np.zeros((1, size), np.int32)
            count = min(size, len(tokens) - at)
            part[0, :count] = tokens[at : at + count]
            cache = replace(self._cache, length=jnp.array([at], jnp.int32))
            logits, stats, self._cache = _read(
                self._model.params,
                cache,
                jnp.asarray(part),
                jnp.array([count], jnp.int32),
                config=self._model.config,
            )
            heads = stats.entropy, stats.varentropy
            fields = logits, *heads, stats.divergence, stats.interaction
            arrays = [np.asarray(field) for field in fields]
            first = max(start - at, 0)
            found += [Reading(*one) for one in zip(*(x[first:count] for x in arrays), strict=True)]
            at += count
        self._tokens = [*tokens]
        return found

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, without special ones."""
        return self._model.tokenizer.encode_within(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens from within a text, control tokens included."""
        return self._model.tokenizer.decode_within(tokens)

    def stream(self, after: Sequence[int]) -> Any:
        """Returns a decoder of the tokens after a prompt."""
        return self._model.tokenizer.stream(after=after)

    def control_ids(self, texts: Sequence[str]) -> list[int]:
        """Returns the ids of texts that are control tokens."""
        return stop_ids(self._model.tokenizer, texts)


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _read(
    params: Params, cache: KVCache, tokens: jax.Array, count: jax.Array, *, config: ModelConfig
) -> tuple[jax.Array, AttnStats, KVCache]:
    """Reads `tokens[1, T]`, of which the first `count[1]` are real. Returns logits [T, V] and the
    statistics of each position."""
    window = cache.capacity
    hidden, stats, cache = forward(params, config, tokens, count, cache, window=window, every=True)
    return unembed(params, hidden[0]), stats, cache
