"""How likely a model holds given continuations of given contexts: it reads, and nothing is drawn.

Texts are read side by side, those of about a length together, chunk by chunk: neither the logits of
a whole text nor many long caches are ever held at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.cache import KVCache, init_cache
from entropix_jax.config import ModelConfig
from entropix_jax.errors import UserError
from entropix_jax.loading import LanguageModel
from entropix_jax.model import forward, unembed
from entropix_jax.params import Params
from entropix_jax.preparation import PREFILL_WINDOW, bucket, chunk_size

_BATCH = 16  # texts that are read side by side
_MAX_CHUNK = 128
_LOGITS_BYTES = 1 << 28  # most memory for the logits of one call
_CACHE_BYTES = 1 << 30  # most memory for the cache of a batch of several texts


@dataclass(frozen=True, slots=True)
class Likelihood:
    """What a model makes of one continuation.

    `pair` counts the pairs in the order in which they were given. `log_likelihood` is in nats, the
    sum over the continuation's tokens. `is_greedy` says whether each of them is the likeliest.
    """

    pair: int
    log_likelihood: float
    is_greedy: bool


@dataclass
class _Text:
    """What the model reads, and the pairs that it answers: they differ in their last tokens, which
    are not read, and in where the continuation starts."""

    tokens: tuple[int, ...]
    pairs: list[tuple[int, int, int]] = field(default_factory=list)  # number, last token, length

    @property
    def first(self) -> int:
        """The first token whose logits count."""
        return len(self.tokens) - max(length for *_, length in self.pairs)


def log_likelihoods(
    model: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    context: int | None = None,
    batch: int = _BATCH,
) -> Iterator[Likelihood]:
    """The log-probability of each continuation after its context, by the model's own distribution:
    log-softmax of the logits as they are, in float32.

    They come batch by batch, not in the order of the pairs, and what a pair's is does not depend on
    the others. Contexts that several pairs share are read once where only last tokens differ. A
    continuation without tokens is certain.

    Args:
        pairs: token ids of a context, at least one, and of its continuation.
        context: most tokens that the model sees at once, by default all its positions. Of a longer
            pair the first tokens are left out.
        batch: most texts that are read side by side; fewer are where they are long.

    Raises:
        UserError: an empty context, what is no token, a continuation that is longer than what the
            model sees at once, or NaN or infinite logits.
    """
    positions = model.config.max_positions
    context = positions if context is None else context
    if not 1 <= context <= positions:
        raise UserError(f"the context must be 1 to {positions} tokens, not {context}")
    if batch < 1:
        raise UserError(f"at least 1 text must be read at once, not {batch}")
    texts: dict[tuple[int, ...], _Text] = {}
    empty = []
    for number, (before, after) in enumerate(pairs):
        _check(model, number, before, after, context)
        if not after:
            empty.append(Likelihood(number, 0.0, True))
            continue
        tokens = (*before, *after)[-context - 1 :]
        text = texts.setdefault(tokens[:-1], _Text(tokens[:-1]))
        text.pairs.append((number, tokens[-1], len(after)))
    # The longest first: what does not fit into memory does not fit at once.
    ordered = sorted(texts.values(), key=lambda text: len(text.tokens), reverse=True)
    return _read_all(model, ordered, empty, batch)


def _check(
    model: LanguageModel, number: int, before: Sequence[int], after: Sequence[int], context: int
) -> None:
    if not before:
        raise UserError(f"pair {number}: the context is empty: nothing is expected before a token")
    if strange := [i for i in (*before, *after) if not 0 <= i < model.config.vocab_size]:
        raise UserError(f"pair {number}: {strange[0]} is no token")
    if len(after) > context:
        raise UserError(
            f"pair {number}: the continuation has {len(after)} tokens, "
            f"the model sees {context} at once"
        )


def _read_all(
    model: LanguageModel, texts: list[_Text], empty: list[Likelihood], batch: int
) -> Iterator[Likelihood]:
    yield from empty
    # Side by side only with texts that need a cache of the same size: a short one would wait.
    for capacity, group in groupby(texts, lambda text: bucket(len(text.tokens), PREFILL_WINDOW)):
        alike = list(group)
        # Of so few sizes that the last texts compile no program of their own.
        rows = _rows_at_once(model, capacity, min(batch, bucket(len(alike), 1)))
        for at in range(0, len(alike), rows):
            yield from _read_batch(model, alike[at : at + rows], rows, capacity)


def _rows_at_once(model: LanguageModel, capacity: int, batch: int) -> int:
    """How many texts are read side by side: no more than their cache may take."""
    config = model.config
    position = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    row = capacity * position * model.precision.activations.itemsize
    room = max(_CACHE_BYTES // row, 1)
    return batch if batch <= room else 1 << room.bit_length() - 1


def _read_batch(
    model: LanguageModel, texts: list[_Text], rows: int, capacity: int
) -> Iterator[Likelihood]:
    """Reads texts side by side, each a row, chunk by chunk; rows that are left over stay empty."""
    config = model.config
    longest = max(len(text.tokens) for text in texts)
    first = min(text.first for text in texts)
    size = chunk_size(config, capacity, rows, _chunk_for_logits(config, rows))
    lasts = [list(dict.fromkeys(last for _, last, _ in text.pairs)) for text in texts]
    tokens = np.zeros((rows, longest + size), np.int32)
    following = np.zeros((*tokens.shape, bucket(max(map(len, lasts)), 1)), np.int32)
    lengths = np.zeros(rows, np.int64)
    for row, (text, last) in enumerate(zip(texts, lasts, strict=True)):
        length = lengths[row] = len(text.tokens)
        tokens[row, :length] = text.tokens
        following[row, : length - 1] = tokens[row, 1:length, None]
        following[row, length - 1, : len(last)] = last
    cache = init_cache(config, rows, capacity, model.precision.activations)
    found = []
    for start in range(0, longest, size):
        here = slice(start, start + size)
        cache, part = _read(
            model.params,
            cache,
            jnp.asarray(tokens[:, here]),
            jnp.asarray(following[:, here]),
            jnp.asarray(np.clip(lengths - start, 0, size), jnp.int32),
            config=config,
            window=min(bucket(start + size, PREFILL_WINDOW), capacity),
            scored=start + size > first,
        )
        if part is not None:
            found.append(jax.device_get(part))
    scores, best = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    start = first // size * size  # of the first chunk whose logits were asked for
    for row, (text, last) in enumerate(zip(texts, lasts, strict=True)):
        end = len(text.tokens) - start
        for number, token, length in text.pairs:
            its = (row, slice(end - length, end), last.index(token))
            total = float(scores[its].sum(dtype=np.float64))
            if not np.isfinite(total):
                raise UserError(f"pair {number}: NaN or infinite logits")
            yield Likelihood(number, total, bool(best[its].all()))


def _chunk_for_logits(config: ModelConfig, rows: int) -> int:
    """Tokens of each row whose logits have room."""
    room = max(_LOGITS_BYTES // (4 * config.vocab_size * rows), 1)
    return min(_MAX_CHUNK, 1 << room.bit_length() - 1)


@partial(jax.jit, static_argnames=("config", "window", "scored"), donate_argnames="cache")
def _read(
    params: Params,
    cache: KVCache,
    tokens: jax.Array,
    following: jax.Array,
    count: jax.Array,
    *,
    config: ModelConfig,
    window: int,
    scored: bool,
) -> tuple[KVCache, tuple[jax.Array, jax.Array] | None]:
    """Reads `tokens[B, T]`, of each row the first `count[B]`. Where `scored`: the log-probability
    in nats, float32, of each of `following[B, T, K]` in the place after its token, and whether it
    is the likeliest there."""
    hidden, _, cache = forward(params, config, tokens, count, cache, window=window)
    if not scored:
        return cache, None
    logits = unembed(params, hidden.reshape(-1, config.width))
    wanted = following.reshape(logits.shape[0], -1)
    # Log-softmax of what is wanted, without the one of the whole vocabulary.
    top = jnp.max(logits, axis=-1, keepdims=True)
    mass = jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True)
    scores = jnp.take_along_axis(logits, wanted, axis=1) - top - jnp.log(mass)
    best = wanted == jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    return cache, (scores.reshape(following.shape), best.reshape(following.shape))
