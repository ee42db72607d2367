"""The tokenizer of a checkpoint folder: text to ids, ids to text, conversations to ids.

`tokenizer.json` is read by the `tokenizers` library. A folder that has only Meta's
`tokenizer.model` (Llama 3's ranks) goes through `tiktoken`. Both libraries are imported when a
tokenizer of their kind is loaded, Jinja when a chat is rendered.

Special tokens are recognised wherever their text stands, in prompts as in chat messages, as
`transformers` does by default. Who passes on text from others should know that such a text can
end a turn.
"""

from __future__ import annotations

import base64
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entropix_jax.config import check_own_code
from entropix_jax.detokenizer import StreamDecoder, TokenBytes, token_bytes_of_decoder
from entropix_jax.errors import UserError
from entropix_jax.files import read_bytes, read_json_object, read_text

if TYPE_CHECKING:
    import tokenizers

# Llama 3's split into words, as Meta publishes it.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# They follow the ranks; the others of the 256 are reserved.
_LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
_LLAMA3_SPECIAL_COUNT = 256
# The expression above backtracks, up to an error on long runs. Meta's own reader cuts runs of
# (non-)whitespace at this length, so these ids are the ones that the model knows.
_LLAMA3_LONGEST_RUN = 25_000
# How much longer a tokenizer.json may make a text. Real ones stay far below; a short file of steps
# that each write more than they read would fill the memory.
_MOST_GROWTH = 4096


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a checkpoint folder.

    `tokenizer.json` wins over `tokenizer.model`. `tokenizer_config.json` and
    `chat_template.jinja` are optional.

    Raises:
        UserError: neither file, or a file that is not what its name says.
    """
    settings = _Settings.load(folder)
    path = folder / "tokenizer.json"
    if path.is_file():
        return _HuggingFaceTokenizer(path, read_bytes(path), settings)
    if (folder / "tokenizer.model").is_file():
        return _TiktokenTokenizer(folder / "tokenizer.model", settings)
    raise UserError(f"{folder}: no tokenizer: neither tokenizer.json nor tokenizer.model is there")


def build_tokenizer(path: Path, tokenizer: bytes, settings: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of what a `tokenizer.json` and a `tokenizer_config.json` would hold; `path` is
    the file that both are from.

    Raises:
        UserError: they are not that.
    """
    return _HuggingFaceTokenizer(path, tokenizer, _Settings.parse(settings, path))


@dataclass(frozen=True)
class _Settings:
    """What `tokenizer_config.json` and `chat_template.jinja` say.

    Attributes:
        special_tokens: text of `bos_token`, `eos_token` and the like.
        add_bos: whether a text starts with the beginning-of-text token; None: not said.
        chat_template: Jinja source.
        chat_template_origin: the file that it is from.
    """

    special_tokens: Mapping[str, str]
    add_bos: bool | None
    chat_template: str | None
    chat_template_origin: str

    @classmethod
    def load(cls, folder: Path) -> _Settings:
        path = folder / "tokenizer_config.json"
        settings = cls.parse(read_json_object(path) if path.is_file() else {}, path)
        template_path = folder / "chat_template.jinja"
        if not template_path.is_file():
            return settings
        template = read_text(template_path)
        return replace(settings, chat_template=template, chat_template_origin=str(template_path))

    @classmethod
    def parse(cls, raw: Mapping[str, Any], path: Path) -> _Settings:
        """Of a decoded `tokenizer_config.json`; `path` is where it is from."""
        check_own_code(raw, path)
        special_tokens = {}
        for key, value in raw.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise UserError(f"{path}: '{key}' has half a surrogate pair") from None
                special_tokens[key] = text
        add_bos = raw.get("add_bos_token")
        if not isinstance(add_bos, bool | None):
            raise UserError(f"{path}: 'add_bos_token' must be true or false, not {add_bos!r}")
        template = _default_template(raw.get("chat_template"), path)
        return cls(special_tokens, add_bos, template, str(path))


def _default_template(value: Any, path: Path) -> str | None:
    """A template, or the one named "default" of a list of named templates."""
    if value is None or isinstance(value, str):
        return value
    try:
        return {entry["name"]: str(entry["template"]) for entry in value}.get("default")
    except (TypeError, KeyError) as error:
        raise UserError(
            f"{path}: 'chat_template' must be text or a list of objects with 'name' and 'template'"
        ) from error


class Tokenizer(ABC):
    """Text to ids and back, for one checkpoint.

    Attributes:
        vocab_size: one more than the largest id.
        bos_id: the beginning-of-text token that belongs before a text; None where the checkpoint's
          tokenizer puts none.
        special_ids: ids of control tokens, which are not part of the text.
        chat_template: Jinja source, None without one.
    """

    vocab_size: int
    bos_id: int | None
    special_ids: frozenset[int]
    _token_bytes: TokenBytes

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self.chat_template = settings.chat_template

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """The id of a token's own string (of "<|eot_id|>", say), None outside the vocabulary."""

    def named_token_id(self, name: str) -> int | None:
        """The id of the token that the checkpoint names so ("bos_token", "eos_token", ...); None
        where it names none."""
        return self.token_id(self._settings.special_tokens.get(name, ""))

    @abstractmethod
    def _token(self, token_id: int) -> str | None: ...

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    def _encode_within(self, text: str) -> list[int]:
        return self._encode(text)

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """The ids of a text; with `add_bos` they start with `bos_id`, where there is one.

        It is not put again before a text that starts with it.

        Raises:
            UserError: text with surrogates, which stand for bytes that were not UTF-8.
        """
        ids = self._encode(_checked(text))
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_within(self, text: str) -> list[int]:
        """The ids of a text that goes on another one: with nothing before it, neither `bos_id` nor
        the space that tokenizers of SentencePiece's kind put before a text.

        Raises:
            UserError: as `encode`.
        """
        return self._encode_within(_checked(text))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of some ids: what `stream` gives for them, to the end."""
        return self.stream(skip_special=skip_special).run(ids)

    def decode_within(self, ids: Iterable[int]) -> str:
        """The text of ids from the middle of a text, special tokens included. A space before it is
        kept, which `decode` may drop."""
        return self._decoder(frozenset(), begun=True).run(ids)

    def stream(self, *, skip_special: bool = True, after: Iterable[int] = ()) -> StreamDecoder:
        """A decoder that takes one id at a time.

        Args:
            skip_special: leave special tokens out of the text.
            after: ids that come before, a prompt's for instance. Their text is not given again, but
              the start of a text, where some tokenizers drop a space, is at theirs.
        """
        decoder = self._decoder(self.special_ids if skip_special else frozenset())
        for token_id in after:
            decoder.push(token_id)
        return decoder

    def _decoder(self, skip: frozenset[int], *, begun: bool = False) -> StreamDecoder:
        return StreamDecoder(
            token=self._token, token_bytes=self._token_bytes, skip=skip, begun=begun
        )

    def render_chat(self, messages: object, *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation by the checkpoint's chat template.

        Args:
            messages: a list of objects with at least the texts `role` and `content`.
            add_generation_prompt: end with the start of the assistant's answer.

        Raises:
            UserError: no template, messages of another shape, or a template that is wrong or
              refuses them.
        """
        if self.chat_template is None:
            raise UserError(
                "this model's tokenizer has no chat template: it takes plain text alone, "
                "no messages and no system message (--no-chat)"
            )
        from entropix_jax.chat_template import render_chat

        return render_chat(
            self.chat_template,
            messages,
            origin=self._settings.chat_template_origin,
            special_tokens=self._settings.special_tokens,
            add_generation_prompt=add_generation_prompt,
        )

    def apply_chat(self, messages: object, *, add_generation_prompt: bool = True) -> list[int]:
        """The ids of `render_chat`'s text; `bos_id` is put where the template does not put it."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_bos=True)


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"text is not valid Unicode at character {error.start}") from error
    return text


class _HuggingFaceTokenizer(Tokenizer):
    """What a tokenizer.json holds."""

    def __init__(self, path: Path, file: bytes, settings: _Settings) -> None:
        super().__init__(settings)
        import tokenizers

        self._path = path
        with _panics_told(f"{path}: not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(file)
            # Such files may hold the settings of a training run.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            normalizer, pre_tokenizer, decoder = (
                _rule(self._tokenizer, name) for name in ("normalizer", "pre_tokenizer", "decoder")
            )
        times = max(_growth(normalizer) * _growth(pre_tokenizer), _growth(decoder))
        if times > _MOST_GROWTH:
            raise UserError(
                f"{path}: its rules may make a text {times:.0e} times as long, "
                f"at most {_MOST_GROWTH:,} are possible"
            )
        within = {
            "normalizer": _without_prefix(normalizer),
            "pre_tokenizer": _without_prefix(pre_tokenizer),
        }
        self._tokenizer_within = self._tokenizer
        if within != {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}:
            # From the file once more: what the library writes of a vocabulary takes memory for each
            # id below the highest.
            with _panics_told(f"{path}: not a tokenizer.json"):
                whole = json.loads(file) | within
                whole |= {"truncation": None, "padding": None}
                self._tokenizer_within = tokenizers.Tokenizer.from_str(json.dumps(whole))
        try:
            self._token_bytes = token_bytes_of_decoder(decoder)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # Not how many there are: a file may leave out ids.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        with _panics_told(f"{path}: not a tokenizer.json"):
            self.bos_id = self._find_bos(path, settings)
        if self.bos_id is not None and self.bos_id >= self.vocab_size:
            raise UserError(f"{path}: the post-processor puts {self.bos_id}, which is no token")

    def _find_bos(self, path: Path, settings: _Settings) -> int | None:
        if settings.add_bos is False:
            return None
        if settings.add_bos is None:
            # The file's own post-processor decides: look at what it puts before a text.
            probe = self._tokenizer.encode("a")
            return probe.ids[0] if probe.special_tokens_mask[:1] == [1] else None
        bos_id = self.token_id(settings.special_tokens.get("bos_token", ""))
        if bos_id is None:
            raise UserError(f"{path}: 'add_bos_token' is set, but 'bos_token' is not a token")
        return bos_id

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def _token(self, token_id: int) -> str | None:
        try:
            return self._tokenizer.id_to_token(token_id)
        except OverflowError:
            return None

    def _encode(self, text: str) -> list[int]:
        with _panics_told(f"{self._path}: the tokenizer fails"):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_within(self, text: str) -> list[int]:
        with _panics_told(f"{self._path}: the tokenizer fails"):
            return self._tokenizer_within.encode(text, add_special_tokens=False).ids


@contextmanager
def _panics_told(what: str) -> Iterator[None]:
    """Turns whatever the library raises over a damaged file into an error that a user can act on:
    it has no narrower class, and its panics are no `Exception`."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {error}") from error


def _rule(tokenizer: tokenizers.Tokenizer, name: str) -> dict[str, Any] | None:
    # Its pickled state is its part of tokenizer.json; reading that file again takes longer.
    rule = getattr(tokenizer, name)
    return None if rule is None else json.loads(rule.__getstate__())


def _without_prefix(rule: dict[str, Any] | None) -> dict[str, Any] | None:
    """A rule that puts nothing before a text."""
    if rule is None or rule["type"] == "Prepend":
        return None
    changed = dict(rule)
    if rule["type"] == "Metaspace":
        changed["prepend_scheme"] = "never"
    if rule.get("add_prefix_space"):
        changed["add_prefix_space"] = False
    for name in {"normalizers", "pretokenizers"} & set(rule):
        changed[name] = [step for step in map(_without_prefix, rule[name]) if step is not None]
    return changed


def _growth(rule: Mapping[str, Any] | None) -> float:
    """How many characters a rule makes of one at most.

    Steps that add up are counted: what a form of Unicode's writes, it leaves as it is. A table
    that was compiled is not looked into; the number lets only one stand.
    """
    match rule:
        case {"normalizers": steps} | {"pretokenizers": steps} | {"decoders": steps}:
            return math.prod(map(_growth, steps), start=1.0)
        case {"type": "Prepend", "prepend": text}:
            return 1.0 + len(text)
        case {"type": "Replace", "content": text, "pattern": pattern}:
            matches_nothing = not pattern.get("String")  # as expressions may
            return max(1.0, float(len(text) + matches_nothing))
        case {"type": "ByteLevel"}:
            return 4.0
        case {"type": "Precompiled"}:
            return 100.0
    return 1.0


class _TiktokenTokenizer(Tokenizer):
    """Llama 3's tokenizer.model: byte-pair ranks, with the special tokens after them."""

    _token_bytes = TokenBytes(of=lambda token: token.encode("latin-1"))

    def __init__(self, path: Path, settings: _Settings) -> None:
        super().__init__(settings)
        import tiktoken

        ranks = _read_ranks(path)
        names = [
            *_LLAMA3_SPECIAL,
            *(
                f"<|reserved_special_token_{i}|>"
                for i in range(3, _LLAMA3_SPECIAL_COUNT - len(_LLAMA3_SPECIAL) + 3)
            ),
        ]
        special = {name: len(ranks) + i for i, name in enumerate(names)}
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=_LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=special
        )
        self.special_ids = frozenset(special.values())
        self.vocab_size = len(ranks) + len(special)
        self.bos_id = None if settings.add_bos is False else special["<|begin_of_text|>"]

    def token_id(self, token: str) -> int | None:
        try:
            return self._encoding.encode_single_token(token)
        except KeyError:
            return None

    def _token(self, token_id: int) -> str | None:
        try:
            # Latin-1: the bytes, each as a character.
            return self._encoding.decode_single_token_bytes(token_id).decode("latin-1")
        except (KeyError, OverflowError):
            return None

    def _encode(self, text: str) -> list[int]:
        return [
            token_id
            for piece in _cut_runs(text)
            for token_id in self._encoding.encode(piece, allowed_special="all")
        ]


def _cut_runs(text: str) -> Iterator[str]:
    """The text, cut inside of every run of (non-)whitespace that is longer than the bound."""
    start = 0
    if len(text) > _LLAMA3_LONGEST_RUN:
        for run in re.finditer(r"\s+|\S+", text):
            for cut in range(run.start() + _LLAMA3_LONGEST_RUN, run.end(), _LLAMA3_LONGEST_RUN):
                yield text[start:cut]
                start = cut
    yield text[start:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Reads tiktoken's text format: on each line a token in base64 and its rank, from 0 up."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(
                f"{path}: line {number} is not a token in base64 and its rank "
                "(only Llama 3's tokenizer.model is read; others need a tokenizer.json)"
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path}: the ranks are not the numbers from 0 up, each once")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise UserError(f"{path}: the ranks lack some of the 256 single bytes")
    return ranks
