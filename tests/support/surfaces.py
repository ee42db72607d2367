"""Every kind of file that is read from outside: valid examples of it, and its reader."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from entropix_jax.batch.records import BadRecord, read_records
from entropix_jax.batch.sidecar import check_same_run, read_sidecar
from entropix_jax.cli.generate import Arguments, _read_prompt
from entropix_jax.host.resources import resource_folder
from entropix_jax.lab.sweep import read_sweep
from entropix_jax.model.checkpoint import load_params
from entropix_jax.model.config import load_generation_config, load_model_config, parse_model_config
from entropix_jax.model.params import param_specs
from entropix_jax.report.page import comparison_page, run_page
from entropix_jax.sampler.calibration import read_calibration
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.text.tokenizer import load_tokenizer
from tests.support.reports import footer, header, lines_of, run_of
from tests.support.samplers import CALIBRATION, token_texts
from tests.support.tokenizers import byte_fallback

Reader = Callable[[bytes], object]


FORMATS = {".json": "json", ".jsonl": "lines", ".toml": "toml"}  # all else: bytes


@dataclass(frozen=True)
class Surface:
    """A kind of file. What `read` finds at its path is right, or refused with a UserError."""

    name: str
    read: Callable[[Path], object]
    valid: list[bytes]
    beside: Mapping[str, bytes] | None = None  # other files of its folder

    @property
    def format(self) -> str:
        return FORMATS.get(Path(self.name).suffix, "bytes")

    def prepare(self, folder: Path) -> tuple[list[bytes], Reader]:
        """In an empty folder: valid files, and what reads one."""
        for name, data in (self.beside or {}).items():
            (folder / name).write_bytes(data)
        path = folder / self.name

        def read(data: bytes) -> object:
            path.write_bytes(data)
            return self.read(path)

        return self.valid, read


def encoded(*values: Any) -> list[bytes]:
    return [json.dumps(value, indent=1).encode() for value in values]


def check_line(error: object) -> None:
    """A user is told one line that is not too long."""
    text = str(error)
    assert len(text.splitlines()) == 1, f"not one line: {text!r}"
    assert len(text) <= 2000, f"a line of {len(text)} characters: {text[:200]!r}"


# Models

TINY = resource_folder("weights") / "tiny"
RAW: dict[str, Any] = {
    **json.loads((TINY / "config.json").read_text(encoding="utf-8")),
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 12,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ROPE = {"rope_parameters": {**RAW["rope_scaling"], "rope_theta": RAW["rope_theta"]}}
NEWER = {k: v for k, v in RAW.items() if k not in ("rope_scaling", "rope_theta")} | ROPE
CONFIG = replace(parse_model_config(RAW, TINY), dtype=None, tied_head=False)
SPECS = jax.tree.leaves(param_specs(CONFIG))
TENSORS = {spec.name: np.full(spec.shape, 0.5, np.float32) for spec in SPECS}
HALVES = {name: tensor.astype(np.float16) for name, tensor in TENSORS.items()}
SHARDS = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(TENSORS)}


def read_config(path: Path) -> object:
    config = load_model_config(path.parent)
    assert config.num_heads % config.num_kv_heads == config.head_dim % 2 == 0
    return hash(config)


def read_end_tokens(path: Path) -> None:
    assert all(type(i) is int and i >= 0 for i in load_generation_config(path.parent).eos_ids)


def read_weights(path: Path) -> None:
    params = load_params(path.parent, CONFIG, "float32")
    for leaf, spec in zip(jax.tree.leaves(params), SPECS, strict=True):
        assert (leaf.shape, str(leaf.dtype)) == (spec.shape, "float32")


# Tokenizers and chats

TEXT = "Grüße, 東京 👍🏽\n\n  the the   <|eot_id|> \0 12345 "
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 3 and 4? "},
    {"role": "user", "content": "\u2028 'quoted' \"and\" {{ 1 }}"},
]
CALLS = [{**CHAT[1], "tool_calls": [{"id": 1, "arguments": {"a": [1.5, None]}}]}]
TEMPLATES = (
    """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no') }}
{% endif %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}""",
    """{%- set ns = namespace(n=0) -%}{% for m in messages if m.content %}{% set ns.n = ns.n + 1 %}
{{ m | tojson(indent=2) }}{% else %}none{% endfor %}{{ ns.n * 2 }} {{ strftime_now('%Y') }}""",
)
NAMED_TEMPLATES = [
    {"name": "default", "template": TEMPLATES[0]},
    {"name": "tool_use", "template": "no"},
]
RAW_TOKENIZER = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
TOKENIZER_CONFIGS = [
    {**RAW_TOKENIZER, "chat_template": template}
    for template in (TEMPLATES[0], NAMED_TEMPLATES, None)
]
BYTES = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", "é".encode()]
RANKS = b"".join(b"%b %d\n" % (base64.b64encode(token), i) for i, token in enumerate(BYTES))
FALLBACK = byte_fallback().to_str().encode()


def byte_level() -> Tokenizer:
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    level = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, [("t", "h"), ("th", "e")]))
    level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    level.decoder = decoders.ByteLevel()
    level.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    return level


LEVEL = {"tokenizer.json": byte_level().to_str().encode()}


def read_tokenizer(path: Path) -> None:
    tokenizer = load_tokenizer(path.parent)
    ids = tokenizer.encode(TEXT, add_bos=True)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    tokenizer.decode([*ids, *range(300), 2**31, 2**40], skip_special=False).encode()
    tokenizer.token_id("<|eot_id|>")


def read_template(path: Path) -> object:
    return load_tokenizer(path.parent).render_chat(CHAT)


def read_chat(path: Path) -> object:
    return load_tokenizer(path.parent).apply_chat(_read_prompt(Arguments(messages=str(path))))


# Samplers and studies

CONFIGS = resource_folder("configs")
PRESETS = [path.read_bytes() for path in sorted(CONFIGS.glob("*.toml"))]
SHAPE = {"layers": 2, "width": 8, "heads": 2}
CALIBRATIONS = [
    replace(CALIBRATION, model=SHAPE).to_text().encode(),
    *encoded({**CALIBRATION.to_json(), "model": SHAPE, "source": "", "tokens": 0}),
    (resource_folder("weights") / "generic" / "calibration.json").read_bytes(),
]
SWEEPS = [
    *(path.read_bytes() for path in sorted(CONFIGS.glob("ablations/[!r]*.toml"))),
    b"""tasks = ["sums"]
[random]
settings = 4
seed = 0
[random.over]
"base.temperature" = { from = 0.2, to = 2.0, scale = "log" }
"base.top_k" = { from = 1, to = 50 }
"arms.lehv" = ["branch", "explore"]
[settings.greedy]
sampler = "greedy"
""",
]


def check_settings(sampler: Sampler) -> None:
    """None of the sampler's parameters is NaN."""
    params = sampler.settings(
        num_layers=4,
        epsilon=1e-7,
        encode=lambda text: text.encode("utf-8", "replace"),
        token_texts=token_texts,
        vocab_size=300,
    )
    assert not any(np.isnan(np.asarray(leaf, np.float64)).any() for leaf in jax.tree.leaves(params))


def read_preset(path: Path) -> None:
    check_settings(load_sampler(str(path)).resolve(CALIBRATION, "made up"))


def read_tables(path: Path) -> None:
    calibration = read_calibration(path)
    for preset in ("entropix", "document-002", "document-004"):
        check_settings(load_sampler(preset).resolve(calibration, str(path)))


# Batches

RECORDS = (
    {"prompt": "Once", "id": "a"},
    {"messages": CHAT, "id": 7, "sampler": "greedy", "max_new_tokens": 5, "seed": 3},
    {"prompt": "Grüße 東京", "note": [1, {"a": None}]},
    {"id": "b"},
)
LINES = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
CSV = b'id,prompt,seed,max_new_tokens,sampler\na,"Once, ""there""\nwas",1,5,greedy\n,b,,,\n'
RUN = {
    "model": "weights/tiny",
    "input": "in.jsonl",
    "seed": 0,
    "max_new_tokens": 5,
    "context": 2048,
    "version": "0.1.0",
    "sampler": {"base.temperature": 1.0},
}
SIDECAR = {"format_version": 1, "identity": RUN, "samplers": {"own.toml": "a"}}


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
    return check_same_run(output, read_sidecar(output), RUN, mix=True)


# Pages


def trace_of(rows: int) -> bytes:
    records = [record for row in range(rows) for record in run_of(9, row)]
    return "".join(lines_of([header(), *records, footer(records)])).encode()


TRACES = [trace_of(2), trace_of(1), trace_of(2)[: trace_of(2).rindex(b"{") - 40]]


def read_page(path: Path) -> None:
    check_page(run_page(path))


def read_two(path: Path) -> None:
    check_page(comparison_page([path, path.parent / "other.jsonl"]))


def check_page(page: str) -> None:
    assert page.startswith("<!")
    assert "</html>" in page[-100:]


ALL = (
    Surface("config.json", read_config, encoded(RAW, NEWER)),
    Surface(
        "generation_config.json",
        read_end_tokens,
        encoded({"eos_token_id": 7}, {"eos_token_id": [7, 8]}, {"eos_token_id": None}),
    ),
    Surface("model.safetensors", read_weights, [save(TENSORS), save(HALVES)]),
    Surface(
        "model.safetensors.index.json",
        read_weights,
        encoded({"metadata": {"total_size": 1}, "weight_map": SHARDS}),
        {f: save({k: v for k, v in TENSORS.items() if SHARDS[k] == f}) for f in SHARDS.values()},
    ),
    Surface("tokenizer.json", read_tokenizer, [*LEVEL.values(), FALLBACK]),
    Surface("tokenizer_config.json", read_tokenizer, encoded(*TOKENIZER_CONFIGS), LEVEL),
    Surface("tokenizer.model", read_tokenizer, [RANKS]),
    Surface("chat_template.jinja", read_template, [t.encode() for t in TEMPLATES], LEVEL),
    Surface(
        "messages.json",
        read_chat,
        encoded(CHAT, CALLS),
        {**LEVEL, "chat_template.jinja": TEMPLATES[1].encode()},
    ),
    Surface("preset.toml", read_preset, PRESETS),
    Surface("calibration.json", read_tables, CALIBRATIONS),
    Surface("sweep.toml", partial(read_sweep, data="data"), SWEEPS),
    Surface("batch.jsonl", read_batch, [LINES]),
    Surface("batch.csv", read_batch, [CSV]),
    Surface("batch.jsonl.run.json", read_run, encoded(SIDECAR, {"identity": RUN})),
    Surface("trace.jsonl", read_page, TRACES),
    Surface("two_traces.jsonl", read_two, TRACES, {"other.jsonl": TRACES[0]}),
)
SURFACES = {surface.name: surface for surface in ALL}
