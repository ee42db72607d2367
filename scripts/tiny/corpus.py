"""Rows of the world's text, their token ids, and how a model's predictions compare with the truth.

Every row starts a new stream of documents, so the true distribution at a position depends only on
the row's text before it.

Legend: B rows, T tokens in a row, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from entropix_jax.lab.world.documents import stream
from entropix_jax.lab.world.facts import World
from entropix_jax.lab.world.grammar import Position, sample
from entropix_jax.lab.world.lexicon import TERMINALS
from entropix_jax.text.detokenizer import BYTE_SYMBOLS


def write_row(world: World, rng: Random, length: int) -> list[Position]:
    """Draws the first `length` terminals of a new stream of documents."""
    return list(islice(sample(stream(world), rng), length))


def encode_row(row: Sequence[Position], ids: Mapping[str, int]) -> list[int]:
    """Returns the token ids of a row; `ids` as of `terminal_ids`."""
    return [ids[position.terminal] for position in row]


def is_chosen(row: Sequence[Position]) -> list[bool]:
    """Returns whether each terminal was drawn from its distribution, not inserted by the host."""
    return [position.terminal in position.choice.terminals for position in row]


def terminal_ids(
    tokenizer: Mapping[str, Any], terminals: Iterable[str] = TERMINALS
) -> dict[str, int]:
    """Returns the token id of each terminal, from the content of `tokenizer.json`.

    Raises:
        KeyError: a terminal is not one token.
    """
    vocabulary = tokenizer["model"]["vocab"]
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    for terminal in terminals:
        if terminal not in ids:
            ids[terminal] = vocabulary["".join(BYTE_SYMBOLS[byte] for byte in terminal.encode())]
    return ids


def compare(
    row: Sequence[Position], log_probs: NDArray[np.floating], ids: Mapping[str, int]
) -> pd.DataFrame:
    """Compares predictions with a row's truth.

    Args:
        row: T positions. The first is given, not predicted.
        log_probs: natural log-probabilities [T - 1, V]; entry `t` predicts `row[t + 1]`.
        ids: as of `terminal_ids`.

    Returns:
        A row per predicted position: its kind; true h and model h, entropies in bits; true u and
        model u, varentropies in bits^2; KL, the divergence of the model from the truth in bits; and
        surprise, -log2 of the model's probability of the terminal.
    """
    log2 = np.asarray(log_probs, np.float64) / np.log(2.0)
    probs = np.exp2(log2)
    entropy = -np.sum(probs * log2, axis=-1)
    predicted = row[1:]
    choices = [position.choice for position in predicted]
    true_entropy = np.asarray([choice.entropy for choice in choices])
    expected_surprise = [
        -np.dot(choice.probabilities, scores[[ids[t] for t in choice.terminals]])
        for choice, scores in zip(choices, log2, strict=True)
    ]
    return pd.DataFrame(
        {
            "kind": [choice.kind for choice in choices],
            "true h": true_entropy,
            "model h": entropy,
            "true u": [choice.varentropy for choice in choices],
            "model u": np.sum(probs * (log2 + entropy[:, None]) ** 2, axis=-1),
            "KL": np.asarray(expected_surprise) - true_entropy,
            "surprise": -log2[np.arange(len(predicted)), encode_row(predicted, ids)],
        }
    )
