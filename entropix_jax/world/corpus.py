"""Rows of the world's text, and their token ids.

Every row begins a new stream of documents, so the truth at each position is the distribution given
the row's text before it.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from random import Random
from typing import Any

from entropix_jax.detokenizer import BYTE_SYMBOLS
from entropix_jax.world.documents import stream
from entropix_jax.world.facts import World
from entropix_jax.world.grammar import Position, sample
from entropix_jax.world.lexicon import TERMINALS


def write_row(world: World, rng: Random, length: int) -> list[Position]:
    """The first `length` terminals of a new stream of documents."""
    return list(islice(sample(stream(world), rng), length))


def encode_row(row: Sequence[Position], ids: Mapping[str, int]) -> list[int]:
    """The token ids of a row; `ids` as `terminal_ids` gives them."""
    return [ids[position.terminal] for position in row]


def terminal_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """The token id of each terminal, from the content of `tokenizer.json`.

    Raises:
        KeyError: a terminal is no token of its own.
        TypeError: the vocabulary is no table of tokens, such as Unigram's.
    """
    vocabulary = tokenizer["model"]["vocab"]
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    for terminal in TERMINALS:
        if terminal not in ids:
            ids[terminal] = vocabulary["".join(BYTE_SYMBOLS[byte] for byte in terminal.encode())]
    return ids
