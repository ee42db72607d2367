"""Rows of the world's text, and their token ids.

Every row starts a new stream of documents, so the true distribution at a position depends only on
the row's text before it.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from random import Random
from typing import Any

from entropix_jax.lab.world.documents import stream
from entropix_jax.lab.world.facts import World
from entropix_jax.lab.world.grammar import Position, sample
from entropix_jax.lab.world.lexicon import TERMINALS
from entropix_jax.text.detokenizer import BYTE_SYMBOLS


def write_row(world: World, rng: Random, length: int) -> list[Position]:
    """The first `length` terminals of a new stream of documents."""
    return list(islice(sample(stream(world), rng), length))


def encode_row(row: Sequence[Position], ids: Mapping[str, int]) -> list[int]:
    """The token ids of a row; `ids` as `terminal_ids` gives them."""
    return [ids[position.terminal] for position in row]


def terminal_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """The token id of each terminal, from the content of `tokenizer.json`.

    Raises:
        KeyError: a terminal is not one token.
        TypeError: the vocabulary is not a table, such as Unigram's.
    """
    vocabulary = tokenizer["model"]["vocab"]
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    for terminal in TERMINALS:
        if terminal not in ids:
            ids[terminal] = vocabulary["".join(BYTE_SYMBOLS[byte] for byte in terminal.encode())]
    return ids
