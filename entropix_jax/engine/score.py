"""Scores of given texts: the metrics of each token.

A long text is read in overlapping segments of bounded length, and a segment in chunks, so memory
does not grow with the text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.engine.calibrated import CalibratedSampler
from entropix_jax.engine.records import check_recording, extras_fields, measured
from entropix_jax.engine.shapes import PREFILL_WINDOW, bucket, chunk_size
from entropix_jax.engine.state import Extras, Recording, extras_of
from entropix_jax.engine.trace import MeasuredToken, plain
from entropix_jax.errors import UserError, check_range
from entropix_jax.model.cache import KVCache, cache_dtype, init_cache
from entropix_jax.model.config import ModelConfig
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.loading import LanguageModel
from entropix_jax.model.params import Params
from entropix_jax.sampler.metrics import Metrics, apply_noise_floor, measure, measure_confidence
from entropix_jax.sampler.regimes import classify
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.wrong import MEASURES, update_means

_CONTEXT = 1024  # most tokens of a segment, unless the caller says otherwise
_METRICS_CHUNK, _LIKELIHOOD_CHUNK = 64, 128  # most tokens of a text in one call
_LOGITS_BYTES = 1 << 28  # most memory for the logits of one call
_CACHE_BYTES = 1 << 30  # most memory for the cache of several texts
_NOTHING = Recording()

_classify = jax.jit(jax.vmap(classify, in_axes=(0, None, 0, None, 0)))


@dataclass(slots=True)
class ScoredToken(MeasuredToken):
    """One token of a given text.

    `context` is the number of tokens before it that the model saw. `top`, [token id, text,
    probability] of the most likely tokens, and `layers` and `layers_varentropy`, the attention
    entropy and varentropy of each layer and head, are None unless recorded. `p_wrong` is None
    without a table.
    """

    context: int
    p_wrong: float | None = None
    top: list[tuple[int, str, float]] | None = None
    layers: list[list[float]] | None = None
    layers_varentropy: list[list[float]] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the object of a line of JSON."""
        return {"type": "token", **self.present()}


def score_tokens(
    model: LanguageModel,
    tokens: Sequence[int],
    sampler: CalibratedSampler,
    *,
    context: int | None = None,
    recording: Recording | None = None,
) -> Iterator[ScoredToken]:
    """Reads a text and scores each token except the first.

    Args:
        sampler: defines the regimes and the metrics. Its loop guard is not used, because it
            concerns generated text.
        context: maximum number of tokens that the model sees at once, by default 1024 or the
            model's positions if fewer. A longer text is read in segments that begin half that
            number before the measured tokens.

    UserError if there are fewer than two tokens, the model lacks the context, or logits are NaN or
    infinite.
    """
    recording = check_recording(model, recording)
    if len(tokens) < 2:
        raise UserError("the text is too short: its first token has no context")
    segments = split(tokens, check_context(model, context))
    stream = model.tokenizer.stream(after=tokens[:1])

    def score_segments() -> Iterator[ScoredToken]:
        count, mean, squares = 0, 0.0, 0.0  # of the entropies so far (Welford)
        table, means = sampler.wrong_table, np.zeros(len(MEASURES))
        reader = TextReader(model, sampler, recording)
        for segment, at, scores in reader.read(segments, batch=1):
            assert scores.measured is not None
            metrics, extras, confidences = scores.measured
            variances, p_wrong = [], []
            measures = {**vars(metrics), "max_prob": confidences[-1]}
            rows = np.stack([measures[name] for name in MEASURES], axis=1).astype(np.float64)
            for entropy, own in zip(plain(metrics.entropy), rows, strict=True):
                means = update_means(means, own, count)
                p_wrong.append(np.nan if table is None else table.look_up(means))
                count += 1
                deviation = entropy - mean
                mean += deviation / count
                squares += deviation * (entropy - mean)
                variances.append(squares / count)
            spread, wrong = np.array(variances, np.float32), np.array(p_wrong, np.float32)
            # Parts are resized to the longest: one program serves them all.
            longest = partial(np.resize, new_shape=_METRICS_CHUNK)
            points = jax.tree.map(longest, metrics), sampler.settings, longest(spread), None
            regimes = _classify(*points, longest(wrong))[: len(spread)]
            columns = {
                "logprob": plain(scores.logprob[:, 0]),
                **measured(regimes, spread, metrics, confidences, wrong),
                **extras_fields(extras, recording, model.tokenizer.decode_within),
            }
            start = segments[segment].start
            for position, values in enumerate(zip(*columns.values(), strict=True), start + at + 1):
                text = stream.push(tokens[position])
                if position == len(tokens) - 1:
                    text += stream.flush()
                yield ScoredToken(
                    position=position,
                    context=position - start,
                    token_id=int(tokens[position]),
                    text=text,
                    **dict(zip(columns, values, strict=True)),
                )

    return score_segments()


def check_context(
    model: LanguageModel, context: int | None, *, least: int = 2, usual: int = _CONTEXT
) -> int:
    """Returns the maximum number of tokens that the model sees at once. UserError if it is less
    than `least` or more than the model's positions."""
    positions = model.config.max_positions
    if context is None:
        return min(usual, positions)
    check_range("context", context, least, positions)
    return context


# Reading texts


@dataclass(frozen=True)
class Text:
    """Tokens to read. After the token `first` the text's own tokens are scored, and after its end
    each of `lasts`."""

    tokens: Sequence[int]
    lasts: Sequence[int]
    first: int
    start: int = 0  # position of the first token
    where: str = ""  # begins an error's line


@struct.dataclass
class Scores:
    """The scores after each token; fields [B, T, ...] or [n, ...]."""

    logprob: jax.Array  # float32 [..., K] nats, of each token that may follow
    greedy: jax.Array  # bool [..., K], whether it is the most likely
    finite: jax.Array  # bool, whether the logits are finite
    # Metrics, what is recorded of the distribution, and `measure_confidence`; None without a
    # sampler.
    measured: tuple[Metrics, Extras, tuple[jax.Array, jax.Array, jax.Array]] | None


def split(text: Sequence[int], context: int, where: str = "") -> list[Text]:
    """Segments of at most `context` tokens; each token but the text's first is scored once."""
    segments, done = [], 1
    while done < len(text):
        end = min(context if done == 1 else done + max(context // 2, 1), len(text))
        start = max(end - context, 0)
        tokens, last = text[start : end - 1], text[end - 1]
        segments.append(Text(tokens, [last], done - start - 1, start, where))
        done = end
    return segments


@dataclass(frozen=True)
class TextReader:
    """Reads texts and measures the metrics of a sampler."""

    model: LanguageModel
    sampler: CalibratedSampler | None = None
    recording: Recording = _NOTHING

    def read(self, texts: Sequence[Text], batch: int) -> Iterator[tuple[int, int, Scores]]:
        """Reads at most `batch` texts in parallel. For each part of a text, yields the text's
        index, the index of the part's first token, and the scores after each of its tokens.
        UserError if logits are NaN or infinite."""
        config, done = self.model.config, 0
        position_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        position_bytes *= cache_dtype(self.model.precision.activations).itemsize
        # Side by side only with texts that need a cache of the same size: a short one would wait.
        for capacity, group in groupby(texts, _capacity):
            alike = list(group)
            room = max(_CACHE_BYTES // position_bytes // capacity, 1)
            # Powers of two, so that the last texts compile no program of their own.
            rows = min(batch, bucket(len(alike), 1), 1 << room.bit_length() - 1)
            for first in range(0, len(alike), rows):
                part = alike[first : first + rows]
                for row, at, scores in self._read_batch(part, rows):
                    if not scores.finite.all():
                        position = part[row].start + at + 1 + int(scores.finite.argmin())
                        fault = f"NaN or infinite logits at position {position}"
                        raise UserError(part[row].where + fault)
                    yield done + first + row, at, scores
            done += len(alike)

    def read_whole(self, texts: Sequence[Text], batch: int) -> Iterator[tuple[int, Scores]]:
        """Reads texts like `read`, and yields the scores of each whole text."""
        parts: list[list[Scores]] = [[] for _ in texts]
        for number, at, scores in self.read(texts, batch):
            parts[number].append(scores)
            if at + len(scores.finite) == len(texts[number].tokens):
                yield number, jax.tree.map(lambda *x: np.concatenate(x), *parts[number])
                parts[number].clear()

    def _read_batch(self, texts: Sequence[Text], rows: int) -> Iterator[tuple[int, int, Scores]]:
        """Reads texts side by side, chunk by chunk; rows that are left over stay empty."""
        config, capacity = self.model.config, _capacity(texts[0])
        most = _METRICS_CHUNK if self.sampler else _LIKELIHOOD_CHUNK
        room = max(_LOGITS_BYTES // (4 * config.vocab_size * rows), 1)
        size = chunk_size(config, capacity, rows, min(most, 1 << room.bit_length() - 1))
        # Tokens, the tokens that may follow each, and how many of them are the text's.
        length = max(len(text.tokens) for text in texts)
        tokens = np.zeros((rows, length + size), np.int32)
        following = np.zeros((*tokens.shape, bucket(max(len(t.lasts) for t in texts), 1)), np.int32)
        lengths = np.zeros(rows, np.int64)
        for row, text in enumerate(texts):
            end = lengths[row] = len(text.tokens)
            tokens[row, :end] = text.tokens
            following[row, : end - 1] = tokens[row, 1:end, None]
            following[row, end - 1, : len(text.lasts)] = text.lasts
        settings = None if self.sampler is None else self.sampler.settings
        cache = init_cache(config, rows, capacity, self.model.precision.activations)
        for start in range(0, length, size):
            chunk = slice(start, start + size)
            cache, scores = _score_chunk(
                self.model.params,
                settings,
                cache,
                jnp.asarray(tokens[:, chunk]),
                jnp.asarray(following[:, chunk]),
                jnp.asarray(np.clip(lengths - start, 0, size), jnp.int32),
                config=config,
                window=min(bucket(start + size, PREFILL_WINDOW), capacity),
                recording=self.recording,
                scored=start + size > min(text.first for text in texts),
            )
            if scores is None:
                continue
            scores = jax.device_get(scores)
            for row, text in enumerate(texts):
                known = slice(max(text.first - start, 0), max(len(text.tokens) - start, 0))
                own = jax.tree.map(lambda x: x[row, known], scores)  # noqa: B023
                if len(own.finite):
                    yield row, start + known.start, own


def _capacity(text: Text) -> int:
    """Positions of the cache that a text is read with."""
    return bucket(len(text.tokens), PREFILL_WINDOW)


@partial(
    jax.jit, static_argnames=("config", "window", "recording", "scored"), donate_argnames="cache"
)
def _score_chunk(
    params: Params,
    settings: SamplerSettings | None,
    cache: KVCache,
    tokens: jax.Array,
    following: jax.Array,
    count: jax.Array,
    *,
    config: ModelConfig,
    window: int,
    recording: Recording,
    scored: bool,
) -> tuple[KVCache, Scores | None]:
    """Reads `tokens[B, T]`, of each row the first `count[B]`. Where `scored`: the scores of
    `following[B, T, K]`, and with settings (of one row, for all) the metrics."""
    every = settings is not None
    hidden, stats, cache = forward(params, config, tokens, count, cache, window=window, every=every)
    if not scored:
        return cache, None
    logits = unembed(params, hidden.reshape(-1, config.width))  # [B*T, V], as are the statistics
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    wanted = following.reshape(logits.shape[0], -1)
    finite, measured = jnp.all(jnp.isfinite(logits), axis=-1), None
    if settings is not None:
        shape = logits.shape[:1]
        of_token = jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), settings)
        above_floor = apply_noise_floor(log_probs, of_token.noise_epsilon)
        metrics = measure(above_floor, stats, of_token.layer_weights)
        confidence = measure_confidence(log_probs, of_token.confidence.likeliest)
        measured = metrics, extras_of(logits, stats, recording), confidence
    scores = Scores(
        logprob=jnp.take_along_axis(log_probs, wanted, axis=1),
        greedy=wanted == jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32),
        finite=finite,
        measured=measured,
    )
    return cache, jax.tree.map(lambda x: x.reshape(*tokens.shape, *x.shape[1:]), scores)
