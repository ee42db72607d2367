"""Token ids to text, one token at a time, without half characters.

`tokenizers.decoders.DecodeStream` does not serve here: it raises on byte-fallback tokens that are
not UTF-8, and it has no flush, so text held back at the end of a row would be lost.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entropix_jax.errors import UserError

if TYPE_CHECKING:
    from tokenizers.decoders import Decoder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Each decodes one token at a time, but for the start of a text. A `Strip` follows all others.
_STREAMED = re.compile("ByteLevel|Metaspace|(Replace )*(ByteFallback )?Fuse( Strip)?")


# GPT-2's alphabet, by byte: printable Latin-1 maps to itself, other bytes to U+0100 and up.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = sorted(set(range(256)) - _PRINTABLE)
BYTE_SYMBOLS = tuple(
    chr(byte if byte in _PRINTABLE else 0x100 + _OTHERS.index(byte)) for byte in range(256)
)
_BYTE_OF_SYMBOL = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}

# The bytes of a token's string; the flag says whether the token is the first of its text.
TokenBytes = Callable[[str, bool], bytes]


@dataclass
class StreamDecoder:
    """Decodes one sequence of ids; a character comes with the token that completes it.

    Bytes that are not UTF-8 become U+FFFD. An id outside the vocabulary has no text.
    """

    token: Callable[[int], str | None]  # the string of an id, None outside the vocabulary
    token_bytes: TokenBytes
    skip: frozenset[int]  # ids that leave nothing in the text
    first: bool  # whether the next id starts a text
    _utf8: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty in the middle of a character."""
        token = None if token_id in self.skip else self.token(token_id)
        if token is None:
            return ""
        data = self.token_bytes(token, self.first)
        self.first = False
        return self._utf8.decode(data)

    def peek(self, ids: Iterable[int]) -> list[str]:
        """What `push` would give for each, without taking them."""
        state = self._utf8.getstate(), self.first
        texts = [*map(self.push, ids)]
        utf8_state, self.first = state
        self._utf8.setstate(utf8_state)
        return texts

    def flush(self) -> str:
        """The text left at the end: U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)

    def run(self, ids: Iterable[int]) -> str:
        """The text of a whole sequence: all pushes and the flush."""
        return "".join([*map(self.push, ids), self.flush()])


def choose_token_bytes(decoder: Decoder | None, path: Path) -> TokenBytes:
    """How a tokenizer's decoder turns tokens into bytes; errors name `path`.

    Known are the byte-level decoder (GPT-2, Llama 3) and those of SentencePiece's vocabularies:
    `Metaspace`, or the sequence of `Replace`, `ByteFallback`, `Fuse`, `Strip` (Llama 2). On valid
    UTF-8 the text equals that of the `tokenizers` library.
    """
    steps = _flatten(rule_of(decoder))
    names = [step["type"] for step in steps]
    if decoder is None or not _STREAMED.fullmatch(" ".join(names)):
        raise UserError(f"{path}: decoder {' + '.join(names) or 'null'} is not implemented")
    if any(step.get("stop") for step in steps):
        raise UserError(f"{path}: decoder Strip at the end of the text is not implemented")
    if names == ["ByteLevel"]:
        return _byte_level
    decode = decoder.decode
    byte_fallback = "ByteFallback" in names

    def token_bytes(token: str, first: bool) -> bytes:
        if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        # Another token before it keeps the decoder from treating it as the start of a text.
        return (decode([token]) if first else decode(["x", token])[1:]).encode()

    return token_bytes


def rule_of(component: Any) -> dict[str, Any] | None:
    """A tokenizer's normalizer, pre-tokenizer or decoder as tokenizer.json writes it."""
    # That is its pickled state; reading the file again would take longer.
    return None if component is None else json.loads(component.__getstate__())


def _flatten(rule: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if rule is None or rule["type"] != "Sequence":
        return [] if rule is None else [rule]
    return [step for inner in rule["decoders"] for step in _flatten(inner)]


def _byte_level(token: str, first: bool) -> bytes:
    try:
        return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)
    except KeyError:  # an added token, written in plain text
        return token.encode()
