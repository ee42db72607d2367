"""Damaged and hostile files. Each gives a valid result or a one-line UserError."""

from __future__ import annotations

import base64
import json
import os
import random
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from safetensors.numpy import save

import entropix_jax
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
from entropix_jax.serve.model import ServedModel
from entropix_jax.serve.request import chat_request, choose_method, completion_request
from entropix_jax.serve.responses import Responses
from entropix_jax.serve.schema import Body, Chat, Completion, Score, parse
from entropix_jax.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.gguf_files import FAMILIES, write
from tests.support.models import load_params
from tests.support.mutations import mutate
from tests.support.reports import footer, header, lines_of, run_of
from tests.support.samplers import CALIBRATION, HOST
from tests.support.servers import SLOTS, serve
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
    own = {name: value for name, value in params.own.items() if name != "wrong"}  # NaN: no table
    leaves = jax.tree.leaves(replace(params, own=own))
    assert not any(np.isnan(np.asarray(leaf, np.float64)).any() for leaf in leaves)


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


FILES = Path(__file__).parent / "fuzzing"
BODIES, FOUND = (
    [*map(json.loads, (FILES / name).read_text(encoding="utf-8").splitlines())]
    for name in ("bodies.jsonl", "found.jsonl")
)
KINDS: dict[str, type[Body]] = {
    "completion": Completion,
    "chat": Chat,
    "response": Responses,
    "score": Score,
}


@cache
def served() -> ServedModel:
    return serve(entropix_jax.load("tiny"))


def body_of(name: str, kind: type[Body]) -> Surface:
    """A request's body, up to the rows of the engine."""

    def read(path: Path) -> None:
        body = parse(kind, path.read_bytes())
        common = body.to_chat() if isinstance(body, Responses) else body
        served().check_name(common.model)
        if isinstance(common, Score):
            served().choose_sampler(common.entropix.sampler)
        if isinstance(common, Chat | Completion) and common.rows <= SLOTS:
            choose_method(served(), common, slots=SLOTS, keeps=True)
        if isinstance(common, Chat) and common.rows <= SLOTS:
            chat_request(served(), common)
        if isinstance(common, Completion) and common.rows <= SLOTS:
            completion_request(served(), common)

    return Surface(read, encoded(*(one["body"] for one in BODIES if one["kind"] == name)))


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
    **{f"{name}.json": body_of(name, kind) for name, kind in KINDS.items()},
}


def check_line(error: object) -> None:
    """Checks that an error is one line that is not too long."""
    text = str(error)
    assert len(text.splitlines()) == 1, f"not one line: {text!r}"
    assert len(text) <= 2000, f"a line of {len(text)} characters: {text[:200]!r}"


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


def outcomes(name: str, folder: Path, count: int) -> Iterator[bool]:
    """Yields for valid files, difficult contents, found cases and mutations of a reader whether
    they are refused."""
    surface, path = SURFACES[name], folder / name
    valid = [*(surface.valid() if callable(surface.valid) else surface.valid)]
    for beside, data in surface.beside.items():
        (folder / beside).write_bytes(data)
    takes_mark = path.suffix not in (".safetensors", ".gguf", ".model") and path.stem not in KINDS
    marks = [b"", b"\xef\xbb\xbf"] if takes_mark else [b""]
    assert not any(refused(path, surface.read, m + data) for data in valid for m in marks)
    for data in HOSTILE:
        refused(path, surface.read, data)
    found = [one["text"].encode("latin-1") for one in FOUND if one["name"] == name]
    assert all(refused(path, surface.read, data) for data in found)
    for number in range(count):
        rng = random.Random(f"{name} {number}")
        yield refused(path, surface.read, mutate(rng, name, rng.choice(valid)))


@pytest.mark.usefixtures("traced_memory")
@pytest.mark.parametrize("name", SURFACES)
def test_each_file_gives_a_result_or_a_one_line_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entropix_jax.report.page.plotly_source", bytes)
    found = [*outcomes(name, tmp_path, hypothesis.settings().max_examples)]
    assert False in found  # some mutations are still valid


if __name__ == "__main__":  # python -m tests.test_fuzzing COUNT [NAME ...]
    for reader in sys.argv[2:] or SURFACES:
        with TemporaryDirectory() as folder:
            counts = Counter(outcomes(reader, Path(folder), int(sys.argv[1])))
        print(f"{reader}: {counts[False]} accepted, {counts[True]} refused")
