"""What reads from outside, each with valid inputs to damage and the reader to try them on.

A reader gives a right result or a `UserError` of one line. What else it must hold is asserted here.
"""

import base64
import gzip
import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from verification import mutations
from verification.mutations import Mutator

Reader = Callable[[bytes], object]
_TEXT = "Grüße, 東京 👍🏽\n\n  the the   <|eot_id|> \0 12345 "
_CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 3 and 4? "},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "\u2028 'quoted' \"and\" {{ 1 }}"},
]


@dataclass(frozen=True)
class Surface:
    """One kind of input.

    `prepare` is given an empty folder, and returns valid inputs and their reader.
    """

    name: str
    what: str  # as the table says it
    mutator: Mutator
    prepare: Callable[[Path], tuple[list[bytes], Reader]]


def _tiny() -> Path:
    from entropix_jax.resources import resource_folder

    return resource_folder("weights") / "tiny"


def _raw_config() -> dict[str, Any]:
    """A model of some kilobytes."""
    raw: dict[str, Any] = json.loads((_tiny() / "config.json").read_text(encoding="utf-8"))
    sizes = {"vocab_size": 300, "hidden_size": 8, "intermediate_size": 12, "head_dim": 4}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return raw | sizes | heads


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


# Models.


def _config(folder: Path) -> tuple[list[bytes], Reader]:
    from entropix_jax.config import load_generation_config, load_model_config

    raw = _raw_config()
    plain = {k: v for k, v in raw.items() if k != "rope_scaling"}
    newer = {k: v for k, v in raw.items() if k not in ("rope_scaling", "rope_theta")}
    newer["rope_parameters"] = {**raw["rope_scaling"], "rope_theta": raw["rope_theta"]}
    path = folder / "config.json"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        config = load_model_config(folder)
        assert config.num_heads % config.num_kv_heads == config.head_dim % 2 == 0
        assert all(isinstance(v, int) and v > 0 for v in (config.vocab_size, config.num_layers))
        return hash(config), load_generation_config(folder)

    return [_json(raw), _json(plain), _json(newer)], read


def _generation_config(folder: Path) -> tuple[list[bytes], Reader]:
    from entropix_jax.config import load_generation_config

    path = folder / "generation_config.json"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        ids = load_generation_config(folder).eos_ids
        assert all(type(i) is int and i >= 0 for i in ids)
        return ids

    valid: tuple[Any, ...] = (7, [7, 8], None)
    return [_json({"bos_token_id": 1, "eos_token_id": ids}) for ids in valid], read


def _weights(folder: Path, kinds: Sequence[str]) -> tuple[list[bytes], Any]:
    """Files of the small model in each of the types, and its configuration."""
    import jax
    import numpy as np
    from safetensors.numpy import save

    from entropix_jax.config import parse_model_config
    from entropix_jax.params import param_specs

    config = replace(parse_model_config(_raw_config(), folder), dtype=None, tied_head=False)
    specs = jax.tree.leaves(param_specs(config))
    files = []
    for kind in kinds:
        weights = {s.name: np.full(s.shape, 0.5, np.dtype(kind)) for s in specs}
        files.append(save(weights, {"format": "pt"}))
    return files, config


def _loads(folder: Path, config: Any) -> object:
    import jax

    from entropix_jax.checkpoint import checkpoint_dtype, load_params
    from entropix_jax.params import param_specs

    kind = checkpoint_dtype(folder, config)
    assert kind in ("float32", "bfloat16", "float16")
    params = load_params(folder, config, "float32")
    specs = jax.tree.leaves(param_specs(config))
    for leaf, spec in zip(jax.tree.leaves(params), specs, strict=True):
        assert (leaf.shape, str(leaf.dtype)) == (spec.shape, "float32")
    return params


def _safetensors_header(folder: Path) -> tuple[list[bytes], Reader]:
    files, config = _weights(folder, ("float32", "bfloat16", "float16"))
    path = folder / "model.safetensors"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return _loads(folder, config)

    return files, read


def _safetensors_index(folder: Path) -> tuple[list[bytes], Reader]:
    (file,), config = _weights(folder, ("float32",))
    header, body = mutations.split_safetensors(file)
    header.pop("__metadata__", None)
    shards: list[dict[str, Any]] = [{}, {}]
    bodies = [b"", b""]
    weight_map = {}
    for i, (name, entry) in enumerate(header.items()):
        part = body[slice(*entry["data_offsets"])]
        start = len(bodies[i % 2])
        shards[i % 2][name] = {**entry, "data_offsets": [start, start + len(part)]}
        bodies[i % 2] += part
        weight_map[name] = f"{'ab'[i % 2]}.safetensors"
    for letter, shard, part in zip("ab", shards, bodies, strict=True):
        (folder / f"{letter}.safetensors").write_bytes(
            mutations.joined_safetensors(json.dumps(shard).encode(), part)
        )
    path = folder / "model.safetensors.index.json"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return _loads(folder, config)

    return [_json({"metadata": {"total_size": len(body)}, "weight_map": weight_map})], read


# Tokenizers.


def _uses(folder: Path) -> object:
    """Loads a tokenizer and tries all that a run asks of it."""
    from entropix_jax.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(_TEXT, add_bos=True)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    text = tokenizer.decode([*ids, *range(300), 2**31, 2**40], skip_special=False)
    text.encode()
    tokenizer.token_id("<|eot_id|>")
    return tokenizer.vocab_size, text


def _tokenizer_seeds() -> list[bytes]:
    """The embedded model's in small (byte-level, twice as likely), Llama 2's way, and Unigram."""
    whole = json.loads((_tiny() / "tokenizer.json").read_text(encoding="utf-8"))
    model = whole["model"]
    merges = model["merges"][:12]
    joined = [m if isinstance(m, list) else m.split(" ") for m in merges]
    kept = {p for pair in joined for p in (*pair, "".join(pair))}
    vocab = sorted(model["vocab"], key=model["vocab"].__getitem__)
    vocab = [t for t in vocab if len(t) == 1 or t in kept]
    added = [
        {**token, "id": len(vocab) + i} for i, token in enumerate(whole.get("added_tokens", ()))
    ]
    small = {
        **whole,
        "model": {**model, "vocab": {t: i for i, t in enumerate(vocab)}, "merges": merges},
        "added_tokens": added,
        "post_processor": None,
    }
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "t", "h", "e", "▁t", "▁th"]
    fallback = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(0, "<unk>"), _added(len(pieces), "<s>")],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [len(pieces)], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [["▁", "t"], ["▁t", "h"]],
        },
    }
    unigram = {
        **fallback,
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always",
            "split": True,
        },
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[piece, -1.0 - i / 100] for i, piece in enumerate(pieces)],
            "byte_fallback": False,
        },
    }
    return [_json(small), _json(small), _json(fallback), _json(unigram)]


def _added(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


def _tokenizer_json(folder: Path) -> tuple[list[bytes], Reader]:
    path = folder / "tokenizer.json"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return _uses(folder)

    return _tokenizer_seeds(), read


def _tokenizer_config(folder: Path) -> tuple[list[bytes], Reader]:
    (folder / "tokenizer.json").write_bytes(_tokenizer_seeds()[0])
    raw = json.loads((_tiny() / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = raw.pop("chat_template")
    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "no"}]
    objects = {"bos_token": {"content": raw["bos_token"], "lstrip": False}}
    path = folder / "tokenizer_config.json"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return _uses(folder)

    return [_json({**raw, "chat_template": t}) for t in (template, named, None)] + [
        _json({**raw, **objects})
    ], read


def _tokenizer_model(folder: Path) -> tuple[list[bytes], Reader]:
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", "é".encode(), b"12"]
    lines = [b"%b %d\n" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens)]
    path = folder / "tokenizer.model"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return _uses(folder)

    return [b"".join(lines), b"".join(lines[:256])], read


# Conversations.

_TEMPLATES = (
    """{{ bos_token }}{% for m in messages %}
{% if m['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('no ' + m['role']) }}
{% endif %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    """{%- set ns = namespace(n=0) -%}{%- macro turn(m) -%}{{ m.role.upper() ~ ': ' ~ m.content }}
{%- endmacro -%}{% for m in messages if m.content %}{% set ns.n = ns.n + 1 %}{{ turn(m) }}
{{ loop.index }}/{{ loop.length }} {{ m | tojson(indent=2) }}{% else %}none{% endfor %}
{{ ns.n * 2 }} {{ messages | map(attribute='role') | join(', ') }} {{ strftime_now('%Y') }}""",
    """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content']
+ '<|im_end|>' + '\\n'}}{% endfor %}{% generation %}{{ '%s' % messages[0].content[:3] }}
{% endgeneration %}{{ messages[-1]['content'].split(' ')[0].replace('a', 'b').center(9) }}""",
)


def _chat_template(folder: Path) -> tuple[list[bytes], Reader]:
    from entropix_jax import chat_template
    from entropix_jax.tokenizer import load_tokenizer

    setattr(chat_template, "SECONDS", 0.5)  # noqa: B010 (more is waited for, and shows no more)
    (folder / "tokenizer.json").write_bytes(_tokenizer_seeds()[0])
    path = folder / "chat_template.jinja"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return load_tokenizer(folder).render_chat(_CHAT)

    tiny = json.loads((_tiny() / "tokenizer_config.json").read_text(encoding="utf-8"))
    return [t.encode() for t in (*_TEMPLATES, tiny["chat_template"])], read


def _messages(folder: Path) -> tuple[list[bytes], Reader]:
    from entropix_jax.main import Arguments, _read_prompt
    from entropix_jax.tokenizer import load_tokenizer

    (folder / "tokenizer.json").write_bytes(_tokenizer_seeds()[0])
    (folder / "chat_template.jinja").write_text(_TEMPLATES[1], encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    path = folder / "messages.json"
    arguments = Arguments(messages=str(path))

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return tokenizer.apply_chat(_read_prompt(arguments))

    more = [{**_CHAT[1], "tool_calls": [{"id": 1, "arguments": {"a": [1.5, None]}}]}]
    return [_json(_CHAT), _json(_CHAT[1:2]), _json(more)], read


# Samplers and studies.


def _traced(sampler: Any) -> object:
    """What becomes of a sampler's settings: numbers, all of them."""
    import jax
    import numpy as np

    params = sampler.settings(
        num_layers=4, epsilon=1e-7, encode=lambda text: text.encode("utf-8", "replace")
    )
    assert not any(np.isnan(np.asarray(leaf, np.float64)).any() for leaf in jax.tree.leaves(params))
    return params


def _preset(folder: Path) -> tuple[list[bytes], Reader]:
    from entropix_jax.resources import resource_folder
    from entropix_jax.sampler.presets import load_sampler

    path = folder / "mine.toml"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return _traced(load_sampler(str(path)).with_thresholds({}))

    return [p.read_bytes() for p in sorted(resource_folder("configs").glob("*.toml"))], read


def _calibration(folder: Path) -> tuple[list[bytes], Reader]:
    from entropix_jax.calibration.output import calibration_text
    from entropix_jax.sampler.presets import load_sampler
    from entropix_jax.sampler.sampler import read_thresholds

    path = folder / "calibration.json"
    sampler = load_sampler("entropix")

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return _traced(sampler.with_thresholds(read_thresholds(path), str(path)))

    thresholds = {"h1": 0.334, "h2": 3.8, "u1": 2.15, "u2": 2.344}
    return [calibration_text(thresholds, "some text").encode()], read


def _sweep(folder: Path) -> tuple[list[bytes], Reader]:
    from entropix_jax.resources import resource_folder
    from entropix_jax.studies.sweep import read_sweep

    path = folder / "sweep.toml"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return len(read_sweep(path).settings)

    shipped = sorted((resource_folder("configs") / "ablations").glob("*.toml"))
    random = b"""tasks = ["sums"]
[random]
settings = 4
seed = 0
[random.over]
"base.temperature" = { from = 0.2, to = 2.0, scale = "log" }
"base.top_k" = { from = 1, to = 50 }
"arms.lehv" = ["branch", "explore"]
[settings.no-branch]
"arms.lehv" = "explore"
[settings.greedy]
sampler = "greedy"
"""
    return [p.read_bytes() for p in shipped if p.stem != "ranges"] + [random], read


# Batches.

_RECORDS: tuple[dict[str, Any], ...] = (
    {"prompt": "Once", "id": "a"},
    {"messages": _CHAT, "id": 7, "sampler": "greedy", "max_new_tokens": 5, "seed": 3},
    {"prompt": "Grüße 東京", "note": [1, {"a": None}]},
    {"id": "b"},
)


def _batch_jsonl(folder: Path) -> tuple[list[bytes], Reader]:
    plain = b"".join(json.dumps(record).encode() + b"\n" for record in _RECORDS)
    return [plain, plain[:90] + b"\n"], _batch_reader(folder / "input.jsonl")


def _batch_csv(folder: Path) -> tuple[list[bytes], Reader]:
    seeds = [
        b'id,prompt,seed,max_new_tokens,sampler\na,"Once, ""there""\nwas",1,5,greedy\n,b,,,\n',
        "\ufeffnote;x,prompt\r\n1,Grüße\r\n\r\n2,東京\r\n".encode(),
    ]
    return seeds, _batch_reader(folder / "input.csv")


def _batch_gzip(folder: Path) -> tuple[list[bytes], Reader]:
    plain = b"".join(json.dumps(record).encode() + b"\n" for record in _RECORDS)
    return [gzip.compress(plain, mtime=0)], _batch_reader(folder / "input.jsonl.gz")


def _batch_reader(path: Path) -> Reader:
    from entropix_jax.batches.source import BadRecord, Record, read_records

    def read(data: bytes) -> object:
        path.write_bytes(data)
        ids: set[str] = set()
        for record in read_records(str(path)):
            if isinstance(record, BadRecord):
                assert len(record.error.splitlines()) == 1
                assert len(record.error) < 1000
                continue
            assert type(record) is Record
            assert record.id not in ids
            assert (record.prompt is None) != (record.messages is None)
            ids.add(record.id)
        return ids

    return read


def _results() -> list[dict[str, Any]]:
    from entropix_jax.batches.index import hash_of

    lines = [json.dumps(record).encode() for record in _RECORDS]
    names = ("a", "7", "3", "b")
    done = {
        "text": " there was a cat",
        "finish_reason": "eos",
        "tokens": 3,
        "regimes": {"lelv": 2, "mid": 1},
        "actions": {"sample": 3},
        "retracted": 0,
        "forwards": 3,
        "mean_entropy": 0.5,
        "mean_varentropy": 0.25,
        "token_ids": [1, 2, 3],
        "timings": {"seconds": 0.5},
    }
    return [
        {"id": name, "line": i + 1, "digest": f"{hash_of(line):015x}"}
        | (
            done
            if i < 3
            else {"error": "neither 'prompt' nor 'messages'", "finish_reason": "error"}
        )
        for i, (name, line) in enumerate(zip(names, lines, strict=True))
    ]


def _batch_output(folder: Path) -> tuple[list[bytes], Reader]:
    from entropix_jax.batches.lines import lines_of
    from entropix_jax.errors import UserError

    page = _page(folder, "out.jsonl")
    _write_sidecar(folder)

    def read(data: bytes) -> object:
        for whole in (False, True):
            try:
                for line in lines_of(io.BytesIO(data), "out.jsonl", whole=whole):
                    assert line.raw.endswith(b"\n")
            except UserError as error:
                check_line(error)
        return page(data)

    written = [json.dumps(result).encode() + b"\n" for result in _results()]
    return [b"".join(written), b"".join(written) + b'{"id": "to'], read


def _write_sidecar(folder: Path) -> bytes:
    identity = {
        "model": "weights/tiny",
        "input": "in.jsonl",
        "seed": 0,
        "max_new_tokens": 5,
        "context": 2048,
        "version": "0.1.0",
        "sampler": {"base.temperature": 1.0, "regimes.lelv": ["entropy < 0.5"]},
    }
    lines = [json.dumps(record).encode() + b"\n" for record in _RECORDS]
    (folder / "in.jsonl").write_bytes(b"".join(lines))
    content = {
        "format_version": 1,
        "identity": identity,
        "samplers": {"greedy": "0123456789abcdef"},
        "earlier": [None, identity],
    }
    (folder / "out.jsonl.run.json").write_bytes(_json(content))
    return _json(content)


def _sidecar(folder: Path) -> tuple[list[bytes], Reader]:
    from entropix_jax.batches.identity import agreed, parse_sidecar

    seed = _write_sidecar(folder)
    path = folder / "out.jsonl.run.json"
    page = _page(folder, "out.jsonl")
    output = b"".join(json.dumps(result).encode() + b"\n" for result in _results())
    own: Mapping[str, Any] = json.loads(seed)["identity"]

    def read(data: bytes) -> object:
        path.write_bytes(data)
        found = agreed("out.jsonl", parse_sidecar(data, str(path)), own, empty=False, mix=True)
        json.dumps(found)
        return page(output)

    return [seed, _json({"identity": dict(own)})], read


# Pages.


def _page(
    folder: Path, name: str, *others: Path, of: Path | None = None, compare: bool = False
) -> Reader:
    """The page of a file, or `of` what it belongs to. The plotting library, the same in all pages,
    is left out."""
    from entropix_jax.report import page
    from entropix_jax.report.kinds import page_of

    setattr(page, "plotly_source", bytes)  # noqa: B010
    path = folder / name

    def read(data: bytes) -> object:
        path.write_bytes(data)
        made = page_of([of or path, *others], compare=compare)
        assert made.startswith("<!")
        assert "</html>" in made[-100:]
        return len(made)

    return read


def _trace_lines(rows: int = 2) -> bytes:
    """A trace of all that one may hold."""
    from entropix_jax.names import REGIMES, TRACE_FORMAT
    from entropix_jax.sampler.presets import load_sampler
    from entropix_jax.trace import TokenRecord

    numbers = (
        "logprob entropy varentropy sequence_varentropy attn_entropy attn_entropy_norm"
        " attn_varentropy agreement agreement_published interaction_strength confidence temperature"
        " top_p min_p"
    ).split()
    records: list[dict[str, Any]] = [
        {
            "type": "header",
            "format_version": TRACE_FORMAT,
            "model": "weights/tiny",
            "sampler": "entropix",
            "sampler_parameters": dict(load_sampler("entropix").values),
            "seed": 0,
            "versions": {"entropix_jax": "0.1.0", "jax": "0.10.2"},
            "backend": "cpu",
            "prompt": "Once",
            "prompt_tokens": [1, 2, 3],
        }
    ]
    for row in range(rows):
        for i in range(4):
            token = TokenRecord(
                row=row,
                position=3 + i,
                token_id=i,
                text=f" word{i}",
                regime=REGIMES[i],
                action="branch" if i == 2 else "sample",
                top_k=27,
                forwards=i,
                loop=False,
                top=[(7, " word", 0.5)],
                layers=[[0.5, 1.5]],
                branches=[{"tokens": [5], "text": " a", "score": -0.5, "chosen": True}]
                if i == 2
                else None,
                ambiguous=False if i == 2 else None,
                **dict.fromkeys(numbers, 0.5),
            )
            records.append(token.to_json())
            if i == 3:
                records.insert(-1, token.to_json(retracted=True))
    ended = {"text": "", "finish_reason": "length", "tokens": 4, "retracted": 1, "forwards": 9}
    records.append(
        {
            "type": "footer",
            "rows": [{"row": row, **ended} for row in range(rows)],
            "timings": {"first_token": 1.0, "total": 3.0},
        }
    )
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _trace(folder: Path) -> tuple[list[bytes], Reader]:
    whole = _trace_lines()
    cut = whole[: whole.rindex(b'{"type": "footer"')]
    return [whole, _trace_lines(1), cut, cut[:-40]], _page(folder, "trace.jsonl")


def _comparison(folder: Path) -> tuple[list[bytes], Reader]:
    other = folder / "other.jsonl"
    other.write_bytes(_trace_lines())
    return [_trace_lines(), _trace_lines(1)], _page(folder, "trace.jsonl", other)


def _samples(folder: Path) -> tuple[list[bytes], Reader]:
    return [_trace_lines(), _trace_lines(3)], _page(folder, "trace.jsonl", compare=True)


def _study(name: str) -> Callable[[Path], tuple[list[bytes], Reader]]:
    """One of the files of a study; the others are as they should be."""

    def prepare(folder: Path) -> tuple[list[bytes], Reader]:
        from entropix_jax.resources import resource_folder

        whole = resource_folder("configs") / "ablations" / "study"
        found = json.loads((whole / "findings.json").read_text(encoding="utf-8"))
        about = json.loads((whole / "study.json").read_text(encoding="utf-8"))
        found["settings"], found["items"] = found["settings"][:2], found["items"][:4]
        names = [one["name"] for one in found["settings"]]
        for one in found["settings"]:
            for field in ("scores", "forwards"):
                one[field] = one[field][:4]
        for field in ("predictors", "reliability", "truth", "tuned"):
            found[field] = found[field][:2]
        about["settings"] = {name: about["settings"][name] for name in names}
        header = (
            "task,item,setting,seed,score,answer,expected,finish_reason,error,tokens,forwards,text"
        )
        rows = [
            f'{item["task"]},"{item["item"]}",{name},0,1.0,7,7,eos,,3,5,"a ""text"""'
            for item in found["items"]
            for name in names
        ]
        files = {
            "findings.json": _json(found),
            "study.json": _json(about),
            "results.csv": "\n".join([header, *rows, ""]).encode(),
        }
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return [files[name]], _page(folder, name, of=folder)

    return prepare


def check_line(error: Exception) -> None:
    """What a user is told is one line that is not too long."""
    text = str(error)
    assert len(text.splitlines()) == 1, f"not one line: {text!r}"
    assert len(text) <= 2000, f"a line of {len(text)} characters: {text[:200]!r}"


SURFACES = {
    surface.name: surface
    for surface in (
        Surface("config", "`config.json`", mutations.json_like, _config),
        Surface(
            "generation-config",
            "`generation_config.json`",
            mutations.json_like,
            _generation_config,
        ),
        Surface(
            "safetensors-header",
            "headers of safetensors files",
            mutations.safetensors_like,
            _safetensors_header,
        ),
        Surface(
            "safetensors-bytes",
            "bytes of safetensors files",
            mutations.bytewise,
            _safetensors_header,
        ),
        Surface("safetensors-index", "indices of shards", mutations.json_like, _safetensors_index),
        Surface("tokenizer", "`tokenizer.json`", mutations.json_like, _tokenizer_json),
        Surface(
            "tokenizer-config", "`tokenizer_config.json`", mutations.json_like, _tokenizer_config
        ),
        Surface("tokenizer-model", "`tokenizer.model`", mutations.ranks_like, _tokenizer_model),
        Surface("chat-template", "chat templates", mutations.jinja_like, _chat_template),
        Surface("messages", "files of messages", mutations.json_like, _messages),
        Surface("preset", "sampler files", mutations.toml_like, _preset),
        Surface("calibration", "`calibration.json`", mutations.json_like, _calibration),
        Surface("sweep", "sweep files", mutations.toml_like, _sweep),
        Surface("batch-jsonl", "batches as JSON Lines", mutations.json_lines, _batch_jsonl),
        Surface("batch-csv", "batches as CSV", mutations.csv_like, _batch_csv),
        Surface("batch-gzip", "compressed batches", mutations.bytewise, _batch_gzip),
        Surface("batch-output", "outputs of batches", mutations.json_lines, _batch_output),
        Surface("batch-run", "descriptions of batches", mutations.json_like, _sidecar),
        Surface("trace", "traces", mutations.json_lines, _trace),
        Surface("trace-compare", "traces side by side", mutations.json_lines, _comparison),
        Surface("trace-samples", "samples side by side", mutations.json_lines, _samples),
        Surface(
            "study-findings", "findings of studies", mutations.json_like, _study("findings.json")
        ),
        Surface(
            "study-about", "descriptions of studies", mutations.json_like, _study("study.json")
        ),
        Surface("study-results", "tables of studies", mutations.csv_like, _study("results.csv")),
    )
}


def inputs_of(surface: Surface, seeds: Sequence[bytes], seed: int, number: int) -> bytes:
    """An input: the same for the same surface, seed and number. The first are the valid ones."""
    if number < len(seeds):
        return seeds[number]
    return surface.mutator(Random(f"{surface.name} {seed} {number}"), seeds)


def scratch(parent: Path, name: str) -> Path:
    """An empty folder."""
    folder = parent / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
