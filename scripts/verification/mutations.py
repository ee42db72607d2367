"""Damaged and hostile inputs, made of valid ones.

All draws are from the `Random` that is given: the same one makes the same input.
"""

import json
import re
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Mutator = Callable[[Random, Sequence[bytes]], bytes]

# What readers of text trip over, whatever the format.
_TOKENS: tuple[bytes, ...] = (
    *(b"", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\n", b"\r\n", b"\t", b" "),
    *(b"{", b"}", b"[", b"]", b'"', b"'", b",", b":", b"=", b"\\", b"#", b"\\u0000", b"\\ud800"),
    *(b"null", b"true", b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 30, b"9" * 5000),
    *(b"A" * 70_000, b"[" * 3000, b'{"a":' * 3000, "\u2028\u0085\u202e🙂".encode()),
)


def bytewise(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Flips, cuts, insertions, deletions and repetitions of bytes, and joins of two seeds."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + rng.choice((1, 1, 2, 4, 16, 256)))
        match rng.randrange(8):
            case 0 if data:
                data[place % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                data[place:end] = rng.randbytes(end - place)
            case 2:
                del data[place:]
            case 3:
                del data[place:end]
            case 4:
                data[place:place] = data[place:end] * rng.choice((1, 2, 64))
            case 5:
                other = rng.choice(seeds)
                data[place:] = other[rng.randrange(len(other) + 1) :]
            case _:
                data[place : rng.choice((place, end))] = rng.choice(_TOKENS)
    return bytes(data)


# JSON. What the writer cannot write stands in the text as it is, in place of a mark.

_RAW: tuple[str, ...] = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-0", "-0.0", "1e-400", "9" * 5000, "1.0", "0.5"),
    *("[" * 500 + "]" * 500, "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500),
    *('{"a": 1, "a": 2}', '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', "'a'", "01", "1_0", ""),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, 10**30),
    *(-(2**63), 0.5, -0.5, 1e-30, 1e30, 1e308, "", " ", "a", "0", "1", "-1", "None", "x" * 70_000),
    *("\0", "\x1b[31m", "\u2028", "🙂", "é", "../../../etc/passwd", "/etc/passwd", "a/b", "a.toml"),
    *([], {}, [None], [[]], {"": None}, [0] * 300, {"a": {"b": {"c": []}}}),
)
_MARK = "@RAW{}@"


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            found += _paths(child, (*path, key))
    return found


def _at(value: Any, path: Sequence[Any]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutated_value(rng: Random, value: Any, others: Sequence[Any]) -> Any:
    """A JSON value with some of its parts changed, in place where it has parts."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        paths = _paths(value)
        path = rng.choice(paths)
        new = _replacement(rng, _at(value, path), others)
        if not path:
            if rng.random() < 0.1:
                value = new
            continue
        parent, key = _at(value, path[:-1]), path[-1]
        match rng.randrange(8):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[rng.choice(("extra", "", "type", f"{key}x", "\0", str(key).upper()))] = new
            case 1:
                parent.insert(key, new)
            case 2 if isinstance(parent, dict):
                parent[rng.choice([*parent, "renamed"])] = parent.pop(key)
            case 2:
                rng.shuffle(parent)
            case 3:
                parent[key] = json.loads(json.dumps(_at(value, rng.choice(paths))))
            case _:
                parent[key] = new
    return value


def _replacement(rng: Random, old: Any, others: Sequence[Any]) -> Any:
    match rng.randrange(10):
        case 0 | 1:
            return _MARK.format(rng.randrange(len(_RAW)))
        case 2:
            return rng.choice(([old], {"x": old}, str(old)[:1000], [old, old]))
        case 3 if isinstance(old, int | float) and not isinstance(old, bool):
            return rng.choice((-old, old + 1, old - 1, old * 2, old / 2, float(old), str(old)))
        case 3 if isinstance(old, str):
            return rng.choice((old[:-1], old + old, old.upper(), f"{old}\0", old[::-1]))
        case 3 if isinstance(old, list):
            return rng.choice((old[:-1], old + old, old[::-1], old * 20 if len(old) < 20 else []))
        case 4 if others:
            other = rng.choice(others)
            return json.loads(json.dumps(_at(other, rng.choice(_paths(other)))))
        case _:
            new = rng.choice(_VALUES)
            return json.loads(json.dumps(new)) if isinstance(new, list | dict) else new


def _written(rng: Random, value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    if "@RAW" in text:
        text = re.sub(r'"@RAW(\d+)@"', lambda match: _RAW[int(match[1])], text)
    return text.encode("utf-8", "surrogatepass")


def _twice(rng: Random, data: bytes) -> bytes:
    """A key that stands there again, with another value."""
    return re.sub(
        rb'\{\s*("[^"]*")', lambda m: b"{%b: %d, %b" % (m[1], rng.randrange(9), m[1]), data, count=1
    )


def json_like(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """JSON with changed values, keys and order; now and then bytes of it."""
    if rng.random() < 0.25:
        return bytewise(rng, seeds)
    others = [json.loads(seed) for seed in seeds] if rng.random() < 0.1 else []
    data = _written(rng, mutated_value(rng, json.loads(rng.choice(seeds)), others))
    match rng.randrange(40):
        case 0:
            return b"\xef\xbb\xbf" + data
        case 1:
            return data.decode("utf-8", "replace").encode("utf-16")
        case 2:
            return _twice(rng, data)
        case 3:
            return bytewise(rng, [data])
    return data


def json_lines(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Lines of JSON, one or some of them changed, moved, repeated or lost."""
    if rng.random() < 0.25:
        return bytewise(rng, seeds)
    lines = rng.choice(seeds).splitlines(keepends=True)
    for _ in range(rng.choice((1, 1, 2, 3))):
        number = rng.randrange(len(lines)) if lines else 0
        match rng.randrange(10):
            case 0:
                del lines[number : number + 1]
            case 1:
                lines[number:number] = lines[number : number + 1] * rng.choice((1, 2, 100))
            case 2:
                lines.insert(number, rng.choice((b"\n", b"[]\n", b"1\n", b"null\n", b'"a"\n')))
            case 3:
                rng.shuffle(lines)
            case _ if lines:
                end = rng.choice((b"\n",) * 8 + (b"\r\n", b""))
                lines[number] = _mutated_line(rng, lines[number].strip()) + end
    return b"".join(lines)


def _mutated_line(rng: Random, line: bytes) -> bytes:
    try:
        json.loads(line)
    except (ValueError, RecursionError):  # one that was changed before
        return bytewise(rng, [line])
    return json_like(rng, [line])


# TOML, for which there is no writer: by lines.

_LITERALS: tuple[bytes, ...] = (
    *(b"true", b"0", b"-1", b"1.5", b"inf", b"-inf", b"nan", b'""', b'"a"', b"[]", b"{}", b"1e400"),
    *(b"9" * 30, b"9" * 5000, b"0x" + b"f" * 5000, b"-0.0", b"1979-05-27", b"07:32:00", b"1_000"),
    *(b"1979-05-27T07:32:00Z", b'"\\ud800"', b'"\\u0000"', b'"""\na\n"""', b"'x'", b"[1, 'a']"),
    *(b"[" * 400 + b"]" * 400, b"[" * 50_000, b"{a = " * 300 + b"1" + b"}" * 300, b"[[], {}]"),
    *(
        b'"' + b"x" * 70_000 + b'"',
        b"[" + b"1, " * 3000 + b"]",
        b'["greedy", "greedy"]',
        b"2147483648",
    ),
    *(
        b"{ from = 0.1, to = 2 }",
        b'{ from = 2, to = 1, scale = "log" }',
        b"{ from = nan, to = inf }",
    ),
    *(b'"entropix"', b'"../x.toml"', b'"entropy > h2"', b'["entropy < 1e9", "varentropy > u1"]'),
    *(b"{ from = -1e308, to = 1e308 }", b"[0, 1, 2, 3]", b"[0.1, 0.2, 0.3]", b"1000000", b"99999"),
)


def toml_like(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """TOML with changed values, keys, tables and order; now and then bytes of it."""
    if rng.random() < 0.2:
        return bytewise(rng, seeds)
    lines = rng.choice(seeds).split(b"\n")
    keys = [line.partition(b"=")[0].strip() for seed in seeds for line in seed.split(b"\n")]
    tables = [line for seed in seeds for line in seed.split(b"\n") if line.startswith(b"[")]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        number = rng.randrange(len(lines)) if lines else 0
        line = lines[number] if lines else b""
        key = line.partition(b"=")[0].strip()
        match rng.randrange(10):
            case 0:
                del lines[number : number + 1]
            case 1:
                lines.insert(rng.randrange(len(lines) + 1), line)
            case 2:
                lines.insert(number, rng.choice([*tables, b"[extra]", b"[a.b.c]", b"[[a]]", b"[]"]))
            case 3:
                new = rng.choice([*keys, b"extra", b'"a.b"', b"a.b", b'""', b"from", b"scale"])
                lines.insert(number, new + b" = " + rng.choice(_LITERALS))
            case 4:
                lines.insert(number, rng.choice(rng.choice(seeds).split(b"\n")))
            case 5:
                lines[number : number + 1] = [bytewise(rng, [line])]
            case _:
                lines[number : number + 1] = [(key or b"extra") + b" = " + rng.choice(_LITERALS)]
    return rng.choice((b"",) * 20 + (b"\xef\xbb\xbf",)) + b"\n".join(lines)


# Safetensors: eight bytes of length, a header of JSON, the tensors.

_LENGTHS = (0, 1, 2, 7, 8, 100, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 100_000_000, 100_000_001)
_TYPES = (
    *("F32", "BF16", "F16", "F64", "I8", "U8", "I64", "BOOL", "F8_E4M3", "F8_E5M2", "F4", "C64"),
    *("F33", "", "f32", "float32", None, 32, ["F32"]),
)
_SIZES = (0, 1, -1, 2, 2**31, 2**32, 2**62, 2**63, 2**64, 1.5, "1", None, True, [1])
_OFFSETS = (0, 1, 4, -1, -4, 2**32, 2**62, 2**63 - 1, 2**64 - 1, 2**64, 1.5, "0", None)


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the tensors' bytes."""
    (length,) = struct.unpack_from("<Q", data)
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header, data[8 + length :]


def joined_safetensors(header: bytes, body: bytes, length: int | None = None) -> bytes:
    """A file of a header, which `length` may lie about."""
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def safetensors_like(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """A file whose header lies: of its length, of tensors' types, shapes and places."""
    if rng.random() < 0.15:
        return bytewise(rng, seeds)
    header, body = split_safetensors(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        names = [name for name in header if isinstance(header[name], dict)]
        if not names:
            break
        name, other = rng.choice(names), rng.choice(names)
        entry = header[name]
        match rng.randrange(12):
            case 0:
                entry["dtype"] = rng.choice(_TYPES)
            case 1:
                entry["shape"] = [rng.choice(_SIZES) for _ in range(rng.randrange(9))]
            case 2 if isinstance(entry.get("shape"), list) and entry["shape"]:
                entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice(_SIZES)
            case 3:
                entry["data_offsets"] = [rng.choice(_OFFSETS) for _ in range(rng.choice((2, 2, 3)))]
            case 4 if isinstance(entry.get("data_offsets"), list) and entry["data_offsets"]:
                entry["data_offsets"][rng.randrange(len(entry["data_offsets"]))] = rng.choice(
                    _OFFSETS
                )
            case 5 if isinstance(entry.get("data_offsets"), list):
                shift = rng.choice((-4, -1, 1, 4, len(body)))
                entry["data_offsets"] = [
                    o + shift if isinstance(o, int) else o for o in entry["data_offsets"]
                ]
            case 6:
                entry["data_offsets"] = header[other].get("data_offsets")
            case 7:
                header[name], header[other] = header[other], header[name]
            case 8 if isinstance(entry.get("shape"), list):
                entry["shape"] = rng.choice((entry["shape"][::-1], [1, *entry["shape"]], []))
            case 9:
                header[rng.choice(("extra", "", name + "x", "\0"))] = header.pop(name)
            case 10:
                header["__metadata__"] = rng.choice(({"a": "b"}, {"a": 1}, [], None, "x", {}))
            case _:
                header = mutated_value(rng, header, [])
                if not isinstance(header, dict):
                    break
    text = _written(rng, header)
    match rng.randrange(16):
        case 0:
            return joined_safetensors(text, body, rng.choice(_LENGTHS))
        case 1:
            return joined_safetensors(text, body, max(0, len(text) + rng.choice((-8, -1, 1, 8))))
        case 2:
            text = _twice(rng, text)
        case 3:
            text = bytewise(rng, [text])
        case 4:
            text += b" " * rng.choice((1, 7, 100, 70_000))
        case 5:
            body = body[: rng.randrange(len(body) + 1)] + bytes(rng.choice((0, 1, 64)))
    return joined_safetensors(text, body)


# Texts with a language of their own.

_JINJA: tuple[bytes, ...] = (
    *(b"{{", b"}}", b"{%", b"%}", b"{#", b"#}", b"{% raw %}", b"{%- endfor -%}", b"{% endif %}"),
    *(b"{% for i in range(10**9) %}", b"{{ 'a' * 10**9 }}", b"{{ 2 ** 2 ** 20 }}", b"{{ 7 // 0 }}"),
    *(b"{{ ''.__class__.__mro__ }}", b"{{ self.__init__.__globals__ }}", b"{{ messages|pprint }}"),
    *(b"{{ '{:>999999999}'.format(1) }}", b"{{ '%999999999d' % 1 }}", b"{{ 'a'.center(10**9) }}"),
    *(b"{{ ('a' * 10**6).replace('a', 'a' * 10**6) }}", b"{{ range(10**5)|list }}", b"{{ loop }}"),
    *(
        b"{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        b"{% include 'x' %}",
        b"{% extends 'x' %}",
    ),
    *(
        b"{{ raise_exception('no') }}",
        b"{{ strftime_now('%Y' * 10**5) }}",
        b"{{ messages|tojson }}",
    ),
    *(b"{% set ns = namespace() %}", b"{% break %}", b"{% call m() %}", b"{% import 'os' as os %}"),
    *(b"{{ lipsum(n=10) }}", b"{{ cycler }}", b"{{ messages[0].content.encode() }}", b"{{ 1/0 }}"),
    *(b"{{ dict(a=1)|xmlattr }}", b"(" * 500, b"{% if 1 %}" * 100, b"{{ x" + b".y" * 300 + b" }}"),
    *(b"{{ '\\ud800' }}", b"{{ messages[99999999999999999999] }}", b"{{ -messages }}", b"{{ ~ }}"),
    *(b"{% generation %}", b"{% endgeneration %}", b"{{ (1).to_bytes(10**9) }}", b"|map('list')"),
)


def jinja_like(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """A template with more in it, among it what would take all memory."""
    data = rng.choice(seeds)
    if rng.random() < 0.4:
        return bytewise(rng, seeds)
    for _ in range(rng.choice((1, 1, 2, 3))):
        # Best between two tags, where it makes a template and not an error.
        places = [match.end() for match in re.finditer(rb"[%}]\}", data)] or [0]
        place = rng.choice((*places, rng.randrange(len(data) + 1)))
        if rng.random() < 0.3:
            end = rng.choice((*places, len(data)))
            data = data[:place] + data[place:end] * rng.choice((0, 2)) + data[end:]
        else:
            data = data[:place] + rng.choice(_JINJA) + data[place:]
    return data


_CELLS: tuple[bytes, ...] = (
    *(
        b",",
        b'"',
        b'""',
        b"\r",
        b"\n",
        b"\r\n",
        b"\0",
        b";",
        b"\t",
        b'"\n"',
        b"\xff",
        b"\xed\xa0\x80",
    ),
    *(
        b"prompt",
        b"id",
        b"seed",
        b"max_new_tokens",
        b"sampler",
        b"messages",
        b"promt",
        b"-1",
        b"1.5",
    ),
    *(b"9" * 200, "\u0661".encode(), b"a" * 200_000, b"\xef\xbb\xbf", b'"' * 5001, b"," * 3000),
)


def csv_like(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """A table whose cells, quotes and line breaks are not where they should be."""
    if rng.random() < 0.3:
        return bytewise(rng, seeds)
    data = rng.choice(seeds)
    for _ in range(rng.choice((1, 1, 2, 5))):
        places = [match.start() for match in re.finditer(rb'[,"\n]|$', data)]
        place = rng.choice(places)
        data = data[:place] + rng.choice(_CELLS) + data[place + rng.randrange(2) :]
    return data


_RANKS: tuple[bytes, ...] = (
    *(b"\n", b" ", b"=", b"====", b"YQ== 0\n", b"YQ==", b" 0\n", b"-1", b"9" * 30, b"9" * 5000),
    *(
        b"\xff",
        b"\0",
        b"\r",
        b"1_0",
        "\u0661".encode(),
        b"= 0\n",
        b"Zm9v 261\n",
        b" 1.0\n",
        b"AA== ",
    ),
)


def ranks_like(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """tiktoken's text format with lines lost, doubled, moved or changed."""
    if rng.random() < 0.3:
        return bytewise(rng, seeds)
    lines = rng.choice(seeds).splitlines(keepends=True)
    for _ in range(rng.choice((1, 1, 2, 5))):
        number = rng.randrange(len(lines)) if lines else 0
        match rng.randrange(5):
            case 0:
                del lines[number : number + 1]
            case 1:
                lines.insert(number, rng.choice(_RANKS))
            case 2:
                rng.shuffle(lines)  # the ranks stand in the lines: still valid
            case 3 if lines:
                other = rng.randrange(len(lines))
                lines[number], lines[other] = (
                    b" ".join((*lines[number].split()[:1], *lines[other].split()[1:])) + b"\n",
                    b" ".join((*lines[other].split()[:1], *lines[number].split()[1:])) + b"\n",
                )
            case _:
                lines[number : number + 1] = [bytewise(rng, lines[number : number + 1] or [b""])]
    return b"".join(lines)
