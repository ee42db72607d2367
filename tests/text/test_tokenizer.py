from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from entropix_jax.errors import UserError
from entropix_jax.text.chat_template import plain_messages
from entropix_jax.text.stop import StopFilter
from entropix_jax.text.tokenizer import Tokenizer, load_tokenizer
from entropix_jax.text.turns import turn_end_id
from tests.support.tokenizers import SPECIAL, TEXTS, byte_fallback, save

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m['role'] == 'system' %}{{ raise_exception('no ' + m['role']) }}{% endif %}\n"
    "<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level(bos: bool = True) -> tokenizers.Tokenizer:
    """Returns a tokenizer like that of Llama 3."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["plain é"])  # added, not special, and no byte-level spelling
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}
LIBRARY = {kind: make() for kind, make in KINDS.items()}


def write_ranks(folder: Path) -> Path:
    """Writes a small file in Llama 3's format, with the bytes and a few merges."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", "é".encode(), b"12"]
    lines = [f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """One tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    tokenizers_by_kind = {
        kind: load_tokenizer(save(folder / kind, make())) for kind, make in KINDS.items()
    }
    (folder / "ranks").mkdir()
    return tokenizers_by_kind | {"ranks": load_tokenizer(write_ranks(folder / "ranks"))}


ALL_KINDS = [*KINDS, "ranks"]


# Text and ids


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "ranks"])
@given(text=st.text() | st.sampled_from(TEXTS))
def test_text_survives_the_round_trip(loaded: dict[str, Tokenizer], kind: str, text: str) -> None:
    if kind == "byte_fallback":
        text = text.replace("▁", "_")  # such a vocabulary encodes a space as this mark
    ids = loaded[kind].encode(text, add_bos=False)
    assert loaded[kind].decode(ids, skip_special=False) == text


def test_bos_is_added_once(loaded: dict[str, Tokenizer]) -> None:
    for kind, name in (("byte_level", "<|begin|>"), ("ranks", "<|begin_of_text|>")):
        tokenizer = loaded[kind]
        bos, plain = tokenizer.token_id(name), tokenizer.encode("a cat", add_bos=False)
        assert tokenizer.bos_id == bos is not None
        assert tokenizer.encode("a cat", add_bos=True) == [bos, *plain]
        assert tokenizer.encode(f"{name}a cat", add_bos=True) == [bos, *plain]
        assert tokenizer.encode("", add_bos=True) == [bos]


@pytest.mark.parametrize(
    ("post_processor", "config", "expected"),
    [
        (False, None, None),
        (False, {"bos_token": "<|begin|>"}, None),
        (False, {"bos_token": {"content": "<|begin|>"}, "add_bos_token": True}, 0),
        (True, None, 0),
        (True, {"bos_token": "<|begin|>", "add_bos_token": None}, 0),
        (True, {"bos_token": "<|begin|>", "add_bos_token": False}, None),
    ],
)
def test_sources_of_the_bos_setting(
    tmp_path: Path, post_processor: bool, config: dict[str, Any] | None, expected: int | None
) -> None:
    tokenizer = load_tokenizer(save(tmp_path, byte_level(bos=post_processor), config))
    assert tokenizer.bos_id == expected
    assert (tokenizer.encode("a", add_bos=True)[0] == 0) == (expected == 0)


def test_vocabulary(loaded: dict[str, Tokenizer]) -> None:
    for kind in ALL_KINDS:
        tokenizer = loaded[kind]
        last = tokenizer.vocab_size - 1
        assert tokenizer.decode([last], skip_special=False) != ""
        assert tokenizer.decode([last + 1, 2**40, -1], skip_special=False) == ""
        assert tokenizer.token_id("no such token") is None
    assert loaded["byte_level"].special_ids == {0, 1, 2, 3}
    assert loaded["byte_level"].token_id("plain é") == loaded["byte_level"].vocab_size - 1
    with pytest.raises(UserError, match="not valid Unicode at character 2"):
        loaded["ranks"].encode("ab\udcff", add_bos=False)


SIZE = LIBRARY["byte_level"].get_vocab_size()
THINK = {"content": "<think>", "special": False}


@pytest.mark.parametrize(
    ("file", "content", "text", "ids"),
    [
        # With an id.
        ("tokenizer_config.json", {"added_tokens_decoder": {str(SIZE): THINK}}, "<think>", [SIZE]),
        ("added_tokens.json", {"<think>": SIZE, "</think>": SIZE + 1}, "</think>", [SIZE + 1]),
        # Without one.
        ("special_tokens_map.json", {"pad_token": "<pad>"}, "<pad>", [SIZE]),
        ("special_tokens_map.json", {"pad_token": {"content": "<pad>"}}, "<pad>", [SIZE]),
        (
            "special_tokens_map.json",
            {"additional_special_tokens": ["<a>", {"content": "<b>"}]},
            "<b><a>",
            [SIZE + 1, SIZE],
        ),
        ("tokenizer_config.json", {"additional_special_tokens": ["<a>"]}, "<a>", [SIZE]),
        ("tokenizer_config.json", {"extra_special_tokens": {"image": "<a>"}}, "<a>", [SIZE]),
        ("tokenizer_config.json", {"eos_token": "<end>"}, "<end>", [SIZE]),
    ],
)
def test_added_tokens_of_other_files(
    tmp_path: Path, file: str, content: dict[str, Any], text: str, ids: list[int]
) -> None:
    folder = save(tmp_path / "added", byte_level())
    path = folder / file
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**old, **content}))
    tokenizer = load_tokenizer(folder)
    own = LIBRARY["byte_level"]
    before, after = (own.encode(x, add_special_tokens=False).ids for x in "ab")
    assert tokenizer.encode_within(f"a{text}b") == [*before, *ids, *after]
    assert tokenizer.vocab_size == max(ids) + 1
    assert tokenizer.own_size <= SIZE
    assert tokenizer.decode(ids, skip_special=False) == text
    # A special token is not part of a text, unlike `<think>`.
    assert (ids[0] in tokenizer.special_ids) == ("think" not in text)


def test_the_text_of_each_token(loaded: dict[str, Tokenizer]) -> None:
    """Texts include white space. Control tokens have none, partial characters have U+FFFD."""
    for kind in ALL_KINDS:
        tokenizer = loaded[kind]
        assert len(tokenizer.token_texts) == tokenizer.vocab_size
        for token_id, text in enumerate(tokenizer.token_texts):
            alone = tokenizer.decode_within([token_id])
            assert text == ("" if token_id in tokenizer.special_ids else alone)
        for text in TEXTS:
            pieces = [tokenizer.token_texts[i] for i in tokenizer.encode_within(text)]
            whole = "".join(pieces)
            assert whole == text or "\ufffd" in whole
        assert any(text[:1] == " " and text.strip() for text in tokenizer.token_texts)


def test_a_vocabulary_with_gaps(tmp_path: Path) -> None:
    """An id beyond the embedding needs no memory. It is reported when the model is loaded."""
    raw = json.loads(byte_fallback().to_str())
    raw["model"]["vocab"]["ž"] = 2**32 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_within("ž") == [2**32 - 1]
    assert tokenizer.vocab_size == 2**32
    assert tokenizer.decode_within(tokenizer.encode_within(" a cat")) == " a cat"


def test_truncation_and_padding_settings_are_ignored(
    tmp_path: Path, loaded: dict[str, Tokenizer]
) -> None:
    raw = byte_fallback()
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    tokenizer, plain = load_tokenizer(save(tmp_path, raw)), loaded["byte_fallback"]
    assert tokenizer.encode(TEXTS[0], add_bos=True) == plain.encode(TEXTS[0], add_bos=True)
    assert tokenizer.encode_within(TEXTS[0]) == plain.encode_within(TEXTS[0])


# Streams


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@given(data=st.data())
def test_decode_equals_the_library(
    loaded: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, loaded[kind].vocab_size - 1)))
    skip_special = data.draw(st.booleans())
    expected = LIBRARY[kind].decode(ids, skip_special_tokens=skip_special)
    assert loaded[kind].decode(ids, skip_special=skip_special) == expected


@given(words=st.lists(st.text() | st.sampled_from([*SPECIAL, " ", "▁▁ a"])))
def test_decode_of_byte_fallback_equals_the_library(
    loaded: dict[str, Tokenizer], words: list[str]
) -> None:
    ids = [i for word in words for i in loaded["byte_fallback"].encode(word, add_bos=False)]
    for skip_special in (True, False):
        expected = LIBRARY["byte_fallback"].decode(ids, skip_special_tokens=skip_special)
        assert loaded["byte_fallback"].decode(ids, skip_special=skip_special) == expected


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "ranks"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_character_is_streamed_with_its_last_token(
    loaded: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text, add_bos=False)
    stream = tokenizer.stream()
    shown = ""
    for end, token_id in enumerate(ids, start=1):
        shown += stream.push(token_id)
        # Exactly the complete characters so far.
        assert shown == tokenizer.decode(ids[:end]).rstrip("\ufffd")
    assert shown == text
    assert stream.flush() == ""
    # Ids of bytes equal the bytes. Invalid bytes are replaced.
    stream = loaded["ranks"].stream()
    pushed = [stream.push(byte) for byte in b"\xe2\x82a\xffb\xf0\x9f"]
    assert pushed == ["", "", "\ufffda", "\ufffd", "b", "", ""]
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize("kind", [*ALL_KINDS, "prefixed"])
def test_encode_within_keeps_spaces(
    tmp_path: Path, loaded: dict[str, Tokenizer], kind: str
) -> None:
    """The text round-trips exactly, without added or lost spaces."""
    if kind == "prefixed":
        tokenizer = byte_level()
        parts = [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
        loaded = {kind: load_tokenizer(save(tmp_path, tokenizer))}
    within = loaded[kind]
    before = within.encode("a", add_bos=True)
    for text in (" a", "a", "  a cat ", ""):
        ids = within.encode_within(text)
        assert within.decode_within(ids) == text
        assert within.stream(skip_special=False, after=before).run(ids) == text
        assert within.bos_id not in ids


# Stop strings, of which no part is ever emitted.


PIECES = st.text("ab", max_size=3)


@given(st.lists(PIECES.filter(bool), max_size=3), st.lists(PIECES, max_size=8))
def test_stop_filter_equals_a_search_of_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    stop = StopFilter[int](stops)
    out = ["".join(text for text, _ in stop.push(piece, i)) for i, piece in enumerate(pieces)]
    rest = "".join(text for text, _ in stop.flush())
    for number, text in enumerate(itertools.accumulate(pieces)):
        let_through = "".join(out[: number + 1])
        found = [text.find(one) for one in stops if one in text]
        if found:
            assert stop.stopped
            assert let_through == text[: min(found)]
            assert "".join(out[number + 1 :]) + rest == ""
            return
        # The whole text, except for the longest end that may become a stop string.
        held = text[len(let_through) :]
        starts = {one[:n] for one in stops for n in range(1, len(one))}
        ends = [text[at:] for at in range(len(text)) if text[at:] in starts]
        assert let_through + held == text
        assert held == max(ends, key=len, default="")
    assert not stop.stopped
    assert "".join(out) + rest == "".join(pieces)


def test_each_piece_keeps_its_own_tag() -> None:
    stop = StopFilter[int](["END"])
    assert list(stop.push("xE", 1)) == [("x", 1)]
    assert list(stop.push("N", 2)) == []
    assert list(stop.push("ot E", 3)) == [("E", 1), ("N", 2), ("ot ", 3)]
    assert list(stop.flush()) == [("E", 3)]
    assert list(stop.flush()) == []


# Chats


CHAT = [{"role": "user", "content": " a cat "}, {"role": "assistant", "content": "two"}]


def test_render_and_apply_chat(tmp_path: Path) -> None:
    config = {"bos_token": "<|begin|>", "chat_template": TEMPLATE}
    tokenizer = load_tokenizer(save(tmp_path, byte_level(), config))
    text = "<|begin|><|user|>a cat<|end|><|assistant|>two<|end|><|assistant|>"
    assert tokenizer.render_chat(CHAT) == text
    assert tokenizer.render_chat(CHAT, add_generation_prompt=False) + "<|assistant|>" == text
    ids = tokenizer.apply_chat(CHAT)
    assert ids == tokenizer.encode(text, add_bos=False)
    assert ids.count(0) == 1
    # A template without BOS, since an undefined variable renders as an empty text.
    del config["bos_token"]
    tokenizer = load_tokenizer(save(tmp_path, byte_level(), config))
    assert tokenizer.render_chat(CHAT).startswith("<|user|>")
    assert tokenizer.apply_chat(CHAT) == ids


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_contents_cannot_end_a_turn(kind: str, tmp_path: Path) -> None:
    """With `escape`, only the template has control tokens, and contents are encoded literally.
    Contents without control tokens do not change."""
    if kind == "ranks":
        (tmp_path / kind).mkdir()
        folder, names = write_ranks(tmp_path / kind), ("<|eot_id|>", "<|python_tag|>")
    else:
        folder = save(tmp_path / kind, KINDS[kind]())
        names = ("<|end|>", "<|user|>")
    end, user = names
    template = "{% for m in messages %}" + user + "{{ m.content | trim }}" + end + "{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = load_tokenizer(folder)
    own = [tokenizer.token_id(user), tokenizer.token_id(end)]

    def chat(*contents: str, escape: bool) -> list[int]:
        messages = [{"role": "user", "content": content} for content in contents]
        ids = tokenizer.apply_chat(messages, escape=escape)
        return ids[1:] if tokenizer.bos_id is not None else ids

    for plain in ("a cat", "a\n the cat "):
        assert chat(plain, plain, escape=True) == chat(plain, plain, escape=False)
    spelled = [f"{end}", f"a{end}b {user}", f"{end}{end}", f"a {end}"]
    for content in spelled:
        ids = chat("a cat", content, "the cat", escape=True)
        assert [i for i in ids if i in own] == own * 3
        bare = chat("a cat", content, "the cat", escape=False)
        assert len([i for i in bare if i in own]) > 6
        # The other messages are unchanged, and the content is encoded by its characters.
        cut = [at for at, i in enumerate(ids) if i == own[0]]
        assert ids[: cut[1]] == chat("a cat", escape=False)[: cut[1]]
        middle = [i for i in ids[cut[1] : cut[2]] if i not in own]
        if kind in ("byte_level", "ranks"):
            assert tokenizer.decode_within(middle) == content
            assert tokenizer.encode(content, add_bos=False, escape=True) == middle
    ids = tokenizer.encode(f"a{end}", add_bos=False, escape=True)
    assert not {*own} & {*ids}


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_spelled_control_token_changes_no_other(kind: str, flag: str, tmp_path: Path) -> None:
    """A control token takes the white space of a content, or none, as without the spelled one."""
    raw = json.loads(KINDS[kind]().to_str())
    for token in raw["added_tokens"]:
        token[flag] = token["content"] in ("<|user|>", "<|end|>")
    template = "{% for m in messages %} <|user|>\n{{ m.content }} <|end|>\nx{% endfor %}"
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(raw))
    loaded = load_tokenizer(save(tmp_path / kind, tokenizer, {"chat_template": template}))
    own = [loaded.token_id(name) for name in ("<|user|>", "<|end|>")]
    for content in ("a", " a ", "\n"):
        first, same, other = ({"content": content + end} for end in ("", "", "<|assistant|>"))
        plain, spelled = (
            loaded.apply_chat([{"role": "user", **one} for one in (first, last)], escape=True)
            for last in (same, other)
        )
        assert [i for i in spelled if i in own] == [i for i in plain if i in own]
        half = len(loaded.apply_chat([{"role": "user", **first}]))
        assert spelled[:half] == plain[:half]


def test_names_and_calls_cannot_end_a_turn(tmp_path: Path) -> None:
    folder = save(tmp_path / "names", KINDS["byte_level"]())
    end, user = "<|end|>", "<|user|>"
    template = user + "{% for m in messages %}{{ m.name }}{{ m.tool_calls | tojson }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template + end}))
    tokenizer = load_tokenizer(folder)
    own = [tokenizer.token_id(user), tokenizer.token_id(end)]
    calls: list[Any] = [{"function": {"arguments": {f"a{end}": [f"b{user}", None, 1]}}}]
    message = {"role": "user", "content": "", "name": f"the {end}", "tool_calls": calls}
    ids = tokenizer.apply_chat([message], escape=True)
    assert [i for i in ids if i in own] == own
    assert tokenizer.decode(ids[1:], skip_special=False) == tokenizer.render_chat([message])
    for _ in range(5000):
        calls = [calls]
    with pytest.raises(UserError, match="nested too deeply"):
        tokenizer.apply_chat([{**message, "tool_calls": calls}], escape=True)


def test_contents_may_be_parts_or_empty() -> None:
    """Clients of the API send both. Other keys are passed to the template."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"text": "cat"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant"},
        {"role": "developer", "content": "Be brief."},
    ]
    assert plain_messages(messages) == [
        {"role": "user", "content": "a cat"},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "Be brief."},
    ]
    for wrong, told in (
        ([], "messages must be a non-empty list"),
        (["a"], "message 1 must be an object"),
        ([*messages, {"role": "user", "content": None}], "message 5 must be an object"),
        ([{"role": 5, "content": ""}], "message 1 must be an object"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "message 1 must be"),
        ([{"role": "user", "content": [5]}], "message 1 has a part of type 5"),
    ):
        with pytest.raises(UserError, match=told):
            plain_messages(wrong)


def test_chats_that_end_within_a_message(tmp_path: Path) -> None:
    config = {"bos_token": "<|begin|>", "chat_template": TEMPLATE}
    tokenizer = load_tokenizer(save(tmp_path, byte_level(), config))
    begun = "<|begin|><|user|>a cat<|end|><|assistant|>"
    # The last ones also occur in the template's own text.
    contents = [("two", "two"), (" two ", "two"), (" ", ""), *((s, s) for s in ("<", "|", "end"))]
    for content, kept in contents:
        chat = [CHAT[0], {"role": "assistant", "content": content}]
        assert tokenizer.render_begun(chat) == begun + kept
    config["chat_template"] = TEMPLATE.replace("trim", "upper")
    tokenizer = load_tokenizer(save(tmp_path, byte_level(), config))
    with pytest.raises(UserError, match="the chat template changes the last message"):
        tokenizer.render_begun(CHAT)


def test_features_of_templates(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{% generation %}{{ tools is none }}{% endgeneration %}"
        "{{ strftime_now('%Y') | length }}{{ date_string is defined }}"
    )
    tokenizer = load_tokenizer(save(tmp_path, byte_level(), {"chat_template": template}))
    chat = [{"role": "user", "content": "<é>"}, *CHAT]
    assert tokenizer.render_chat(chat) == '{"role": "user", "content": "<é>"}True4False'


def test_chat_template_sources(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    for config, expected in (
        ({"chat_template": named}, "named"),
        ({"chat_template": named[:1]}, None),
    ):
        assert load_tokenizer(save(tmp_path, byte_level(), config)).chat_template == expected
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).chat_template == "file"


# Errors

ISOLATED = {"behavior": "Isolated", "invert": False}
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, **ISOLATED}
NO_TOKEN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [99999], "tokens": ["<s>"]}},
}
NO_UNKNOWN = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<none>"}


RAW: dict[str, Any] = json.loads(byte_level(bos=False).to_str())
LONGER = {**RAW["model"], "continuing_subword_prefix": "longer"}


def changed(**parts: Any) -> dict[str, Any]:
    """Returns the content of tokenizer.json with other parts."""
    return {**RAW, **parts}


def decoded_by(*parts: decoders.Decoder) -> dict[str, Any]:
    return changed(decoder=json.loads(decoders.Sequence([*parts]).__getstate__()))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other", b"", "neither tokenizer.json nor tokenizer.model"),
        ("tokenizer.json", {"version": "1.0"}, "not a tokenizer.json"),
        ("tokenizer.model", b"\n\x0e\x00\x00unk", "line 1 is not a token in base64"),
        ("tokenizer.model", b"YQ== 0\nYg== 2\n", "the ranks are not 0, 1, 2"),
        ("tokenizer.model", b"YQ== 0\nYg== 1\n", "or a single byte is missing"),
        ("tokenizer_config.json", {"add_bos_token": True}, "'bos_token' is not a token"),
        ("tokenizer_config.json", {"eos_token": True}, "'eos_token' must be text, or an obj"),
        ("tokenizer_config.json", {"bos_token": "\ud800"}, "'bos_token' is not valid Unicode"),
        # Added tokens.
        ("added_tokens.json", {"<think>": 5}, "the added token '<think>' has the id 5, but the"),
        ("added_tokens.json", {"<think>": "5"}, "an added token must be a text with an id"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "'added_tokens_decoder' must be"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": THINK}}, "a text with an id"),
        ("special_tokens_map.json", {"additional_special_tokens": [1]}, "an added token must be"),
        # The library panics, which is no Exception, when it reads a file, or on a text, here with
        # endless backtracking. Some of its errors occur only with the first text that has them.
        ("tokenizer.json", changed(model=LONGER), "not a tokenizer.json: range"),
        ("tokenizer.json", changed(pre_tokenizer=BACKTRACKING), "the tokenizer fails: Onig: Regex"),
        ("tokenizer.json", changed(model=NO_UNKNOWN), "WordLevel error: Missing"),
        ("tokenizer.json", changed(post_processor=NO_TOKEN), "the post-processor adds 99999, not"),
        # Unsupported decoders.
        ("tokenizer.json", changed(decoder=None), "decoder null"),
        ("tokenizer.json", decoded_by(decoders.WordPiece()), "decoder WordPiece"),
        (
            "tokenizer.json",
            decoded_by(decoders.ByteLevel(), decoders.Fuse()),
            r"ByteLevel \+ Fuse",
        ),
        (
            "tokenizer.json",
            decoded_by(decoders.Fuse(), decoders.Strip(" ", 0, 1)),
            "Strip at the end",
        ),
        # Chat templates.
        ("tokenizer_config.json", {"chat_template": [1]}, "'chat_template' must be"),
        ("tokenizer_config.json", {"chat_template": None}, "no chat template"),
        *(
            ("chat_template.jinja", template, message)
            for template, message in (
                (b"a\n{% if %}", "line 2"),
                (b"{{ raise_exception('only\ntwo') }}", "refuses the messages: only two"),
                (b"{{ 1 + 'a' }}", "the chat template fails: TypeError"),
                (b"{{ 'a' * 10**9 }}", "the chat template fails: OverflowError"),
                (b"{{ 9 ** (9 ** 9) }}", "the chat template fails: OverflowError"),
            )
        ),
    ],
)
def test_errors_of_tokenizers(tmp_path: Path, name: str, content: Any, message: str) -> None:
    if name not in ("tokenizer.model", "other"):
        save(tmp_path, byte_level(bos=False), {"chat_template": TEMPLATE})
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / name).write_bytes(data)

    def use() -> None:
        tokenizer = load_tokenizer(tmp_path)
        tokenizer.encode("a" + "x" * 100, add_bos=False)
        tokenizer.apply_chat(CHAT)

    with pytest.raises(UserError, match=message) as caught:
        use()
    assert "added token" not in message or name in str(caught.value)


# Llama 3's ranks


def test_tokenizer_of_ranks(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_ranks(tmp_path))
    size = 256 + 5
    assert tokenizer.vocab_size == size + 256
    special = {"begin_of_text": 0, "start_header_id": 6, "eot_id": 9}
    special |= {f"reserved_special_token_{i}": at for i, at in ((1, 3), (3, 11), (247, 255))}
    for name, number in special.items():
        assert tokenizer.encode(f"<|{name}|>", add_bos=False) == [size + number]
        assert tokenizer.decode([size + number], skip_special=False) == f"<|{name}|>"
        assert tokenizer.decode([size + number]) == ""
    assert tokenizer.token_id("<|reserved_special_token_248|>") is None
    # Words keep the space before them, and numbers are cut after three digits.
    assert tokenizer.encode("the the", add_bos=False) == [257, 258]
    assert tokenizer.encode("12", add_bos=False) == [260]
    assert tokenizer.encode("0012", add_bos=False) == [*b"0012"]


def test_ranks_of_long_runs(loaded: dict[str, Tokenizer]) -> None:
    """On these texts, the expression that splits a text could backtrack."""
    tokenizer = loaded["ranks"]
    for text in (" " * 200_000, "x" + "a" * 60_000 + " " * 60_000 + "th"):
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


@pytest.fixture(scope="session")
def llama3(shared_data: Path) -> Tokenizer:
    return load_tokenizer(shared_data / "llama3")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [9906, 1917]),
        (" ...", [2564]),
        (
            "naïve café, Größe, 東京, שלום",
            [3458, 38672, 588, 53050, 11, 2895, 80040, 11, 119109, 11, 88898, 50391, 37769, 251],
        ),
        (
            "  two  spaces\r\n\n\tdef f(x): return 12345",
            [220, 1403, 220, 12908, 81923, 7604, 282, 2120, 1680, 471, 220, 4513, 1774],
        ),
        ("<|eot_id|>'LL don't", [128009, 6, 4178, 1541, 956]),
    ],
)
def test_llama3(llama3: Tokenizer, text: str, ids: list[int]) -> None:
    """Compares with the ids of tiktoken with Meta's file."""
    assert (llama3.vocab_size, llama3.bos_id) == (128_256, 128_000)
    assert llama3.encode(text, add_bos=True) == [128_000, *ids]
    stream = llama3.stream(skip_special=False)
    pushed = [stream.push(token_id) for token_id in ids]
    assert "".join(pushed) == text
    assert all("\ufffd" not in part for part in pushed)


@pytest.mark.parametrize("others", [(), (2,)])
def test_named_tokens_are_control_tokens_whatever_their_flag(
    tmp_path: Path, others: tuple[int, ...]
) -> None:
    """Also those with a well-known name, here `<|end|>`. A token that begins a turn ends none."""
    text = byte_level().to_str().replace('"special":true', '"special":false')
    template = "{% for m in messages %}<|user|>{{ m.content }}<|assistant|>{% endfor %}"
    decoder = {i: {"content": SPECIAL[i], "special": True} for i in others}
    config = {"eos_token": "<|begin|>", "chat_template": template, "added_tokens_decoder": decoder}
    loaded = load_tokenizer(save(tmp_path / "named", tokenizers.Tokenizer.from_str(text), config))
    assert loaded.special_ids == {0, 1, *others}
    ids = loaded.apply_chat([{"role": "user", "content": "a<|end|>b<|begin|>"}], escape=True)
    assert not {0, 1} & {*ids[1:]}
    assert [turn_end_id(loaded, own) for own in ((), (2,))] == [None, 2 if others else None]


# The reference


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_chat_ids_equal_transformers(tmp_path: Path, transformers: ModuleType, kind: str) -> None:
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    folder = save(tmp_path, KINDS[kind](), config)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = load_tokenizer(folder)
    chat = [*CHAT, {"role": "user", "content": "what <|end|> is\n naïve 東京 👍🏽?"}]
    for prompt in (True, False):
        assert ours.render_chat(chat, add_generation_prompt=prompt) == (
            reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        )
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat(chat) == expected
    for text in TEXTS:
        assert ours.encode(text, add_bos=True) == reference(text)["input_ids"]
