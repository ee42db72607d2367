"""The tokenizer of the world: byte-level BPE under which every terminal is one token.

Text divides by the lexicon's pattern first, so a terminal is merged on its own. The merges are
learned from the terminals alone, each once, until none is left in pieces; all 256 bytes are tokens,
so any other text encodes too. Nothing is random: the same words give the same bytes.
"""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing

from entropix_jax.lab.world.lexicon import BEGIN, END, PATTERN, SPECIALS, TERMINALS
from entropix_jax.text.detokenizer import BYTE_SYMBOLS

Pair = tuple[str, str]

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ (message['content'] | trim) + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{% endif %}"
)


def learn_merges(words: Iterable[str]) -> list[Pair]:
    """Byte-pair merges, the most frequent pair first (ties: in order), until no word is in pieces.

    A word that is encoded with these merges goes through what it went through here, and ends as one
    symbol.
    """
    pieces = [tuple(word) for word in words]
    merges: list[Pair] = []
    while True:
        counts = Counter(pair for word in pieces for pair in pairwise(word))
        if not counts:
            return merges
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        pieces = [_merge(word, best) for word in pieces]


def _merge(word: tuple[str, ...], pair: Pair) -> tuple[str, ...]:
    merged: list[str] = []
    index = 0
    while index < len(word):
        if word[index : index + 2] == pair:
            merged.append(pair[0] + pair[1])
            index += 2
        else:
            merged.append(word[index])
            index += 1
    return tuple(merged)


def build_tokenizer(terminals: Iterable[str] = TERMINALS) -> dict[str, Any]:
    """The content of `tokenizer.json`. Ids: bytes, merges in order, special tokens."""
    words = [t for t in terminals if t not in SPECIALS]
    merges = learn_merges("".join(BYTE_SYMBOLS[byte] for byte in word.encode()) for word in words)
    tokens = [*BYTE_SYMBOLS, *(left + right for left, right in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    split = Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN}:1 $B:1",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    tokenizer.decoder = decoders.ByteLevel()
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    content["decoder"]["add_prefix_space"] = False
    return content


def tokenizer_json(terminals: Iterable[str] = TERMINALS) -> str:
    """The text of `tokenizer.json`."""
    return json.dumps(build_tokenizer(terminals), ensure_ascii=False, indent=1) + "\n"


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """The content of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
