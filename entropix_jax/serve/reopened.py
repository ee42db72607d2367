"""Rows from a trace, or from the page of a run: what `--trace` and `--report` write."""

import base64
import binascii
import functools
import math
import re
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import PydanticSerializationError, from_json, to_json

from entropix_jax.engine.preparation import CalibratedSampler
from entropix_jax.engine.records import Decode
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.trace import BranchRecord, TokenRecord
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.report.reading import METRICS, TraceReader
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.mechanisms.branch import MAX_DEPTH, MAX_WIDTH
from entropix_jax.sampler.sampler import (
    OLD_KEYS,
    Sampler,
    check_key,
    check_values,
    check_whole,
    required,
)
from entropix_jax.serve.kept import KeptRow
from entropix_jax.serve.schema import MOST_TOP, ApiError
from entropix_jax.serve.wanted import Served

MOST_BYTES = 64 * 2**20  # of the trace within a page
_NAME = "the file"
_LARGEST = 2**31 - 1
_GREATEST = float(np.finfo(np.float32).max)
_LONGEST = 1024  # characters of a token's text, of a name, or of an error
_PAYLOAD = re.compile(rb'<script type="text/plain" id="trace-0">([A-Za-z0-9+/=]*)</script>')
_OWN = {"state", "branches", "top", "layers", "ambiguous", "chosen"}  # fields that a line may lack
_FIELDS = [field.name for field in fields(TokenRecord)]
_MESSAGE = ("role", "content")
_NUMBERS = (*METRICS, "token_confidence", "self_certainty")
_WHOLE = ("row", "position", "top_k", "forwards")
_ENDS = {None, "eos", "length", "context", "stop", "confidence", "error", "interrupt", "cancelled"}


def reopen(served: Served, body: bytes) -> list[KeptRow]:
    """The rows of a file: they have ended, and their tokens have no states.

    Raises:
        UserError: it is neither a trace nor such a page, or a damaged one.
        ApiError: it is another model's, or of another version.
    """
    if body.lstrip()[:1] == b"<":
        body = _unpack(body)
    with tempfile.TemporaryDirectory(prefix="entropix-jax-") as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_bytes(body)
        reader = TraceReader(path)
        lines: list[dict[str, Any]] = []
        try:
            for line in reader:
                to_json(line.record)  # half a character cannot be told
                lines.append(line.record)
        except UserError as error:
            raise UserError(str(error).replace(str(path), _NAME)) from None
        except (PydanticSerializationError, UnicodeEncodeError):
            raise UserError(f"{_NAME}: a text is not Unicode") from None
    _check(served, reader.header)
    sampler = _sampler(served, reader.header)
    rows: dict[int, Row] = {}
    decode = functools.cache(served.model.tokenizer.decode_within)  # one text for equal tokens
    for record in lines:
        if record["type"] not in ("token", "retracted"):
            continue
        row = rows.setdefault(record["row"], _row(served, reader.header, sampler, record["row"]))
        token = _token(row, record, served.model, decode)
        row.log.append((token, record["type"] == "retracted"))
        (row.retracted_tokens if row.log[-1][1] else row.tokens).append(token)
    ends = {} if reader.footer is None else {one["row"]: one for one in reader.footer["rows"]}
    now = time.perf_counter()
    for number, row in rows.items():
        end = ends.get(number, {})
        row.text = "".join(token.text for token in row.tokens)
        if row.text.startswith(end.get("text", row.text)):  # less of it where a stop text ended it
            row.text = row.text[: len(end.get("text", row.text))]
        row.finish_reason, row.error = end.get("finish_reason"), end.get("error")
        if row.finish_reason not in _ENDS or len(row.error or "") > _LONGEST:
            raise ApiError(f"{_NAME}: row {number} has an invalid finish reason or error")
        row.request = _with_budget(row)
        row.started = now
    return [KeptRow(row, ended=now) for row in rows.values()]


def _unpack(page: bytes) -> bytes:
    """The trace that a page carries."""
    if (found := _PAYLOAD.search(page)) is None:
        raise UserError(f"{_NAME}: a page without a trace")
    try:
        packed = base64.b64decode(found[1], validate=True)
        unpacker = zlib.decompressobj()
        trace = unpacker.decompress(packed, MOST_BYTES)
    except (binascii.Error, zlib.error):
        raise UserError(f"{_NAME}: the page's trace is damaged") from None
    if not unpacker.eof:
        raise UserError(f"{_NAME}: the page's trace is damaged, or above {MOST_BYTES} bytes")
    return trace


def _check(served: Served, header: Mapping[str, Any]) -> None:
    """ApiError for a trace of another model."""
    model = served.model
    if header.get("model_config") != from_json(to_json(asdict(model.config))):
        raise ApiError(f"{_NAME} is from another model, not from {served.name!r}")
    tokens = header["prompt_tokens"]
    if not tokens or not _are_tokens(model, tokens):
        raise ApiError(f"{_NAME}: the prompt has ids that are not tokens of {served.name!r}")
    if len(header["sampler"]) > _LONGEST:
        raise ApiError(f"{_NAME}: the sampler's name is too long")
    if model.tokenizer.decode(tokens, skip_special=False) != header["prompt"]:
        raise ApiError(f"{_NAME} is from a model with another vocabulary, not from {served.name!r}")


def _sampler(served: Served, header: Mapping[str, Any]) -> CalibratedSampler:
    """Returns the sampler of a trace. Its thresholds stay percentiles if the served model's tables
    give the same numbers."""
    own = served.sampler.mechanisms
    values = {k: v for k, v in header["sampler_parameters"].items() if k not in OLD_KEYS}
    where = f"{_NAME}: sampler_parameters"
    for key in values:
        check_key(key, where, own)
    if missing := sorted(required(own) - values.keys()):
        raise UserError(f"{where}: '{missing[0]}' is missing")
    check_values(values, where, own)
    check_whole(values, where)
    assert own[: len(MECHANISMS)] == MECHANISMS
    sampler = Sampler(header["sampler"], "", values, mechanisms=own)
    try:
        settled = served.settle_sampler(sampler.with_values(header.get("percentiles") or {}))
        if settled.values == values:
            return settled
    except UserError:  # percentiles that are invalid, or of other tables
        pass
    return served.settle_sampler(sampler)


def _row(served: Served, header: Mapping[str, Any], sampler: CalibratedSampler, number: int) -> Row:
    seed, messages, ends = header.get("seed"), header.get("messages"), served.model.end_ids
    # A trace does not tell whether it is a chat's: the end of a turn ends a text as well.
    eos_ids = list(dict.fromkeys((*ends(chat=False), *ends(chat=True))))
    request = Request(
        header["prompt_tokens"],
        sampler,
        row_id=str(number),
        seed=seed if isinstance(seed, int) else 0,
        eos_ids=eos_ids,
        messages=messages and [{key: one[key] for key in _MESSAGE} for one in messages],
    )
    return Row(request, number=number)


def _with_budget(row: Row) -> Request:
    """The row's request; its budget is what it has."""
    return replace(row.request, max_new_tokens=max(len(row.tokens), 1))


def _token(row: Row, line: Mapping[str, Any], model: LanguageModel, decode: Decode) -> TokenRecord:
    """The next token of a row, whose numbers an engine can go on from. Nothing in it is larger than
    what an engine writes; the texts of alternatives and branches are made of their tokens."""
    values: dict[str, Any] = {name: line.get(name) for name in _FIELDS}
    if missing := [name for name in _FIELDS if values[name] is None and name not in _OWN]:
        raise ApiError(f"{_NAME}: a token lacks {missing[0]!r}: an older version wrote the file")
    top, branches = (values["top"] or [])[:MOST_TOP], values["branches"] or []
    named = [values["token_id"], *(i for i, _, _ in top), *chain(*(b["tokens"] for b in branches))]
    if not _are_tokens(model, named):
        raise ApiError(f"{_NAME}: a token has ids that are not tokens of the model")
    known = values["action"] in (mechanism.name for mechanism in row.request.sampler.mechanisms)
    whole = all(0 <= values[name] <= _LARGEST for name in _WHOLE)
    here = line["type"] == "retracted" or values["position"] == _length(row)
    short = len(values["text"]) <= _LONGEST and len(branches) <= MAX_WIDTH
    short = short and all(len(branch["tokens"]) <= MAX_DEPTH for branch in branches)
    plain = values["ambiguous"] in (None, True, False) and values["chosen"] in (None, True)
    if not (known and whole and here and short and plain):
        raise ApiError(f"{_NAME}: position {_length(row)} has invalid values")
    values |= {name: _number(values[name]) for name in _NUMBERS}
    if values["branches"] is not None:
        values["branches"] = [
            BranchRecord(
                one["tokens"],
                decode(tuple(one["tokens"])),
                None if one.get("score") is None else _number(one["score"]),
                one["chosen"],
            )
            for one in branches
        ]
    if values["top"] is not None:
        values["top"] = [(i, decode((i,)), _number(p)) for i, _, p in top]
    if values["layers"] is not None:
        config = model.config
        values["layers"] = np.array([*map(_number, chain(*values["layers"]))], np.float32)
        if values["layers"].size != config.num_layers * config.num_heads:
            raise ApiError(f"{_NAME} has another number of layers or heads than the model")
        values["layers"] = values["layers"].reshape(config.num_layers, -1)
    return TokenRecord(**values)


def _number(value: float) -> float:
    """A number that float32 can hold, as all that an engine writes. ApiError for another one."""
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not abs(number) <= _GREATEST:
        raise ApiError(f"{_NAME} has a number beyond single precision")
    return number


def _are_tokens(model: LanguageModel, values: Sequence[Any]) -> bool:
    size = model.config.vocab_size
    return all(type(one) is int and 0 <= one < size for one in values)


def _length(row: Row) -> int:
    return len(row.request.prompt) + len(row.tokens)
