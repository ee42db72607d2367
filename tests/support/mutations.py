"""Seeded structured mutations of files: bytes, JSON, lines, TOML, GGUF and safetensors."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf

# JSON that Python's writer never writes; each replaces a placeholder. `@` repeats a key.
RAW = (
    *("NaN", "Infinity", "1e999", "-0.0", "1e-400", "9" * 5000, "01", "'a'", ""),
    *("[" * 500 + "]" * 500, "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, '{"a": 1, "a": 2}'),
    *('"\\ud800"', '"\\u0000"'),
)
VALUES: tuple[Any, ...] = (
    *(f"@RAW{i}@" for i in range(len(RAW))),
    *(2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, -(2**63), -1, 0, 1, 2, 4.0, 0.5, -0.5),
    *("", "\0", "\x1b[31m", "\u2028", "../../../etc/passwd", "a" * 70_000, "0", "1", "true", "é"),
    *(None, True, False, [], {}, [[]], [None], [1, 2], {"a": 1}, ["a", "b"], [0.5], [{}]),
)
TOML = (
    *("true", "0", "-1", "inf", "nan", '""', "[]", "{}", "1e400", "1979-05-27", "1000000"),
    *("0x" + "f" * 5000, '"../x.toml"', '"entropy > h2"', '["entropy < 1e9"]', '["edt", "edt"]'),
    *("9" * 5000, '"\\ud800"', "[" * 50_000, "{a = " * 300 + "1" + "}" * 300, "[[], {}]"),
    *("{ from = nan, to = inf }", '{ from = 2, to = 1, scale = "log" }', '"30%"', '"100.5%"'),
    *('"-0%"', '"%"', '[".", ""]', '["entropy < 30%"]', '["agreement > 1e400%"]'),
)
JUNK = (
    *(b"", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b'"', b"{{", b"{%", b"\n"),
    *(b"," * 3000, b"A" * 70_000, b"[" * 3000, b"9" * 5000, b"{{ 'a' * 10**9 }}", b"\0" * 100),
    *(b"{% for i in range(10**9) %}", b'"a": 1, ', b"\xff" * 8),
)
INTEGERS = (0, 1, 2, 3, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Returns data with a bit, a number or a part of it changed, or in another encoding."""
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice([0, 1, 4, 8, 64, 1000, len(data)]))
    part, before, after = data[start:end], data[:start], data[end:]
    match rng.randrange(8):
        case 0:
            flipped = bytes([*data[start : start + 1]]) or b"\0"
            return before + bytes([flipped[0] ^ 1 << rng.randrange(8)]) + data[start + 1 :]
        case 1:
            form = rng.choice("<I >I <Q >Q".split())
            number = struct.pack(form, rng.choice(INTEGERS) % 2 ** (8 * struct.calcsize(form)))
            return before + number + data[start + len(number) :]
        case 2:
            return before
        case 3:
            return before + part * rng.choice([0, 2, 3]) + after
        case 4:
            middle = rng.randrange(len(after) + 1)
            return before + after[:middle] + part + after[middle:]
        case 5:
            encoding = rng.choice(["utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig"])
            return data.decode("utf-8", "replace").encode(encoding, "replace")
        case _:
            return before + rng.choice(JUNK) + rng.choice([part, b""]) + after


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """Returns JSON with one to three values replaced, renamed, repeated, moved or wrapped."""
    value = [json.loads(data)]
    for _ in range(rng.choice([1, 1, 2, 3])):
        change_value(rng, *rng.choice(_places(rng, value)))
    text = json.dumps(value[0], ensure_ascii=rng.random() < 0.5) if value else ""
    for i, raw in enumerate(RAW):
        text = text.replace(f'"@RAW{i}@"', raw)
    return text.replace('"@', '"').encode("utf-8", "surrogatepass")


def _places(rng: random.Random, root: Any) -> list[tuple[Any, Any]]:
    """Returns containers and keys along a random way into a value."""
    places: list[tuple[Any, Any]] = []
    while isinstance(root, dict | list) and root:
        key = rng.choice([*root] if isinstance(root, dict) else range(len(root)))
        places.append((root, key))
        root = root[key]
    return places[1:] or places or [([None], 0)]


def change_value(rng: random.Random, parent: Any, key: Any) -> None:
    """Changes a value of a list or dict in place."""
    old = parent[key]
    other = rng.choice([*parent] if isinstance(parent, dict) else range(len(parent)))
    match rng.choice("replace replace remove rename wrap scale scale swap repeat".split()):
        case "remove":
            del parent[key]
        case "rename" if isinstance(parent, dict):
            parent[rng.choice(["extra", "", "type", str(key).upper(), f"{key} "])] = parent.pop(key)
        case "wrap":
            parent[key] = rng.choice([[old], {"x": old}, str(old)[:1000]])
        case "scale" if isinstance(old, int | float):
            parent[key] = rng.choice(
                [-old, old + 1, old * 2, old / 2, str(old), float(old), ~int(old)]
            )
        case "swap":
            parent[key], parent[other] = parent[other], old
        case "repeat" if isinstance(parent, dict):
            parent[f"@{key}"] = copy.deepcopy(rng.choice([parent[other], *VALUES]))
        case "repeat":
            parent[key:key] = [copy.deepcopy(old) for _ in range(rng.choice([1, 2, 100]))]
        case _:
            parent[key] = copy.deepcopy(rng.choice(VALUES))


def mutate_lines(rng: random.Random, data: bytes) -> bytes:
    """Returns lines with one changed, repeated, moved or removed, or an invalid one inserted."""
    rows = data.splitlines(keepends=True)
    line = rows.pop(rng.randrange(len(rows)))
    new = rng.choice([line, b"\n", b"[]\n", b"null\n", b'"a"\n', mutate_bytes(rng, line)])
    if line.endswith(b"}\n") and rng.random() < 0.7:
        new = mutate_json(rng, line) + b"\n"
    for _ in range(rng.choice([1, 1, 1, 2])):
        rows.insert(rng.randrange(len(rows) + 1), new)
    return b"".join(rows)


def mutate_toml(rng: random.Random, data: bytes) -> bytes:
    """Returns TOML with values replaced, or lines removed, repeated or inserted."""
    rows = data.decode().split("\n")
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(rows))
        key = rows[at].partition("=")[0].strip() or "extra"
        new = [[], [rows[at]] * 2, ["[extra]"], ["[[a]]"], *[[f"{key} = {rng.choice(TOML)}"]] * 8]
        rows[at : at + rng.randrange(2)] = rng.choice(new)
    return "\n".join(rows).encode()


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Returns a file with another header, its length adapted or not, or other data."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = mutate_json(rng, data[8:end])
    length = rng.choice([len(header)] * 8 + [len(header) + 1, end, *INTEGERS])
    values = rng.choice([data[end:]] * 8 + [mutate_bytes(rng, data[end:])])
    return length.to_bytes(8, "little") + header + values


@cache
def _gguf_fields(data: bytes) -> tuple[list[list[tuple[int, int]]], int, int]:
    """Returns where the parts of each key and of each tensor's entry begin and end, the number of
    keys, and where the tensors' values begin."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.gguf")
        path.write_bytes(data)
        reader = gguf.GGUFReader(path)
        entries = [*reader.fields.values()][3:], [tensor.field for tensor in reader.tensors]
        fields = []
        for field in itertools.chain(*entries):
            sizes = [len(part.tobytes()) for part in field.parts]
            ends = [field.offset + end for end in itertools.accumulate(sizes)]
            fields.append([*zip([field.offset, *ends], ends, strict=False)])
        return fields, len(entries[0]), reader.data_offset


def mutate_gguf(rng: random.Random, data: bytes) -> bytes:
    """Returns a file with keys or tensors removed, repeated, swapped or with other numbers."""
    fields, keys, start = _gguf_fields(data)
    entries = [[data[begin:end] for begin, end in field] for field in fields]
    counts = [len(entries) - keys, keys]
    for _ in range(rng.choice([1, 1, 2])):
        is_key = rng.random() < 0.7
        at, other = (rng.randrange(*((0, keys) if is_key else (keys, len(fields)))) for _ in "ab")
        if not entries[at] or not entries[other]:  # removed before
            continue
        part = rng.choice([-1, -2, 0, 1, rng.randrange(len(entries[at]))]) % len(entries[at])
        old = entries[at][part]
        match rng.randrange(6):
            case 0 | 1 as repeats:
                entries[at] = entries[at] * (2 * repeats)
                counts[is_key] += 2 * repeats - 1
            case 2:
                entries[at][part], entries[other][-1] = entries[other][-1], old
            case 3:
                entries[at], entries[other] = entries[other], entries[at]
            case _:
                near = int.from_bytes(old, "little") + rng.choice([-1, 1, 32])
                number = rng.choice([near, rng.randrange(40), rng.choice(INTEGERS)])
                new = (number % 256 ** len(old)).to_bytes(len(old), "little")
                entries[at][part] = rng.choice([new, new, rng.choice(JUNK)])
    header = data[:8] + struct.pack("<2Q", *counts) + b"".join(itertools.chain(*entries))
    return header + bytes(-len(header) % 32) + rng.choice([data[start:]] * 9 + [data[start:-9]])


def mutate(rng: random.Random, name: str, data: bytes) -> bytes:
    """Returns a mutation of a file, by its suffix, or in one of four of its bytes."""
    of_kind: dict[str, Callable[[random.Random, bytes], bytes]] = {
        "json": mutate_json,
        "jsonl": mutate_lines,
        "toml": mutate_toml,
        "gguf": mutate_gguf,
        "safetensors": mutate_safetensors,
    }
    found = re.search(r"\.(\w+)$", name)
    change = of_kind.get(found[1] if found else "", mutate_bytes)
    return (mutate_bytes if rng.random() < 0.25 else change)(rng, data)
