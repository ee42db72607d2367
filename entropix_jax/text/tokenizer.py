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
from typing import TYPE_CHECKING, Any, AnyStr

from entropix_jax.errors import UserError, check_unicode
from entropix_jax.host.files import check_own_code, read_bytes, read_json_object, read_text
from entropix_jax.text.added_tokens import AddedToken, add_tokens, read_added_tokens
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
# The special tokens that follow the ranks; the others of the 256 are reserved.
_LLAMA3_SPECIAL = (
    *"""
    <|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|reserved_special_token_1|>
    <|finetune_right_pad_id|> <|reserved_special_token_2|> <|start_header_id|> <|end_header_id|>
    <|eom_id|> <|eot_id|> <|python_tag|>
    """.split(),
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a checkpoint folder: `tokenizer.json`, else `tokenizer.model`."""
    path = folder / "tokenizer_config.json"
    raw = read_json_object(path) if path.is_file() else {}
    settings = replace(read_settings(raw, path), added=read_added_tokens(folder, raw))
    if (path := folder / "chat_template.jinja").is_file():
        settings = replace(settings, chat_template=read_text(path), chat_template_origin=str(path))
    if (path := folder / "tokenizer.json").is_file():
        return Tokenizer(path, read_bytes(path), settings)
    if (path := folder / "tokenizer.model").is_file():
        special = {"bos_token": _LLAMA3_SPECIAL[0], **settings.special_tokens}
        add_bos = settings.add_bos is not False
        settings = replace(settings, special_tokens=special, add_bos=add_bos)
        return Tokenizer(path, _tokenizer_of_ranks(_read_ranks(path)), settings)
    raise UserError(f"{folder}: no tokenizer: neither tokenizer.json nor tokenizer.model is there")


@dataclass(frozen=True)
class Settings:
    """What `tokenizer_config.json` and `chat_template.jinja` say."""

    special_tokens: Mapping[str, str]  # text of `bos_token`, `eos_token` and the like
    add_bos: bool | None  # whether a text starts with that token; None: not said
    chat_template: str | None  # Jinja source
    chat_template_origin: str  # the file that it is from
    added: Sequence[AddedToken] = ()  # by id, those without one last


def read_settings(raw: Mapping[str, Any], path: Path) -> Settings:
    """The settings in a decoded `tokenizer_config.json`; errors name `path`."""
    check_own_code(raw, path)
    special_tokens = {}
    for key, value in raw.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            check_unicode(text, f"{path}: '{key}'")
            special_tokens[key] = text
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

    def __init__(self, path: Path, source: bytes | tokenizers.Tokenizer, settings: Settings):
        """`source` is what a tokenizer.json holds, or a tokenizer that puts nothing before a text;
        errors name `path`."""
        import tokenizers

        self._path = path
        self._settings = settings
        self.chat_template = settings.chat_template
        with _report_library_errors(f"{path}: not a tokenizer.json"):
            if isinstance(source, bytes):
                self._tokenizer = tokenizers.Tokenizer.from_buffer(source)
                self._tokenizer_within = _without_prefix(self._tokenizer, source)
            else:
                self._tokenizer = self._tokenizer_within = source
            for tokenizer in (self._tokenizer, self._tokenizer_within):
                tokenizer.no_truncation()  # such files may hold the settings of a training run
                tokenizer.no_padding()
                add_tokens(tokenizer, settings.added)
            self.bos_id = self._find_bos()
        self._token_bytes = choose_token_bytes(self._tokenizer.decoder, path)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # Not the number of tokens: a file may leave out ids.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        self.own_size = self.vocab_size
        while self.own_size - 1 in added:
            self.own_size -= 1
        if self.bos_id is not None and self.bos_id >= self.vocab_size:
            raise UserError(
                f"{path}: the post-processor puts {self.bos_id}, which is not a token id"
            )

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

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """The ids of a text; with `add_bos` they start with `bos_id`, where there is one, once.
        UserError if the text has surrogates, which stand for bytes that were not UTF-8."""
        ids = self._encode(self._tokenizer, text)
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_within(self, text: str) -> list[int]:
        """The ids of a text that continues another one: with nothing before it, neither `bos_id`
        nor the space that tokenizers of SentencePiece's kind put before a text."""
        return self._encode(self._tokenizer_within, text)

    def _encode(self, tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
        check_unicode(text, "text")
        with _report_library_errors(f"{self._path}: the tokenizer fails"):
            return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of some ids: what `stream` gives for them, to the end."""
        return self.stream(skip_special=skip_special).run(ids)

    def decode_within(self, ids: Iterable[int]) -> str:
        """The text of ids from the middle of a text, special tokens included. A space before it is
        kept, which `decode` may drop."""
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
        """The text of a conversation, see `chat_template.render_chat`."""
        if self.chat_template is None:
            told = "it takes plain text alone, no messages and no system message (--no-chat)"
            raise UserError(f"this model's tokenizer has no chat template: {told}")
        from entropix_jax.text.chat_template import render_chat

        return render_chat(
            self.chat_template,
            messages,
            origin=self._settings.chat_template_origin,
            special_tokens=self._settings.special_tokens,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

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
        # What the template adds to a message shows behind one that it cannot hold elsewhere. It may
        # trim the content, whose end stays where it was kept.
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
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        begun: bool = False,
        escape: bool = False,
    ) -> list[int]:
        """Returns the ids of a conversation. `bos_id` is added unless the template adds it.

        Args:
            messages: see `chat_template.plain_messages`.
            add_generation_prompt: the ids end with the start of the assistant's answer.
            variables: further variables of the template.
            begun: the model continues the last message, see `render_begun`.
            escape: control tokens that a string of a message spells are encoded as ordinary text,
                so that it cannot end its turn.
        """
        from entropix_jax.text.chat_template import plain_messages

        plain = plain_messages(messages)
        mark = self._mark_in(plain) if escape else None
        if mark is not None:
            try:
                plain = self._escape(plain, mark)
            except RecursionError:
                raise UserError("messages are nested too deeply") from None
        if begun:
            text = self.render_begun(plain, variables)
        else:
            text = self.render_chat(
                plain, add_generation_prompt=add_generation_prompt, variables=variables
            )
        return self.encode(text, add_bos=True) if mark is None else self._encode_marked(text, mark)

    # Control tokens as ordinary text

    def encode_plain(self, text: str, *, add_bos: bool) -> list[int]:
        """The ids of a text whose control tokens are ordinary text."""
        ids = self._encode(self._plain, text)
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer without control tokens."""
        plain = type(self._tokenizer).from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _plain_within(self) -> tokenizers.Tokenizer:
        """The same for what follows a control token."""
        rule = rule_of(self._tokenizer.pre_tokenizer)
        if rule is None or rule.get("prepend_scheme") != "first":
            return self._plain
        plain = type(self._tokenizer).from_str(self._tokenizer_within.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _special(self) -> re.Pattern[str]:
        names = [self.token_string(i) or "" for i in self.special_ids]
        longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _mark_in(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Returns a character to mark control tokens with; None if no string spells one."""
        texts = [*_strings(messages)]
        if not any(map(self._special.search, texts)):
            return None
        return next(mark for mark in map(chr, _NONCHARACTERS) if not any(mark in t for t in texts))

    def _escape(self, value: Any, mark: str) -> Any:
        """Returns a JSON value with the mark within each control token of its strings."""
        if isinstance(value, str):
            return self._special.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {self._escape(k, mark): self._escape(v, mark) for k, v in value.items()}
        return [self._escape(v, mark) for v in value] if isinstance(value, list) else value

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """The ids of a text whose marked control tokens are ordinary text."""
        # The library cuts a text at control tokens before anything else, so what lies between two
        # can be encoded by itself.
        ids: list[int] = []
        rest, at = 0, 0
        ends = [*(found.span() for found in self._special.finditer(text)), (len(text), len(text))]
        for start, end in ends:
            if mark in text[at:start]:
                if rest < at:
                    ids += self._encode(self._tokenizer, text[rest:at])
                tokenizer = self._plain_within if at else self._plain
                ids += self._encode(tokenizer, text[at:start].replace(mark, ""))
                rest = start
            at = end
        if rest < len(text):
            ids += self._encode(self._tokenizer, text[rest:])
        if self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings of a JSON value, keys included."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one


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


def _tokenizer_of_ranks(ranks: Mapping[bytes, int]) -> tokenizers.Tokenizer:
    """Llama 3's tokenizer of its byte-pair ranks, with the special tokens after them."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    def spell(token: bytes) -> str:
        return "".join(BYTE_SYMBOLS[byte] for byte in token)

    merges = [(spell(left), spell(right)) for left, right in merges_of_ranks(ranks)]
    vocab = {spell(token): rank for token, rank in ranks.items()}
    # A word that is a token needs no merge, in Meta's reader as with `ignore_merges`.
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated")
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spelling])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, normalized=False, special=True) for name in _LLAMA3_SPECIAL]
    tokenizer.add_special_tokens(special)
    return tokenizer


def merges_of_ranks(ranks: Mapping[AnyStr, Any]) -> list[tuple[AnyStr, AnyStr]]:
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
            told = "(only Llama 3's tokenizer.model is read; others need a tokenizer.json)"
            where = f"{path}: line {number}"
            raise UserError(f"{where} is not a token in base64 and its rank {told}") from error
    single_bytes = {bytes([byte]) for byte in range(256)}
    if sorted(ranks.values()) != list(range(len(ranks))) or not single_bytes <= ranks.keys():
        raise UserError(f"{path}: the ranks are not 0, 1, 2, ... of tokens with all single bytes")
    return ranks
