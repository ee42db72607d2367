"""From token ids to text, a token at a time: no half characters, and the same text as at once.

A token stands for bytes, and text is what UTF-8 makes of all bytes together. So decoding goes
through an incremental UTF-8 decoder, and decoding a whole sequence is the stream run to its end.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_symbols() -> tuple[str, ...]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return tuple(stand_ins.get(byte, chr(byte)) for byte in range(256))


# GPT-2's alphabet, by byte: printable Latin-1 stands for itself, other bytes for U+0100 and up.
BYTE_SYMBOLS = _byte_symbols()
_BYTE_OF_SYMBOL = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}


@dataclass(frozen=True)
class TokenBytes:
    """How the strings of a vocabulary turn into bytes.

    Attributes:
        of: the bytes of a token's string.
        of_first: the same for the first token of a text, where that differs.
        strip: a character, and how many of it at most are dropped from the start of the text.
    """

    of: Callable[[str], bytes]
    of_first: Callable[[str], bytes] | None = None
    strip: tuple[str, int] = ("", 0)


class StreamDecoder:
    """Decodes one sequence of ids; a character comes with the token that completes it.

    Bytes that are not UTF-8 become U+FFFD. An id outside the vocabulary has no text.
    """

    def __init__(
        self,
        *,
        token: Callable[[int], str | None],
        token_bytes: TokenBytes,
        skip: frozenset[int],
        begun: bool = False,
    ) -> None:
        """Starts a text, or goes on within one.

        Args:
            token: the string of an id, None outside the vocabulary.
            token_bytes: how that string turns into bytes.
            skip: ids that leave nothing in the text.
            begun: whether the start of the text, where something may be dropped, is past.
        """
        self._token = token
        self._token_bytes = token_bytes
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = not begun
        self._strip, self._strip_left = ("", 0) if begun else token_bytes.strip

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty in the middle of a character."""
        if token_id in self._skip:
            return ""
        token = self._token(token_id)
        if token is None:
            return ""
        of = self._token_bytes.of
        if self._first:
            of = self._token_bytes.of_first or of
            self._first = False
        return self._without_start(self._utf8.decode(of(token)))

    def peek(self, token_id: int) -> str:
        """What `push` would give, and nothing is taken."""
        before = self._utf8.getstate(), self._first, self._strip_left
        text = self.push(token_id)
        decoder, self._first, self._strip_left = before
        self._utf8.setstate(decoder)
        return text

    def flush(self) -> str:
        """The text of what is left at the end: U+FFFD for a character that never was completed."""
        return self._without_start(self._utf8.decode(b"", final=True))

    def run(self, ids: Iterable[int]) -> str:
        """The text of a whole sequence: all pushes and the flush."""
        return "".join([*map(self.push, ids), self.flush()])

    def _without_start(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip:
                self._strip_left = 0
            else:
                text = text[1:]
                self._strip_left -= 1
        return text


def token_bytes_of_decoder(decoder: Mapping[str, Any] | None) -> TokenBytes:
    """Reads the `decoder` of a tokenizer.json.

    Known are the byte-level one (GPT-2, Llama 3), and the two ways in which SentencePiece
    vocabularies are written: `Metaspace`, and the sequence of `Replace`, `ByteFallback`, `Fuse`,
    `Strip` (Llama 2). On valid UTF-8 the text equals that of the `tokenizers` library. It differs
    where byte tokens are not valid UTF-8: the library then also takes back the valid characters
    just before them, which a stream has already shown.

    Raises:
        ValueError: another decoder, with its name.
    """
    steps = _flattened(decoder)
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return TokenBytes(of=_byte_level)
    if names == ["Metaspace"]:
        return _metaspace(steps[0])
    if re.fullmatch(r"(Replace )*(ByteFallback )?Fuse (Strip )?", "".join(f"{n} " for n in names)):
        return _replaced(steps)
    raise ValueError(f"decoder {' + '.join(names) or 'null'} is not implemented")


def _flattened(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flattened(inner)]
    return [decoder]


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)
    except KeyError:  # an added token, written in plain text
        return token.encode()


def _metaspace(step: Mapping[str, Any]) -> TokenBytes:
    mark = step["replacement"]
    of_first = None
    if step["prepend_scheme"] != "never":  # the first mark is one that encoding put there

        def of_first(token: str) -> bytes:
            return token.replace(mark, "").encode()

    return TokenBytes(of=lambda token: token.replace(mark, " ").encode(), of_first=of_first)


def _replaced(steps: list[Mapping[str, Any]]) -> TokenBytes:
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    strip = ("", 0)
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise ValueError("decoder Replace with a regular expression is not implemented")
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "ByteFallback":
            byte_fallback = True
        elif step["type"] == "Strip":
            if step["stop"]:
                raise ValueError("decoder Strip at the end of the text is not implemented")
            strip = (step["content"], step["start"])

    def of(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        return bytes.fromhex(byte[1]) if byte else token.encode()

    return TokenBytes(of=of, strip=strip)
