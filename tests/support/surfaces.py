"""Every kind of file that is read from outside: valid examples of it, and its reader."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from entropix_jax.batch.records import BadRecord, read_records
from entropix_jax.batch.sidecar import check_same_run, read_sidecar
from entropix_jax.cli.generate import Arguments, _read_prompt
from entropix_jax.engine.trace import BranchRecord, TokenRecord
from entropix_jax.host.resources import resource_folder
from entropix_jax.lab.sweep import read_sweep
from entropix_jax.model.checkpoint import load_params
from entropix_jax.model.config import load_generation_config, load_model_config, parse_model_config
from entropix_jax.model.params import param_specs
from entropix_jax.names import REGIMES, TRACE_FORMAT
from entropix_jax.report.page import comparison_page, run_page
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler, read_thresholds
from entropix_jax.sampler.thresholds import calibration_text
from entropix_jax.text.tokenizer import load_tokenizer

Reader = Callable[[bytes], object]
Prepare = Callable[[Path], tuple[list[bytes], Reader]]

TINY = resource_folder("weights") / "tiny"
TEXT = "Grüße, 東京 👍🏽\n\n  the the   <|eot_id|> \0 12345 "
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 3 and 4? "},
    {"role": "user", "content": "\u2028 'quoted' \"and\" {{ 1 }}"},
]
RECORDS: tuple[dict[str, Any], ...] = (
    {"prompt": "Once", "id": "a"},
    {"messages": CHAT, "id": 7, "sampler": "greedy", "max_new_tokens": 5, "seed": 3},
    {"prompt": "Grüße 東京", "note": [1, {"a": None}]},
    {"id": "b"},
)
TEMPLATES = (
    """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no') }}
{% endif %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}""",
    """{%- set ns = namespace(n=0) -%}{% for m in messages if m.content %}{% set ns.n = ns.n + 1 %}
{{ m | tojson(indent=2) }}{% else %}none{% endfor %}{{ ns.n * 2 }} {{ strftime_now('%Y') }}""",
)


@dataclass(frozen=True)
class Surface:
    """`prepare` takes an empty folder and gives valid files and their reader: what is read is
    right, or refused with a UserError."""

    format: str  # "json", "lines" of JSON, "toml" or "bytes"
    prepare: Prepare


def encoded(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def lines(values: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def into(path: Path, read: Callable[[], object]) -> Reader:
    """A reader of a file: `read` finds it at `path`."""

    def written(data: bytes) -> object:
        path.write_bytes(data)
        return read()

    return written


# Models.


def _raw_config() -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    sizes = {"vocab_size": 300, "hidden_size": 8, "intermediate_size": 12, "head_dim": 4}
    return (
        raw | sizes | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    )


def _config(folder: Path) -> tuple[list[bytes], Reader]:
    raw = _raw_config()
    newer = {k: v for k, v in raw.items() if k not in ("rope_scaling", "rope_theta")}
    newer["rope_parameters"] = {**raw["rope_scaling"], "rope_theta": raw["rope_theta"]}

    def read() -> object:
        config = load_model_config(folder)
        assert config.num_heads % config.num_kv_heads == config.head_dim % 2 == 0
        return hash(config), load_generation_config(folder)

    return [encoded(raw), encoded(newer)], into(folder / "config.json", read)


def _generation_config(folder: Path) -> tuple[list[bytes], Reader]:
    def read() -> object:
        ids = load_generation_config(folder).eos_ids
        assert all(type(i) is int and i >= 0 for i in ids)
        return ids

    valid = [{"bos_token_id": 1, "eos_token_id": ids} for ids in (7, [7, 8], None)]
    return list(map(encoded, valid)), into(folder / "generation_config.json", read)


def _weights(folder: Path) -> tuple[dict[str, np.ndarray], Callable[[], object]]:
    """The tensors of a small model, and what loads them from a folder."""
    config = replace(parse_model_config(_raw_config(), folder), dtype=None, tied_head=False)
    specs = jax.tree.leaves(param_specs(config))

    def load() -> object:
        params = load_params(folder, config, "float32")
        for leaf, spec in zip(jax.tree.leaves(params), specs, strict=True):
            assert (leaf.shape, str(leaf.dtype)) == (spec.shape, "float32")
        return params

    return {s.name: np.full(s.shape, 0.5, np.float32) for s in specs}, load


def _safetensors(folder: Path) -> tuple[list[bytes], Reader]:
    tensors, load = _weights(folder)
    files = [
        save({k: v.astype(kind) for k, v in tensors.items()}, {"format": "pt"})
        for kind in ("float32", "float16")
    ]
    return files, into(folder / "model.safetensors", load)


def _safetensors_header(folder: Path) -> tuple[list[bytes], Reader]:
    """The JSON of the header alone, whose length is always right."""
    (file, *_), read = _safetensors(folder)
    end = 8 + int.from_bytes(file[:8], "little")

    def joined(header: bytes) -> object:
        return read(len(header).to_bytes(8, "little") + header + file[end:])

    return [file[8:end]], joined


def _safetensors_index(folder: Path) -> tuple[list[bytes], Reader]:
    tensors, load = _weights(folder)
    names = list(tensors)
    for letter, some in (("a", names[::2]), ("b", names[1::2])):
        (folder / f"{letter}.safetensors").write_bytes(save({name: tensors[name] for name in some}))
    shards = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(names)}
    index = encoded({"metadata": {"total_size": 1}, "weight_map": shards})
    return [index], into(folder / "model.safetensors.index.json", load)


# Tokenizers.


def _tokenizers() -> list[bytes]:
    """Byte-level BPE, BPE with byte fallback as Llama 2 has it, and Unigram."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    level = Tokenizer(models.BPE({s: i for i, s in enumerate(symbols)}, [("t", "h"), ("th", "e")]))
    level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    level.decoder = decoders.ByteLevel()
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "▁t", "▁th"]
    merges = [("▁", "t"), ("▁t", "h")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    fallback = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    fallback.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fallback.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    unigram = Tokenizer(models.Unigram([(p, -1.0 - i / 100) for i, p in enumerate(pieces)], 0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    for tokenizer in (level, fallback, unigram):
        tokenizer.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    return [t.to_str().encode() for t in (level, fallback, unigram)]


def _tokenizer_files(name: str, *valid: bytes) -> Prepare:
    """A file of a tokenizer's folder; where it is another than `tokenizer.json`, beside that."""

    def prepare(folder: Path) -> tuple[list[bytes], Reader]:
        if name == "tokenizer_config.json":
            (folder / "tokenizer.json").write_bytes(_tokenizers()[0])

        def read() -> object:
            tokenizer = load_tokenizer(folder)
            ids = tokenizer.encode(TEXT, add_bos=True)
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
            text = tokenizer.decode([*ids, *range(300), 2**31, 2**40], skip_special=False)
            return tokenizer.token_id("<|eot_id|>"), text.encode()

        return list(valid), into(folder / name, read)

    return prepare


def _tokenizer_configs() -> list[bytes]:
    raw = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = [{"name": "default", "template": TEMPLATES[0]}, {"name": "tool_use", "template": "no"}]
    return [encoded({**raw, "chat_template": t}) for t in (TEMPLATES[0], named, None)] + [
        encoded({**raw, "bos_token": {"content": raw["bos_token"], "lstrip": False}})
    ]


def _ranks() -> bytes:
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", "é".encode()]
    return b"".join(b"%b %d\n" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens))


def _chat_template(folder: Path) -> tuple[list[bytes], Reader]:
    (folder / "tokenizer.json").write_bytes(_tokenizers()[0])

    def read() -> object:
        return load_tokenizer(folder).render_chat(CHAT)

    return [t.encode() for t in TEMPLATES], into(folder / "chat_template.jinja", read)


def _messages(folder: Path) -> tuple[list[bytes], Reader]:
    (folder / "tokenizer.json").write_bytes(_tokenizers()[0])
    (folder / "chat_template.jinja").write_text(TEMPLATES[1], encoding="utf-8")
    tokenizer, path = load_tokenizer(folder), folder / "messages.json"
    more = [{**CHAT[1], "tool_calls": [{"id": 1, "arguments": {"a": [1.5, None]}}]}]

    def read() -> object:
        return tokenizer.apply_chat(_read_prompt(Arguments(messages=str(path))))

    return [encoded(CHAT), encoded(more)], into(path, read)


# Samplers and studies.


def _traced(sampler: Sampler) -> object:
    """The sampler's parameters, none of which is NaN."""
    params = sampler.settings(
        num_layers=4, epsilon=1e-7, encode=lambda text: text.encode("utf-8", "replace")
    )
    assert not any(np.isnan(np.asarray(leaf, np.float64)).any() for leaf in jax.tree.leaves(params))
    return params


def _preset(folder: Path) -> tuple[list[bytes], Reader]:
    def read() -> object:
        return _traced(load_sampler(str(folder / "mine.toml")).with_thresholds({}))

    presets = sorted(resource_folder("configs").glob("*.toml"))
    return [preset.read_bytes() for preset in presets], into(folder / "mine.toml", read)


def _calibration(folder: Path) -> tuple[list[bytes], Reader]:
    path, sampler = folder / "calibration.json", load_sampler("entropix")

    def read() -> object:
        return _traced(sampler.with_thresholds(read_thresholds(path), str(path)))

    thresholds = {"h1": 0.334, "h2": 3.8, "u1": 2.15, "u2": 2.344}
    return [calibration_text(thresholds, "some text").encode()], into(path, read)


def _sweep(folder: Path) -> tuple[list[bytes], Reader]:
    def read() -> object:
        return len(read_sweep(folder / "sweep.toml").settings)

    shipped = sorted((resource_folder("configs") / "ablations").glob("*.toml"))
    drawn = b"""tasks = ["sums"]
[random]
settings = 4
seed = 0
[random.over]
"base.temperature" = { from = 0.2, to = 2.0, scale = "log" }
"base.top_k" = { from = 1, to = 50 }
"arms.lehv" = ["branch", "explore"]
[settings.greedy]
sampler = "greedy"
"""
    seeds = [path.read_bytes() for path in shipped if path.stem != "ranges"]
    return [*seeds, drawn], into(folder / "sweep.toml", read)


# Batches.


def _batch(name: str, *valid: bytes) -> Prepare:
    def prepare(folder: Path) -> tuple[list[bytes], Reader]:
        def read() -> object:
            ids: set[str] = set()
            for record in read_records(str(folder / name)):
                if isinstance(record, BadRecord):
                    check_line(record.error)
                    continue
                assert record.id not in ids
                assert (record.prompt is None) != (record.messages is None)
                ids.add(record.id)
            return ids

        return list(valid), into(folder / name, read)

    return prepare


CSV = b'id,prompt,seed,max_new_tokens,sampler\na,"Once, ""there""\nwas",1,5,greedy\n,b,,,\n'


def _batch_run(folder: Path) -> tuple[list[bytes], Reader]:
    own = {
        "model": "weights/tiny",
        "input": "in.jsonl",
        "seed": 0,
        "max_new_tokens": 5,
        "context": 2048,
        "version": "0.1.0",
        "sampler": {"base.temperature": 1.0},
    }
    output = str(folder / "out.jsonl")

    def read() -> object:
        return check_same_run(output, read_sidecar(output), own, mix=True)

    content = {"format_version": 1, "identity": own, "samplers": {"own.toml": "a"}}
    return [encoded(content), encoded({"identity": own})], into(Path(f"{output}.run.json"), read)


# Pages.


def _page(folder: Path, make: Callable[[Path], str]) -> Reader:
    def read() -> object:
        made = make(folder / "trace.jsonl")
        assert made.startswith("<!")
        assert "</html>" in made[-100:]
        return len(made)

    return into(folder / "trace.jsonl", read)


def trace(rows: int) -> bytes:
    """A trace with all that one may hold."""
    numbers = (
        "logprob entropy varentropy sequence_varentropy attn_entropy attn_entropy_norm"
        " attn_varentropy agreement agreement_published interaction_strength confidence temperature"
        " top_p min_p"
    ).split()
    header = {
        "type": "header",
        "format_version": TRACE_FORMAT,
        "model": "weights/tiny",
        "seed": 0,
        "sampler": "entropix",
        "sampler_parameters": dict(load_sampler("entropix").values),
        "versions": {"jax": "0.10.2"},
        "backend": "cpu",
        "prompt": "Once",
        "prompt_tokens": [1, 2, 3],
    }
    records: list[dict[str, Any]] = [header]
    for row in range(rows):
        for i in range(4):
            branched = i == 2
            rollouts = [BranchRecord([5], " a", -0.5, chosen=True)]
            fields: dict[str, Any] = {
                "row": row,
                "position": 3 + i,
                "token_id": i,
                "text": f" word{i}",
                "regime": REGIMES[i],
                "action": "branch" if branched else "sample",
                "top_k": 27,
                "forwards": i,
                "loop": False,
                "top": [(7, " word", 0.5)],
                "layers": [[0.5, 1.5]],
                "branches": rollouts if branched else None,
                "ambiguous": False if branched else None,
                **dict.fromkeys(numbers, 0.5),
            }
            token = TokenRecord(**fields)
            if i == 3:
                records.append(token.to_json(retracted=True))
            records.append(token.to_json())
    ended = {"text": "", "finish_reason": "length", "tokens": 4, "retracted": 1, "forwards": 9}
    told = [{"row": row, **ended} for row in range(rows)]
    footer = {"type": "footer", "rows": told, "timings": {"first_token": 1.0, "total": 3.0}}
    return lines([*records, footer])


def _trace(folder: Path) -> tuple[list[bytes], Reader]:
    whole = trace(2)
    return [whole, trace(1), whole[: whole.rindex(b"{") - 40]], _page(folder, run_page)


def _comparison(folder: Path) -> tuple[list[bytes], Reader]:
    (folder / "other.jsonl").write_bytes(trace(2))
    return [trace(2), trace(1)], _page(
        folder, lambda path: comparison_page([path, folder / "other.jsonl"])
    )


def _samples(folder: Path) -> tuple[list[bytes], Reader]:
    return [trace(2), trace(3)], _page(folder, lambda path: comparison_page([path]))


def check_line(error: object) -> None:
    """A user is told one line that is not too long."""
    text = str(error)
    assert len(text.splitlines()) == 1, f"not one line: {text!r}"
    assert len(text) <= 2000, f"a line of {len(text)} characters: {text[:200]!r}"


SURFACES = {
    "config": Surface("json", _config),
    "generation-config": Surface("json", _generation_config),
    "safetensors": Surface("bytes", _safetensors),
    "safetensors-header": Surface("json", _safetensors_header),
    "safetensors-index": Surface("json", _safetensors_index),
    "tokenizer": Surface("json", _tokenizer_files("tokenizer.json", *_tokenizers())),
    "tokenizer-config": Surface(
        "json", _tokenizer_files("tokenizer_config.json", *_tokenizer_configs())
    ),
    "tokenizer-model": Surface("bytes", _tokenizer_files("tokenizer.model", _ranks())),
    "chat-template": Surface("bytes", _chat_template),
    "messages": Surface("json", _messages),
    "preset": Surface("toml", _preset),
    "calibration": Surface("json", _calibration),
    "sweep": Surface("toml", _sweep),
    "batch-jsonl": Surface("lines", _batch("input.jsonl", lines(RECORDS))),
    "batch-csv": Surface("bytes", _batch("input.csv", CSV)),
    "batch-gzip": Surface("bytes", _batch("input.jsonl.gz", gzip.compress(lines(RECORDS)))),
    "batch-run": Surface("json", _batch_run),
    "trace": Surface("lines", _trace),
    "trace-compare": Surface("lines", _comparison),
    "trace-samples": Surface("lines", _samples),
}
