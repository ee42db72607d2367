"""Many texts at once: their metrics, and log-likelihoods of continuations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from entropix_jax.engine.preparation import CalibratedSampler
from entropix_jax.engine.score import Text, TextReader, check_context, split
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.calibration import TABLES
from entropix_jax.sampler.metrics import Metrics

_BATCH = 16  # texts that are read side by side


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The score of the continuation of pair number `pair`: the sum of its log-probabilities in
    nats, and whether each of its tokens is the likeliest."""

    pair: int
    log_likelihood: float
    is_greedy: bool


def measure_entropies(
    model: LanguageModel,
    texts: Sequence[Sequence[int]],
    sampler: CalibratedSampler,
    *,
    context: int | None = None,
) -> dict[str, np.ndarray]:
    """Measures the distribution before each token of some texts but their first ones.

    Returns:
        float32 [n] for each quantity of `calibration.TABLES`, text by text in order.

    Raises:
        UserError: no text has two tokens, the context does not fit the model, or logits are NaN or
            infinite.
    """
    context = check_context(model, context)
    segments = [
        segment
        for number, text in enumerate(texts, 1)
        for segment in split(text, context, where=f"text {number}: ")
    ]
    if not segments:
        raise UserError("there is nothing to measure: no text has two tokens")
    points: dict[int, Metrics] = {}
    for number, scores in TextReader(model, sampler).read_whole(segments, _BATCH):
        assert scores.measured is not None
        points[number], *_ = scores.measured
    in_order = [points[number] for number in range(len(segments))]
    return {name: np.concatenate([getattr(own, name) for own in in_order]) for name in TABLES}


def log_likelihoods(
    model: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    context: int | None = None,
    batch: int = _BATCH,
) -> Iterator[Likelihood]:
    """The log-probability of each continuation after its context, by the model's own distribution:
    log-softmax of the unmodified logits, in float32.

    Scores come text by text, not in the order of the pairs, and do not depend on the other pairs.
    Pairs that differ in their last tokens alone are read once. An empty continuation is certain.
    The model sees at once at most `context` tokens, by default all its positions: the first tokens
    of a longer pair are left out. At most `batch` texts are read side by side.

    Raises:
        UserError: an empty context, an invalid token id, a continuation that is longer than
            what the model sees at once, or NaN or infinite logits.
    """
    context = check_context(model, context, least=1, usual=model.config.max_positions)
    # All tokens but the last one of a pair, to the pairs: number, last token, length.
    answers: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    empty = []
    for number, (before, after) in enumerate(pairs):
        where, length = f"pair {number}: ", len(after)
        if not before:
            raise UserError(f"{where}the context is empty: nothing is expected before a token")
        if strange := [i for i in (*before, *after) if not 0 <= i < model.config.vocab_size]:
            raise UserError(f"{where}{strange[0]} is not a token id")
        if length > context:
            told = f"the continuation has {length} tokens, the model sees {context} at once"
            raise UserError(where + told)
        if not after:
            empty.append(Likelihood(number, 0.0, True))
            continue
        *tokens, last = (*before, *after)[-context - 1 :]
        answers.setdefault(tuple(tokens), []).append((number, last, length))
    texts = [
        Text(
            tokens,
            lasts=list(dict.fromkeys(last for _, last, _ in own)),
            first=len(tokens) - max(length for *_, length in own),
            where=f"pair {own[0][0]}: ",
        )
        for tokens, own in answers.items()
    ]
    # The longest first: what does not fit into memory fails at once.
    texts.sort(key=lambda text: len(text.tokens), reverse=True)

    def score_pairs() -> Iterator[Likelihood]:
        for number, scores in TextReader(model).read_whole(texts, batch):
            text = texts[number]
            for pair, last, length in answers[tuple(text.tokens)]:
                its = slice(-length, None), text.lasts.index(last)
                total = float(scores.logprob[its].sum(dtype=np.float64))
                yield Likelihood(pair, total, bool(scores.greedy[its].all()))

    return chain(empty, score_pairs())
