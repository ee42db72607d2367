"""The tokenizer of a checkpoint folder: text to ids, ids to text, conversations to ids.

The `tokenizers` library does the work, for `tokenizer.json` as for Meta's `tokenizer.model` (Llama
3's ranks). It is imported when a tokenizer is loaded, and Jinja when a chat is rendered.

Special tokens are recognised wherever they occur in a text, as `transformers` does by default: text
from a third party can end a turn. `escape` makes them ordinary text.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entropix_jax.errors import UserError, check_unicode
from entropix_jax.host.files import check_own_code, read_bytes, read_text
from entropix_jax.text.added_tokens import Added, add_tokens, read_added_tokens, read_optional
from entropix_jax.text.detokenizer import BYTE_SYMBOLS, StreamDecoder, choose_token_bytes, rule_of

if TYPE_CHECKING:
    import tokenizers

_MARK = "the-last-message"  # stands for one in a template
_NONCHARACTERS = range(0xFDD0, 0xFDF0)  # code points that no text should have
# How Llama 3 splits a text before merging, as Meta publishes it.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
# The special tokens that follow the ranks; the others of the 256 are reserved.
_LLAMA3_SPECIAL = (
    *"""
    <|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|>
    <|finetune_right_pad_id|> <|reserved_special_token_2|> <|start_header_id|> <|end_header_id|>
    <|eom_id|> <|eot_id|> <|python_tag|>
    """.split(),
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)


def load_tokenizer(folder: Path, ends: Sequence[int] = ()) -> Tokenizer:
    """Loads the tokenizer of a checkpoint folder: `tokenizer.json`, else `tokenizer.model`. `ends`
    are the end tokens that other files name."""
    path = folder / "tokenizer_config.json"
    raw = read_optional(path)
    settings = replace(read_settings(raw, path), added=read_added_tokens(folder, raw), ends=ends)
    if (path := folder / "chat_template.jinja").is_file():
        settings = replace(settings, chat_template=read_text(path), chat_template_origin=str(path))
    if (path := folder / "tokenizer.json").is_file():
        return Tokenizer(path, read_text(path).encode(), settings)
    if (path := folder / "tokenizer.model").is_file():
        special = {"bos_token": _LLAMA3_SPECIAL[0], **settings.special_tokens}
        settings = replace(settings, special_tokens=special, add_bos=settings.add_bos is not False)
        return Tokenizer(path, _json_of_ranks(_read_ranks(path)), settings)
    raise UserError(f"{folder}: no tokenizer: neither tokenizer.json nor tokenizer.model exists")


@dataclass(frozen=True)
class Settings:
    """What `tokenizer_config.json` and `chat_template.jinja` say."""

    special_tokens: Mapping[str, str]  # text of `bos_token`, `eos_token` and the like
    add_bos: bool | None  # whether a text starts with that token; None: not said
    chat_template: str | None  # Jinja source
    chat_template_origin: str  # the file that it is from
    added: Sequence[Added] = ()  # by id, those without one last
    ends: Sequence[int] = ()  # end tokens that other files name


def read_settings(raw: Mapping[str, Any], path: Path) -> Settings:
    """The settings in a decoded `tokenizer_config.json`; errors name `path`."""
    check_own_code(raw, path)
    special_tokens = {}
    for key, value in raw.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            check_unicode(text, f"{path}: '{key}'")
            special_tokens[key] = text
        elif value is not None and key in ("bos_token", "eos_token"):
            raise UserError(f"{path}: '{key}' must be text, or an object with a text as 'content'")
    add_bos = raw.get("add_bos_token")
    if not isinstance(add_bos, bool | None):
        raise UserError(f"{path}: 'add_bos_token' must be true or false, not {add_bos!r}")
    template = raw.get("chat_template")
    if not isinstance(template, str | None):  # several, by name
        try:
            template = {each["name"]: str(each["template"]) for each in template}.get("default")
        except (TypeError, KeyError):
            what = "text or a list of objects with 'name' and 'template'"
            raise UserError(f"{path}: 'chat_template' must be {what}") from None
    return Settings(special_tokens, add_bos, template, str(path))


class Tokenizer:
    """Text to ids and back, for one checkpoint.

    Attributes:
        vocab_size: one more than the largest id.
        own_size: the same without the added tokens at its end.
        bos_id: the token that belongs before a text, None for none.
        special_ids: the control tokens, which are not part of a text.
        chat_template: Jinja source, None without one.
    """

    def __init__(self, path: Path, source: bytes, settings: Settings):
        """`source` is the content of a tokenizer.json; errors name `path`."""
        import tokenizers

        self._path = path
        self._settings = settings
        self.chat_template = settings.chat_template
        with _report_library_errors(f"{path}: not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(source)
            self._tokenizer_within = _without_prefix(self._tokenizer, source)
            for tokenizer in (self._tokenizer, self._tokenizer_within):
                tokenizer.no_truncation()  # such files may hold the settings of a training run
                tokenizer.no_padding()
                add_tokens(tokenizer, settings.added, settings.ends)
            self.bos_id = self._find_bos()
            self._tokenizer.post_processor = tokenizers.processors.Sequence([])  # it moves offsets
        self._token_bytes = choose_token_bytes(self._tokenizer.decoder, path)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # Not the number of tokens: a file may leave out ids.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        self.own_size = self.vocab_size
        while self.own_size - 1 in added:
            self.own_size -= 1
        if self.bos_id is not None and self.bos_id >= self.vocab_size:
            raise UserError(f"{path}: the post-processor adds {self.bos_id}, not a token id")

    def _find_bos(self) -> int | None:
        if self._settings.add_bos is None:
            # The file's own post-processor decides: look at what it puts before a text.
            probe = self._tokenizer.encode("a")
            return probe.ids[0] if probe.special_tokens_mask[:1] == [1] else None
        bos_id = self.named_token_id("bos_token") if self._settings.add_bos else None
        if self._settings.add_bos and bos_id is None:
            raise UserError(f"{self._path}: 'add_bos_token' is set, but 'bos_token' is not a token")
        return bos_id

    def token_id(self, token: str) -> int | None:
        """The id of a token's own string (of "<|eot_id|>", say), None outside the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def token_string(self, token_id: int) -> str | None:
        """A token's own string ("<|eot_id|>"), None for an id outside the vocabulary."""
        try:
            return self._tokenizer.id_to_token(token_id)
        except OverflowError:
            return None

    def named_token_id(self, name: str) -> int | None:
        """The id of the token that the checkpoint names so ("bos_token", "eos_token", ...)."""
        return self.token_id(self._settings.special_tokens.get(name, ""))

    def encode(self, text: str, *, add_bos: bool, escape: bool = False) -> list[int]:
        """Returns the ids of a text. With `add_bos` they start with one `bos_id`, if there is one.
        With `escape` control tokens in the text are ordinary text. UserError if the text has
        surrogates, which stand for bytes that were not UTF-8."""
        ids = self._encode(self._plain if escape else self._tokenizer, text).ids
        return self._after_bos(ids) if add_bos else ids

    def encode_offsets(self, text: str, *, escape: bool = False) -> tuple[list[int], list[int]]:
        """Returns the ids of `encode` with `add_bos`, and where each token begins in the text."""
        found = self._encode(self._plain if escape else self._tokenizer, text)
        ids = self._after_bos(found.ids)
        return ids, [*[0] * (len(ids) - len(found)), *(start for start, _ in found.offsets)]

    def _after_bos(self, ids: list[int]) -> list[int]:
        if self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def encode_within(self, text: str) -> list[int]:
        """The ids of a text that continues another one: with nothing before it, neither `bos_id`
        nor the space that tokenizers of SentencePiece's kind put before a text."""
        return self._encode(self._tokenizer_within, text).ids

    def _encode(self, tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
        check_unicode(text, "text")
        with _report_library_errors(f"{self._path}: the tokenizer fails"):
            return tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of some ids: what `stream` gives for them, to the end."""
        return self.stream(skip_special=skip_special).run(ids)

    def decode_within(self, ids: Iterable[int]) -> str:
        """The text of ids from the middle of a text, with special tokens and a first space."""
        return self.stream(skip_special=False, within=True).run(ids)

    def stream(
        self, *, skip_special: bool = True, within: bool = False, after: Iterable[int] = ()
    ) -> StreamDecoder:
        """A decoder that takes one id at a time. With `within` the first is from the middle of a
        text. `after` are ids that come before, such as a prompt's: their text is not given again,
        but the start of a text, where some tokenizers drop a space, is at theirs."""
        skip = self.special_ids if skip_special else frozenset()
        decoder = StreamDecoder(self.token_string, self._token_bytes, skip=skip, first=not within)
        for token_id in after:
            decoder.push(token_id)
        return decoder

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token within a text; of a control token those of its name, and none of an
        id outside the vocabulary."""
        token = self.token_string(token_id)
        return b"" if token is None else self._token_bytes(token, False)

    @cached_property
    def token_texts(self) -> list[str]:
        """The text of each id within a text, with its white space; empty for a control token, and
        for an id outside the vocabulary. A part of a character is U+FFFD."""
        texts = [""] * self.vocab_size
        for token, token_id in self._tokenizer.get_vocab().items():
            if token_id not in self.special_ids:
                texts[token_id] = self._token_bytes(token, False).decode("utf-8", "replace")
        return texts

    def render_chat(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of a conversation.

        Args:
            messages: see `chat_template.plain_messages`.
            add_generation_prompt: the text ends with the start of the assistant's answer.
            variables: further variables of the template, such as `enable_thinking`.

        UserError if there is no template, it is wrong, or it refuses the messages.
        """
        if self.chat_template is None:
            problem = "it takes only plain text, no messages and no system message (--no-chat)"
            raise UserError(f"this model's tokenizer has no chat template: {problem}")
        from entropix_jax.text.chat_template import plain_messages, render

        own = {
            "messages": plain_messages(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._settings.special_tokens,
        }
        given = dict(variables or {})
        if taken := sorted(own.keys() & given.keys()):
            raise UserError(f"the chat template's variable '{taken[0]}' cannot be set")
        return render(self.chat_template, own | given, self._settings.chat_template_origin)

    def render_begun(
        self, messages: list[dict[str, str]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """The text of a conversation up to the end of its last message's content, for the model to
        continue it. One without a word has yet to begin. UserError as `render_chat`, or where the
        template changes that content."""
        *before, last = messages
        if not last["content"].strip():
            return self.render_chat(before, variables=variables)
        render = partial(self.render_chat, add_generation_prompt=False, variables=variables)
        # A message with a unique content shows what the template adds after it. The template may
        # trim the content.
        added = render([*before, {**last, "content": _MARK}]).rpartition(_MARK)[2]
        text = render(messages).removesuffix(added)
        if not text.rstrip().endswith(last["content"].strip()):
            origin = self._settings.chat_template_origin
            raise UserError(f"{origin}: the chat template changes the last message")
        return text

    def apply_chat(
        self,
        messages: object,
        *,
        variables: Mapping[str, Any] | None = None,
        begun: bool = False,
        escape: bool = False,
    ) -> list[int]:
        """Returns the ids of a conversation, up to the start of the assistant's answer. `bos_id` is
        added unless the template adds it.

        Args:
            messages: see `chat_template.plain_messages`.
            variables: further variables of the template.
            begun: the model continues the last message, see `render_begun`.
            escape: control tokens that a string of a message spells are encoded as ordinary text,
                so that it cannot end its turn.
        """
        from entropix_jax.text.chat_template import plain_messages

        given = plain_messages(messages)
        plain, mark = self._escape_all(given) if escape else (given, "")
        if begun:
            text = self.render_begun(plain, variables)
        else:
            text = self.render_chat(plain, variables=variables)
        if plain == given:
            return self.encode(text, add_bos=True)
        return self._encode_marked(text, mark)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer without control tokens."""
        return _without_special(self._tokenizer)

    @cached_property
    def _plain_within(self) -> tokenizers.Tokenizer:
        """`_plain` for text after a control token."""
        is_first = (rule_of(self._tokenizer.pre_tokenizer) or {}).get("prepend_scheme") == "first"
        return _without_special(self._tokenizer_within) if is_first else self._plain

    @cached_property
    def _special(self) -> re.Pattern[str]:
        names = sorted((f"{self.token_string(i)}" for i in self.special_ids), key=len, reverse=True)
        return re.compile(f"({'|'.join(re.escape(name) for name in names if name[1:]) or '(?!)'})")

    def _escape_all(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Returns the messages with a mark within each control token, and the mark: a character
        that they do not contain."""
        try:
            text = json.dumps(messages, ensure_ascii=False, skipkeys=True, default=str)
            mark = next(mark for mark in map(chr, _NONCHARACTERS) if mark not in text)
            return self._escape(messages, mark), mark
        except RecursionError:
            raise UserError("messages are nested too deeply") from None

    def _escape(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._special.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {self._escape(k, mark): self._escape(v, mark) for k, v in value.items()}
        return [self._escape(v, mark) for v in value] if isinstance(value, list) else value

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """The ids of a text whose marked control tokens are ordinary text."""
        # The library cuts a text at control tokens before anything else, so the text between two
        # can be encoded by itself. A token may include white space around its name.
        whole, plain, end = self._encode(self._tokenizer, text), self._plain, 0
        ids: list[int] = []
        for token_id, (start, stop) in zip(whole.ids, whole.offsets, strict=True):
            name = text[start:stop].strip()
            if token_id in self.special_ids and name == self.token_string(token_id):
                ids += self._encode(plain, text[end:start].replace(mark, "")).ids
                ids.append(token_id)
                plain, end = self._plain_within, stop
        return self._after_bos([*ids, *self._encode(plain, text[end:].replace(mark, "")).ids])


@contextmanager
def _report_library_errors(what: str) -> Iterator[None]:
    """Turns whatever the library raises over a damaged file into a UserError: it has no narrower
    class, and its panics are no `Exception`."""
    try:
        yield
    except BaseException as error:
        is_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_library or isinstance(error, UserError):
            raise
        raise UserError(f"{what}: {error}") from error


def _without_special(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    plain = type(tokenizer).from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    return plain


def _without_prefix(tokenizer: tokenizers.Tokenizer, source: bytes) -> tokenizers.Tokenizer:
    """The tokenizer without the space that it may put before a text."""
    rules = {name: rule_of(getattr(tokenizer, name)) for name in ("normalizer", "pre_tokenizer")}
    changed = {name: _drop_prefix(rule) for name, rule in rules.items()}
    if changed == rules:
        return tokenizer
    # From the file again: what the library writes takes memory for each id below the highest.
    return type(tokenizer).from_str(json.dumps(json.loads(source) | changed))


def _drop_prefix(rule: dict[str, Any] | None) -> dict[str, Any] | None:
    """The rule without what it puts before a text."""
    if rule is None or rule["type"] == "Prepend":
        return None
    changed = dict(rule)
    if rule["type"] == "Metaspace":
        changed["prepend_scheme"] = "never"
    if rule.get("add_prefix_space"):
        changed["add_prefix_space"] = False
    for name in {"normalizers", "pretokenizers"} & set(rule):
        changed[name] = [step for step in map(_drop_prefix, rule[name]) if step is not None]
    return changed


def _json_of_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """Llama 3's tokenizer of its byte-pair ranks, with the special tokens after them."""
    vocab = {"".join(BYTE_SYMBOLS[byte] for byte in token): rank for token, rank in ranks.items()}
    bpe = byte_level_rules(vocab, merges_of_ranks(vocab), split_by(LLAMA3_SPLIT), whole_words=True)
    special = enumerate(_LLAMA3_SPECIAL, start=len(ranks))
    return tokenizer_json(bpe, ((token_id, token, True) for token_id, token in special))


def byte_level_rules(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    splits: Sequence[Mapping[str, Any]],
    *,
    whole_words: bool,
    nfc: bool = False,
) -> dict[str, Any]:
    """Byte-level BPE in the form of tokenizer.json. With `whole_words` a word that is a token needs
    no merge, with `nfc` texts are read in Unicode's composed form."""
    return {
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "decoder": BYTES,
        "model": {"type": "BPE", "ignore_merges": whole_words, "vocab": vocab, "merges": merges},
    }


def split_by(*patterns: str) -> list[dict[str, Any]]:
    """Pre-tokenizers that cut a text by one regular expression after the other."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return [*(split | {"pattern": {"Regex": pattern}} for pattern in patterns), BYTES]


def tokenizer_json(rules: Mapping[str, Any], added: Iterable[tuple[int, str, bool]]) -> bytes:
    """A tokenizer.json with these rules and added tokens: id, text, and whether it is special."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [{"id": i, "content": text, **flags, "special": special} for i, text, special in added]
    absent = dict.fromkeys(("truncation", "padding", "post_processor"))
    whole = {"version": "1.0", "added_tokens": tokens, **absent, **rules}
    return json.dumps(whole, ensure_ascii=False).encode()


def merges_of_ranks(ranks: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every way to cut a token into two others, in the order of the tokens' ranks."""
    cuts = ((token, token[:at], token[at:]) for token in ranks for at in range(1, len(token)))
    found = [cut for cut in cuts if cut[1] in ranks and cut[2] in ranks]
    # Cuts of one token are equally good; the order only has to be a fixed one.
    found.sort(key=lambda cut: [ranks[part] for part in cut])
    return [(left, right) for _, left, right in found]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Reads tiktoken's text format: on each line a token in base64 and its rank, from 0 up."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            problem = "(only Llama 3's tokenizer.model is read; others need a tokenizer.json)"
            where = f"{path}: line {number}"
            raise UserError(f"{where} is not a token in base64 and its rank {problem}") from error
    single_bytes = {bytes([byte]) for byte in range(256)}
    if sorted(ranks.values()) != list(range(len(ranks))) or not single_bytes <= ranks.keys():
        raise UserError(f"{path}: the ranks are not 0, 1, 2, ..., or a single byte is missing")
    return ranks
