"""Damaged and hostile files. Each gives a valid result or a one-line UserError."""

from __future__ import annotations

import base64
import json
import os
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from safetensors.numpy import save

from entropix_jax.batch.output import find_difference, read_identity
from entropix_jax.batch.records import BadRecord, read_records
from entropix_jax.cli.generate import Arguments, _read_prompt
from entropix_jax.errors import UserError
from entropix_jax.host.resources import resource_folder
from entropix_jax.lab.sweep import read_sweep
from entropix_jax.model.checkpoint import read_params
from entropix_jax.model.config_file import load_eos_ids, load_model_config, parse_model_config
from entropix_jax.model.gguf import open_gguf
from entropix_jax.model.params import param_specs
from entropix_jax.report.page import run_page
from entropix_jax.sampler.calibration import read_calibration
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.gguf_files import FAMILIES, write
from tests.support.models import load_params
from tests.support.properties import examples
from tests.support.reports import footer, header, lines_of, run_of
from tests.support.samplers import CALIBRATION, HOST
from tests.support.tokenizers import byte_fallback

# Every kind of input file: its reader, valid examples, and other files in its folder.


@dataclass(frozen=True)
class Surface:
    read: Callable[[Path], object]
    valid: Sequence[bytes] | Callable[[], Iterable[bytes]]
    beside: Mapping[str, bytes] = field(default_factory=dict)


def encoded(*values: Any) -> list[bytes]:
    return [json.dumps(value, indent=1).encode() for value in values]


SHARED = "default-smollm2.toml"  # another sweep extends its settings
TINY = resource_folder("weights") / "tiny"
SIZES = {"vocab_size": 300, "hidden_size": 8, "intermediate_size": 12, "head_dim": 4}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
MODEL: dict[str, Any] = json.loads((TINY / "config.json").read_text(encoding="utf-8")) | SIZES
ROPE = {"rope_parameters": {**MODEL["rope_scaling"], "rope_theta": MODEL["rope_theta"]}}
NEWER = {k: v for k, v in MODEL.items() if k not in ("rope_scaling", "rope_theta")} | ROPE
CONFIG = replace(parse_model_config(MODEL, TINY), dtype=None, tied_head=False)
SPECS = jax.tree.leaves(param_specs(CONFIG))
TENSORS = {spec.name: np.full(spec.shape, 0.5, np.float32) for spec in SPECS}
SHARDS = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(TENSORS)}

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 3 and 4? "},
    {"role": "user", "content": "\u2028 'quoted' \"and\" {{ 1 }}"},
]
TEMPLATES = (
    """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no') }}
{% endif %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}""",
    """{%- set ns = namespace(n=0) -%}{% for m in messages if m.content %}{% set ns.n = ns.n + 1 %}
{{ m | tojson(indent=2) }}{% else %}none{% endfor %}{{ ns.n * 2 }} {{ strftime_now('%Y') }}""",
)
TOKENIZER_CONFIG = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
BYTES = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", "é".encode()]
RANKS = b"".join(b"%b %d\n" % (base64.b64encode(token), i) for i, token in enumerate(BYTES))
FALLBACK = {"tokenizer.json": byte_fallback().to_str().encode()}


def read_tokenizer(path: Path) -> None:
    check_texts(load_tokenizer(path.parent))


def check_texts(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Grüße, 東京 👍🏽\n\n  the the   <|eot_id|> \0 12345 ", add_bos=True)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    tokenizer.decode([*ids, *range(300), 2**31, 2**40], skip_special=False).encode()


def read_chat(path: Path) -> object:
    return load_tokenizer(path.parent).apply_chat(_read_prompt(Arguments(messages=str(path))))


def read_gguf(path: Path) -> None:
    file = open_gguf(path)
    read_params(file.tensors, file.config, "float32")
    check_texts(file.tokenizer())


def gguf_files() -> Iterator[bytes]:
    with TemporaryDirectory() as folder:
        for family in FAMILIES:
            yield write(Path(folder, "a.gguf"), family).read_bytes()


CONFIGS = resource_folder("configs")
SHAPE = {"layers": 2, "width": 8, "heads": 2}
SWEEP = b"""tasks = ["sums"]
[tuning]
samplers = ["entropix"]
settings = 4
[tuning.over.entropix]
"base.temperature" = { from = 0.2, to = 2.0, scale = "log" }
"base.top_k" = { from = 1, to = 50 }
"arms.lehv" = ["branch", "explore"]
[settings.greedy]
sampler = "greedy"
"""


def read_sampler(sampler: Sampler) -> None:
    """Checks that no setting of the sampler is NaN."""
    params = sampler.settings(**{**HOST, "encode": lambda text: [*text.encode("utf-8", "replace")]})
    assert not any(np.isnan(np.asarray(leaf, np.float64)).any() for leaf in jax.tree.leaves(params))


def read_tables(path: Path) -> None:
    read_sampler(load_sampler("document-004").resolve(read_calibration(path), str(path)))


RECORDS = (
    {"prompt": "Once", "id": "a"},
    {"messages": CHAT, "id": 7, "sampler": "greedy", "max_new_tokens": 5, "seed": 3},
    {"prompt": "Grüße 東京", "note": [1, {"a": None}]},
    {"id": "b"},
)
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
CSV = b'id,prompt,seed,max_new_tokens,sampler\na,"Once, ""there""\nwas",1,5,greedy\n,b,,,\n'
RUN = {"model": "weights/tiny", "input": "in.jsonl", "seed": 0, "sampler": {"base.top_k": 1}}


def read_batch(path: Path) -> None:
    ids: set[str] = set()
    for record in read_records(str(path)):
        if isinstance(record, BadRecord):
            check_line(record.error)
            continue
        assert record.id not in ids
        assert (record.prompt is None) != (record.messages is None)
        ids.add(record.id)


def read_run(path: Path) -> object:
    output = str(path).removesuffix(".run.json")
    return find_difference(read_identity(output) or {}, RUN)


def trace_of(rows: int) -> bytes:
    records = [record for row in range(rows) for record in run_of(9, row)]
    return "".join(lines_of([header(), *records, footer(records)])).encode()


TRACES = [trace_of(2), trace_of(1), trace_of(2)[: trace_of(2).rindex(b"{") - 40]]
SURFACES = {
    "config.json": Surface(lambda path: load_model_config(path.parent), encoded(MODEL, NEWER)),
    "generation_config.json": Surface(
        lambda path: load_eos_ids(path.parent),
        encoded({"eos_token_id": 7}, {"eos_token_id": [7.0, 8]}, {"eos_token_id": None}),
    ),
    "model.safetensors": Surface(
        lambda path: load_params(path.parent, CONFIG, "float32"), [save(TENSORS)]
    ),
    "model.safetensors.index.json": Surface(
        lambda path: load_params(path.parent, CONFIG, "float32"),
        encoded({"metadata": {"total_size": 1}, "weight_map": SHARDS}),
        {f: save({k: v for k, v in TENSORS.items() if SHARDS[k] == f}) for f in SHARDS.values()},
    ),
    "model.gguf": Surface(read_gguf, gguf_files),
    "tokenizer.json": Surface(read_tokenizer, [*FALLBACK.values()]),
    "tokenizer_config.json": Surface(
        read_tokenizer,
        encoded(*({**TOKENIZER_CONFIG, "chat_template": one} for one in (TEMPLATES[0], None))),
        FALLBACK,
    ),
    "tokenizer.model": Surface(read_tokenizer, [RANKS]),
    "chat_template.jinja": Surface(
        lambda path: load_tokenizer(path.parent).render_chat(CHAT),
        [template.encode() for template in TEMPLATES],
        FALLBACK,
    ),
    "messages.json": Surface(
        read_chat, encoded(CHAT), {**FALLBACK, "chat_template.jinja": TEMPLATES[1].encode()}
    ),
    "preset.toml": Surface(
        lambda path: read_sampler(load_sampler(str(path)).resolve(CALIBRATION, "made up")),
        [path.read_bytes() for path in sorted(CONFIGS.glob("*.toml"))],
    ),
    "calibration.json": Surface(
        read_tables,
        [
            replace(CALIBRATION, model=SHAPE).to_text().encode(),
            *encoded({**CALIBRATION.to_json(), "model": SHAPE, "source": "", "tokens": 0}),
        ],
    ),
    "sweep.toml": Surface(
        partial(read_sweep, data="data"),
        [*(path.read_bytes() for path in sorted(CONFIGS.glob("ablations/[!r]*.toml"))), SWEEP],
        {SHARED: (CONFIGS / "ablations" / SHARED).read_bytes()},
    ),
    "batch.jsonl": Surface(read_batch, [LINES]),
    "batch.csv": Surface(read_batch, [CSV]),
    "batch.jsonl.run.json": Surface(
        read_run, encoded({"format_version": 1, "identity": RUN}, {"identity": RUN})
    ),
    "trace.jsonl": Surface(run_page, TRACES),
}


def check_line(error: object) -> None:
    """Checks that an error is one line that is not too long."""
    text = str(error)
    assert len(text.splitlines()) == 1, f"not one line: {text!r}"
    assert len(text) <= 2000, f"a line of {len(text)} characters: {text[:200]!r}"


# Damage

# JSON that Python's writer never writes. It replaces a placeholder.
RAW = (
    *("NaN", "Infinity", "1e999", "-0.0", "1e-400", "9" * 5000, "01", "'a'", ""),
    *("[" * 500 + "]" * 500, "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, '{"a": 1, "a": 2}'),
    *('"\\ud800"', '"\\u0000"'),
)
VALUES = st.one_of(
    st.sampled_from([f"@RAW{i}@" for i in range(len(RAW))]),
    st.sampled_from([2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, -(2**63), -1, 0, 1]),
    st.sampled_from(["", "\0", "\x1b[31m", "\u2028", "../../../etc/passwd", "a" * 70_000]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=8,
    ),
)
TOML = st.sampled_from(
    [
        *("true", "0", "-1", "inf", "nan", '""', "[]", "{}", "1e400", "1979-05-27", "1000000"),
        *("0x" + "f" * 5000, '"../x.toml"', '"entropy > h2"', '["entropy < 1e9"]'),
        *("9" * 5000, '"\\ud800"', "[" * 50_000, "{a = " * 300 + "1" + "}" * 300, "[[], {}]"),
        *("{ from = nan, to = inf }", '{ from = 2, to = 1, scale = "log" }', '["edt", "edt"]'),
        *('"30%"', '"100.5%"', '"-0%"', '"%"', '[".", ""]'),
        *('["entropy < 30%"]', '["agreement > 1e400%"]'),
    ]
)
JUNK = st.binary(max_size=8) | st.sampled_from(
    [
        *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b'"', b"{{", b"{%", b"," * 3000),
        *(b"A" * 70_000, b"[" * 3000, b"9" * 5000, b"{{ 'a' * 10**9 }}"),
        b"{% for i in range(10**9) %}",
    ]
)


@st.composite
def damaged_bytes(draw: Any, data: bytes) -> bytes:
    """Draws data with some bytes removed, replaced, repeated or inserted."""
    start = draw(st.integers(0, len(data)))
    end = min(len(data), start + draw(st.sampled_from([0, 1, 4, 64, len(data)])))
    part = draw(JUNK | st.just(data[start:end] * 2))
    return data[:start] + part + data[end:]


def some_key(parent: Any) -> Any:
    return st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent)))


@st.composite
def damaged_json(draw: Any, data: bytes) -> bytes:
    """Draws JSON with some values replaced, renamed, removed or wrapped."""
    value = json.loads(data)
    for _ in range(draw(st.integers(1, 3))):
        if not isinstance(value, dict | list) or not value:
            break
        parent, key = value, draw(some_key(value))
        while isinstance(parent[key], dict | list) and parent[key] and draw(st.booleans()):
            parent = parent[key]
            key = draw(some_key(parent))
        change = draw(st.sampled_from(["replace", "replace", "remove", "rename", "wrap", "scale"]))
        old = parent.pop(key) if change in ("remove", "rename") else parent[key]
        if change == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from(["extra", "", "type", str(key).upper()]))] = old
        elif change == "wrap":
            parent[key] = draw(st.sampled_from([[old], {"x": old}, [old, old], str(old)[:1000]]))
        elif change == "scale" and isinstance(old, int | float):
            parent[key] = draw(st.sampled_from([-old, old + 1, old * 2, old / 2, str(old)]))
        elif change in ("replace", "scale"):
            parent[key] = draw(VALUES)
    text = json.dumps(value, ensure_ascii=draw(st.booleans()))
    for i, raw in enumerate(RAW):
        text = text.replace(f'"@RAW{i}@"', raw)
    return text.encode("utf-8", "surrogatepass")


@st.composite
def damaged_lines(draw: Any, data: bytes) -> bytes:
    """Draws lines with one changed, repeated, removed, or an invalid one inserted."""
    rows = data.splitlines(keepends=True)
    at = draw(st.integers(0, len(rows) - 1))
    line = rows.pop(at)
    for _ in range(draw(st.integers(0, 2))):
        rows.insert(draw(st.integers(0, len(rows))), line)
    other = st.sampled_from([b"\n", b"[]\n", b"null\n", b'"a"\n'])
    if line.endswith(b"}\n"):
        other |= damaged_json(line).map(lambda new: new + b"\n")
    rows.insert(at, draw(other))
    return b"".join(rows)


@st.composite
def damaged_toml(draw: Any, data: bytes) -> bytes:
    """Draws TOML with a value replaced, or a line removed, repeated or inserted."""
    rows = data.decode().split("\n")
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(rows) - 1))
        key = rows[at].partition("=")[0].strip() or "extra"
        rows[at : at + draw(st.integers(0, 1))] = draw(
            st.sampled_from([[], [rows[at]] * 2, ["[extra]"], ["[[a]]"]])
            | TOML.map(lambda value: [f"{key} = {value}"])  # noqa: B023
        )
    return "\n".join(rows).encode()


GGUF_KEYS = [
    *(f"general.{name}" for name in ("architecture", "type", "alignment")),
    *(f".{name}" for name in ("embedding_length", "block_count", "vocab_size", "rope.freq_base")),
    *(f".attention.{name}" for name in ("head_count", "head_count_kv", "key_length")),
    *(f".rope.scaling.{name}" for name in ("type", "factor")),
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "merges")),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "unknown")),
    *("tokenizer.ggml.add_bos_token", "tokenizer.chat_template", "split.count"),
]
GGUF_VALUES = [
    *(..., 0, 1, -1, 7, 2**31 - 1, -(2**31), 1e30, -0.5, float("nan"), True, False),
    *("", "llama", "qwen2", "gpt2", "linear", "x" * 70_000, "{{ 1 / 0 }}", "\0"),
    *([1], [-1] * 400, [2.5] * 400, ["a"], ["a"] * 400, ["a b"] * 9, ["a", "b c d"]),
]


@st.composite
def damaged_gguf(draw: Any, data: bytes) -> bytes:
    """Draws a file with some metadata replaced or removed."""
    changes = draw(
        st.dictionaries(st.sampled_from(GGUF_KEYS), st.sampled_from(GGUF_VALUES), max_size=3)
    )
    family = draw(st.sampled_from([*FAMILIES]))
    with TemporaryDirectory() as folder:
        return write(Path(folder, "a.gguf"), family, changes).read_bytes()


DAMAGED: dict[str, Any] = {".json": damaged_json, ".jsonl": damaged_lines, ".toml": damaged_toml}
DAMAGED[".gguf"] = damaged_gguf
# Contents that are difficult for readers of any format.
HOSTILE = (
    *(b"", b"\0", b"\xef\xbb\xbf", b"\xff\xfe{\0}\0", b"[]", b"{}", b"null", b"1", b'"a"', b"[[]]"),
    *(b"[" * 100_000, b'{"a":' * 3000, b"9" * 5000, b"A" * 1_000_000, b"\n" * 5000, b'"\\ud800"'),
    *(b"\xff" * 8, (2**63).to_bytes(8, "little"), (100).to_bytes(8, "little") + b"{" * 100),
)


SECONDS, MEMORY = 10, 64 << 20  # bytes, in addition to four times the size of the file


def refused(path: Path, read: Callable[[Path], object], data: bytes) -> bool:
    path.write_bytes(data)
    tracemalloc.reset_peak()
    before, started = tracemalloc.get_traced_memory()[0], time.monotonic()
    try:
        read(path)
    except UserError as error:
        check_line(error)
        return True
    finally:
        assert time.monotonic() - started < SECONDS
        assert tracemalloc.get_traced_memory()[1] - before < 4 * len(data) + MEMORY
    return False


@pytest.fixture
def traced_memory() -> Iterator[None]:
    """Traces memory in a thorough run, which takes three times as long."""
    if os.environ.get("ENTROPIX_THOROUGH"):
        tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced_memory")
@pytest.mark.parametrize("name", SURFACES)
def test_each_file_gives_a_result_or_a_one_line_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entropix_jax.report.page.plotly_source", bytes)
    surface, path = SURFACES[name], tmp_path / name
    valid = [*(surface.valid() if callable(surface.valid) else surface.valid)]
    for beside, data in surface.beside.items():
        (tmp_path / beside).write_bytes(data)
    marks = [b""] if path.suffix in (".safetensors", ".gguf", ".model") else [b"", b"\xef\xbb\xbf"]
    assert not any(refused(path, surface.read, m + data) for data in valid for m in marks)
    for data in HOSTILE:
        refused(path, surface.read, data)
    strategies = st.sampled_from(valid).flatmap(damaged_bytes)
    if path.suffix in DAMAGED:
        strategies |= st.sampled_from(valid).flatmap(DAMAGED[path.suffix])
    outcomes = []

    @examples(100)
    @hypothesis.given(strategies)
    def all_of(data: bytes) -> None:
        outcomes.append(refused(path, surface.read, data))

    all_of()
    assert False in outcomes  # some damaged files are still valid
