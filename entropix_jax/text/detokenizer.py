"""Token ids to text, one token at a time, without half characters.

`tokenizers.decoders.DecodeStream` does not serve here: it raises on byte-fallback tokens that are
not UTF-8, and it has no flush, so text held back at the end of a row would be lost.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers.decoders import Decoder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Each decodes one token at a time, but for the start of a text. A `Strip` follows all others.
_STREAMED = re.compile("ByteLevel|Metaspace|(Replace )*(ByteFallback )?Fuse( Strip)?")


def _byte_symbols() -> tuple[str, ...]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    substitutes = {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return tuple(substitutes.get(byte, chr(byte)) for byte in range(256))


# GPT-2's alphabet, by byte: printable Latin-1 stands for itself, other bytes for U+0100 and up.
BYTE_SYMBOLS = _byte_symbols()
_BYTE_OF_SYMBOL = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}

# The bytes of a token's string; the flag says whether the token is the first of its text.
TokenBytes = Callable[[str, bool], bytes]


class StreamDecoder:
    """Decodes one sequence of ids; a character comes with the token that completes it.

    Bytes that are not UTF-8 become U+FFFD. An id outside the vocabulary has no text.
    """

    def __init__(
        self,
        token: Callable[[int], str | None],
        token_bytes: TokenBytes,
        *,
        skip: frozenset[int],
        first: bool,
    ) -> None:
        """`token` gives the string of an id, None outside the vocabulary; the ids `skip` leave
        nothing in the text; `first` says whether the first id starts a text."""
        self._token = token
        self._token_bytes = token_bytes
        self._skip = skip
        self._first = first
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty in the middle of a character."""
        token = None if token_id in self._skip else self._token(token_id)
        if token is None:
            return ""
        data = self._token_bytes(token, self._first)
        self._first = False
        return self._utf8.decode(data)

    def peek(self, ids: Iterable[int]) -> list[str]:
        """What `push` would give for each, without taking them."""
        state = self._utf8.getstate(), self._first
        texts = [*map(self.push, ids)]
        self._utf8.setstate(state[0])
        self._first = state[1]
        return texts

    def flush(self) -> str:
        """The text left at the end: U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)

    def run(self, ids: Iterable[int]) -> str:
        """The text of a whole sequence: all pushes and the flush."""
        return "".join([*map(self.push, ids), self.flush()])


def token_bytes_of_decoder(decoder: Decoder | None, rule: Mapping[str, Any] | None) -> TokenBytes:
    """How a tokenizer's decoder turns tokens into bytes; `rule` is the decoder as tokenizer.json
    writes it.

    Known are the byte-level decoder (GPT-2, Llama 3) and those of SentencePiece's vocabularies:
    `Metaspace`, or the sequence of `Replace`, `ByteFallback`, `Fuse`, `Strip` (Llama 2). On valid
    UTF-8 the text equals that of the `tokenizers` library.

    Raises:
        ValueError: another decoder, with its name.
    """
    steps = _flatten(rule)
    names = [step["type"] for step in steps]
    if not _STREAMED.fullmatch(" ".join(names)):
        raise ValueError(f"decoder {' + '.join(names) or 'null'} is not implemented")
    if names == ["ByteLevel"]:
        return _byte_level
    if any(step.get("stop") for step in steps):
        raise ValueError("decoder Strip at the end of the text is not implemented")
    assert decoder is not None
    decode = decoder.decode
    byte_fallback = "ByteFallback" in names

    def token_bytes(token: str, first: bool) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        if byte:
            return bytes.fromhex(byte[1])
        # Another token before it keeps the decoder from treating it as the start of a text.
        return (decode([token]) if first else decode(["x", token])[1:]).encode()

    return token_bytes


def _flatten(rule: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if rule is None:
        return []
    if rule["type"] == "Sequence":
        return [step for inner in rule["decoders"] for step in _flatten(inner)]
    return [rule]


def _byte_level(token: str, first: bool) -> bytes:
    try:
        return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)
    except KeyError:  # an added token, written in plain text
        return token.encode()
