"""The uncertainty of a given text, token by token: the model reads it, and nothing is drawn.

A long text is read in segments of bounded length that overlap, and a segment in chunks, so memory
does not grow with the text.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.cache import KVCache, init_cache
from entropix_jax.calibration.automatic import calibrate_sampler
from entropix_jax.config import ModelConfig
from entropix_jax.decode_state import Extras, Recording, extras_of
from entropix_jax.errors import UserError
from entropix_jax.health import NOWHERE, describe, first_unsound
from entropix_jax.loading import LanguageModel
from entropix_jax.metrics import Metrics, apply_noise_floor, measure
from entropix_jax.model import forward, unembed
from entropix_jax.names import REGIMES
from entropix_jax.params import Params
from entropix_jax.preparation import (
    PREFILL_WINDOW,
    bucket,
    check_recording,
    chunk_size,
    for_rows,
    sampler_params,
)
from entropix_jax.records import each, extras_fields
from entropix_jax.sampler.regimes import classify
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.stats import AttnStats
from entropix_jax.trace import plain

_CONTEXT = 1024  # most tokens of a segment, unless another number is asked for
_MAX_CHUNK = 64
_BATCH = 16  # segments that are read side by side


@dataclass(frozen=True, slots=True)
class InspectedToken:
    """One token of a given text, and the distribution that the model expected it from.

    Entropies are in bits, varentropies in bits^2, `logprob`, the token's own, in nats. `position`
    is the token's in the text, and `context` how many tokens the model saw before it. `text` is
    what the token completes. `top`, [token id, text, probability] of the likeliest tokens, and
    `layers`, the attention entropy of each layer and head, are None unless asked for.
    """

    position: int
    context: int
    token_id: int
    text: str
    regime: str
    logprob: float
    entropy: float
    varentropy: float
    sequence_varentropy: float
    attn_entropy: float
    attn_entropy_norm: float
    attn_varentropy: float
    agreement: float
    agreement_published: float
    interaction_strength: float
    top: list[tuple[int, str, float]] | None = None
    layers: list[list[float]] | None = None

    def to_json(self) -> dict[str, Any]:
        """The object of a line of JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {"type": "token"} | {k: v for k, v in fields.items() if v is not None}


@struct.dataclass
class _Reading:
    """What the model said before each token; fields [B, T, ...]."""

    metrics: Metrics
    regime: jax.Array  # int32
    logprob: jax.Array  # float32, nats, of the token that came
    finite: jax.Array  # bool, the logits and what is checked besides
    sound: jax.Array  # bool [B, T, 1+2L], see `AttnStats`; [B, T, 0] where it is not asked for
    extras: Extras


@dataclass(frozen=True)
class _Segment:
    """A stretch of a text: tokens `start` to `end`, of which those from `first` on are measured."""

    start: int
    first: int
    end: int


def inspect(
    model: LanguageModel,
    tokens: Sequence[int],
    sampler: Sampler,
    *,
    context: int | None = None,
    recording: Recording | None = None,
) -> Iterator[InspectedToken]:
    """Reads a text and tells of each token but the first what the model expected in its place.

    Args:
        tokens: the text, at least two tokens.
        sampler: whose bounds the regimes are told by, and whose metrics are measured. Its loop
            guard plays no part: it is about text that the model wrote.
        context: most tokens that the model sees at once, by default 1024 or as many as it has
            positions. A longer text is read in segments that begin half that number before the
            tokens to be measured.
        recording: what is recorded besides the usual.

    Raises:
        UserError: too few tokens, a context that the model does not have, or NaN or infinite
            logits.
    """
    recording = recording or Recording()
    context = _context(model, context)
    check_recording(model, recording)
    if len(tokens) < 2:
        raise UserError("the text is too short: the model expects nothing before its first token")
    params = for_rows(sampler_params(model, calibrate_sampler(sampler, model)), 1)
    return _inspected(model, tokens, params, context, recording)


def _inspected(
    model: LanguageModel,
    tokens: Sequence[int],
    params: SamplerSettings,
    context: int,
    recording: Recording,
) -> Iterator[InspectedToken]:
    stream = model.tokenizer.stream(after=tokens[:1])
    entropies = _RunningVariance()
    for segment in _segments(len(tokens), context):
        for start, reading in _read_segments(
            model, params, [tokens[segment.start : segment.end]], recording
        ):
            # Where the first token stands that this part of the segment is read for.
            at = max(segment.start + start + 1, segment.first)
            known = slice(at - segment.start - start - 1, segment.end - segment.start - start - 1)
            here = jax.tree.map(lambda x: x[0, known], reading)  # noqa: B023
            if not here.finite.all():
                raise UserError(_fault(model, params, tokens[: segment.end], segment.start))
            measured = each(
                regime=[REGIMES[regime] for regime in here.regime],
                logprob=plain(here.logprob),
                **{name: plain(values) for name, values in vars(here.metrics).items()},
                **extras_fields(here.extras, recording, model.tokenizer.decode_within),
            )
            for position, fields in enumerate(measured, at):
                text = stream.push(tokens[position])
                if position == len(tokens) - 1:
                    text += stream.flush()
                yield InspectedToken(
                    position=position,
                    context=position - segment.start,
                    token_id=int(tokens[position]),
                    text=text,
                    sequence_varentropy=plain(np.float32(entropies.add(fields["entropy"]))),
                    **fields,
                )


def entropies_of(
    model: LanguageModel,
    texts: Sequence[Sequence[int]],
    sampler: Sampler,
    *,
    context: int | None = None,
) -> np.ndarray:
    """Entropy (bits) and varentropy (bits^2) before each token of some texts but their first ones:
    float32 [n, 2], text by text in order.

    Raises:
        UserError: as `inspect`; no text has two tokens.
    """
    context = _context(model, context)
    parts = [
        (number, segment)
        for number, text in enumerate(texts)
        if len(text) > 1
        for segment in _segments(len(text), context)
    ]
    if not parts:
        raise UserError("there is nothing to measure: no text has two tokens")
    params = sampler_params(model, calibrate_sampler(sampler, model, "reuse"))
    points = []
    for at in range(0, len(parts), _BATCH):
        batch = parts[at : at + _BATCH]
        found: list[list[np.ndarray]] = [[] for _ in batch]
        segments = [texts[number][segment.start : segment.end] for number, segment in batch]
        # Rows of nothing, so that the last few segments compile no program of their own.
        segments += [[]] * (min(_BATCH, bucket(len(parts), 1)) - len(segments))
        rows = for_rows(params, len(segments))
        for start, reading in _read_segments(model, rows, segments, Recording()):
            pairs = np.stack([reading.metrics.entropy, reading.metrics.varentropy], axis=-1)
            for row, (number, segment) in enumerate(batch):
                here = segment.start + start + 1 + np.arange(pairs.shape[1])
                wanted = (here >= segment.first) & (here < segment.end)
                if not reading.finite[row][wanted].all():
                    text, row_params = texts[number][: segment.end], for_rows(params, 1)
                    fault = _fault(model, row_params, text, segment.start)
                    raise UserError(f"text {number + 1}: {fault}")
                found[row].append(pairs[row][wanted])
        points += [part for row in found for part in row]
    return np.concatenate(points)


def _context(model: LanguageModel, context: int | None) -> int:
    """Most tokens of a segment."""
    positions = model.config.max_positions
    if context is None:
        return min(_CONTEXT, positions)
    if not 2 <= context <= positions:
        raise UserError(f"the context must be 2 to {positions} tokens, not {context}")
    return context


def _segments(length: int, context: int) -> Iterator[_Segment]:
    """Segments of at most `context` tokens; each token but the text's first is measured once."""
    yield _Segment(0, 1, min(length, context))
    done = context
    step = max(context // 2, 1)
    while done < length:
        end = min(done + step, length)
        yield _Segment(max(end - context, 0), done, end)
        done = end


def _fault(model: LanguageModel, params: SamplerSettings, tokens: Sequence[int], first: int) -> str:
    """Where reading `tokens` from `first` on yields NaN or infinity, found token by token: in a
    chunk one spoils the others."""
    text = [*tokens[first:], 0]  # something follows each token, the last one too
    for start, reading in _read_segments(model, params, [text], Recording(check=True), largest=1):
        position, stage = first_unsound(reading.sound, jnp.array([first + start]))[0].tolist()
        if position != NOWHERE:
            return describe(position, stage)
        if not reading.finite.all():
            return f"NaN or infinite logits at position {first + start + 1}"
    return f"NaN or infinite logits at or after position {first + 1}"


def _read_segments(
    model: LanguageModel,
    params: SamplerSettings,
    segments: Sequence[Sequence[int]],
    recording: Recording,
    largest: int = _MAX_CHUNK,
) -> Iterator[tuple[int, _Reading]]:
    """Reads segments side by side, each a row, chunk by chunk: the chunk's first token, and what
    was said after each of its tokens (of a row that has ended: junk)."""
    config, batch = model.config, len(segments)
    longest = max(map(len, segments))
    capacity = bucket(longest, PREFILL_WINDOW)
    cache = init_cache(config, batch, capacity, model.precision.activations)
    size = chunk_size(config, capacity, batch, largest)
    text = np.zeros((batch, longest + size + 1), np.int32)
    for row, segment in enumerate(segments):
        text[row, : len(segment)] = segment
    lengths = np.array([len(segment) for segment in segments])
    for start in range(0, longest - 1, size):
        count = np.clip(lengths - start, 0, size)
        cache, reading = _read(
            model.params,
            params,
            cache,
            jnp.asarray(text[:, start : start + size]),
            jnp.asarray(text[:, start + 1 : start + size + 1]),
            jnp.asarray(count, jnp.int32),
            config=config,
            window=min(bucket(start + size, PREFILL_WINDOW), capacity),
            recording=recording,
        )
        yield start, jax.device_get(reading)


@partial(jax.jit, static_argnames=("config", "window", "recording"), donate_argnames="cache")
def _read(
    params: Params,
    sampler: SamplerSettings,
    cache: KVCache,
    tokens: jax.Array,
    following: jax.Array,
    count: jax.Array,
    *,
    config: ModelConfig,
    window: int,
    recording: Recording,
) -> tuple[KVCache, _Reading]:
    """Reads `tokens[B, T]`, of each row the first `count[B]`; what it says of `following[B, T]`."""
    hidden, stats, cache = forward(
        params,
        config,
        tokens,
        count,
        cache,
        window=window,
        every=True,
        check=recording.check,
    )
    logits = unembed(params, hidden.reshape(-1, config.width))
    return cache, _measure(logits, stats, sampler, following, recording)


def _measure(
    logits: jax.Array,
    stats: AttnStats,
    sampler: SamplerSettings,
    following: jax.Array,
    recording: Recording,
) -> _Reading:
    """The reading [B, T] of `logits[B*T, V]` and the statistics of as many rows."""
    shape = following.shape
    of_token = jax.tree.map(lambda x: jnp.repeat(x, shape[1], axis=0), sampler)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    heard = apply_noise_floor(log_probs, of_token.noise_epsilon)
    metrics = measure(heard, stats, of_token.layer_weights)
    sound = jnp.ones((*shape, 0), bool) if stats.sound is None else stats.sound
    sound = sound.reshape(math.prod(shape), sound.shape[-1])
    reading = _Reading(
        metrics=metrics,
        regime=jax.vmap(classify)(metrics, of_token),
        logprob=jnp.take_along_axis(log_probs, following.reshape(-1)[:, None], axis=1)[:, 0],
        finite=jnp.all(jnp.isfinite(logits), axis=-1) & jnp.all(sound, axis=-1),
        sound=sound,
        extras=extras_of(logits, stats, recording),
    )
    measured: _Reading = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), reading)
    return measured


class _RunningVariance:
    """The variance of the numbers so far (Welford)."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, number: float) -> float:
        self._count += 1
        deviation = number - self._mean
        self._mean += deviation / self._count
        self._squares += deviation * (number - self._mean)
        return self._squares / self._count
