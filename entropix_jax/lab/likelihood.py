"""Log-likelihoods of many continuations in one batch."""

from collections.abc import Iterator, Sequence

import numpy as np

from entropix_jax.engine.score import Text, TextReader, check_context
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel


def log_likelihoods(
    model: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    context: int | None = None,
    batch: int = 16,
) -> Iterator[tuple[int, float, bool]]:
    """Scores continuations after their contexts by the log-softmax of the unmodified logits.

    Yields, in any order, the index of a pair, the log-probability of its continuation in nats, and
    whether each token of it is the most likely one. Pairs that differ only in their last tokens are
    read once. A pair keeps its last `context` + 1 tokens, by default as many as the model has
    positions. At most `batch` texts run in parallel.

    Raises:
        UserError: an empty context or continuation, a continuation longer than `context`, or NaN or
            infinite logits.
    """
    context = check_context(model, context, least=1, usual=model.config.max_positions)
    # All tokens but the last one of a pair, to the pairs: number, last token, length.
    answers: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for number, (before, after) in enumerate(pairs):
        where, length = f"pair {number}: ", len(after)
        if not before or not after:
            raise UserError(f"{where}the {'continuation' if before else 'context'} is empty")
        if length > context:
            problem = f"the continuation has {length} tokens, the model sees {context} at once"
            raise UserError(where + problem)
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

    def score_pairs() -> Iterator[tuple[int, float, bool]]:
        for number, scores in TextReader(model).read_whole(texts, batch):
            text = texts[number]
            for pair, last, length in answers[tuple(text.tokens)]:
                its = slice(-length, None), text.lasts.index(last)
                total = float(scores.logprob[its].sum(dtype=np.float64))
                yield pair, total, bool(scores.greedy[its].all())

    return score_pairs()
