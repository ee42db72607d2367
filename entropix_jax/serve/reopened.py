"""Rows from a trace, or from the page of a run: what `--trace` and `--report` write."""

import base64
import binascii
import re
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import PydanticSerializationError, from_json, to_json

from entropix_jax.engine.preparation import CalibratedSampler, sampler_settings
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.running import find_no_token
from entropix_jax.engine.trace import BranchRecord, TokenRecord
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.report.reading import TraceReader
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.sampler import Sampler, check_key, check_values, check_whole, required
from entropix_jax.serve.kept import KeptRow
from entropix_jax.serve.schema import ApiError
from entropix_jax.serve.wanted import Served

MOST_BYTES = 64 * 2**20  # of the trace within a page
_NAME = "the file"
_LARGEST = 2**31 - 1
_PAYLOAD = re.compile(rb'<script type="text/plain" id="trace-0">([A-Za-z0-9+/=]*)</script>')
_OWN = {"state", "branches", "top", "layers", "ambiguous"}  # fields that a line may lack
_FIELDS = [field.name for field in fields(TokenRecord)]


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
    for record in lines:
        if record["type"] not in ("token", "retracted"):
            continue
        row = rows.setdefault(record["row"], _row(served, reader.header, sampler, record["row"]))
        token = _token(row, record, served.model)
        row.log.append((token, record["type"] == "retracted"))
        (row.retracted_tokens if row.log[-1][1] else row.tokens).append(token)
    ends = {} if reader.footer is None else {one["row"]: one for one in reader.footer["rows"]}
    now = time.perf_counter()
    for number, row in rows.items():
        end = ends.get(number, {})
        row.text = end.get("text", "".join(token.text for token in row.tokens))
        row.finish_reason, row.error = end.get("finish_reason"), end.get("error")
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
        raise ApiError(f"{_NAME} is of another model than {served.name!r}")
    tokens = header["prompt_tokens"]
    if not tokens or find_no_token(model, tokens) is not None:
        raise ApiError(f"{_NAME}: its prompt holds what is no token of {served.name!r}")
    if model.tokenizer.decode(tokens, skip_special=False) != header["prompt"]:
        raise ApiError(f"{_NAME} is of a model with another vocabulary than {served.name!r}")


def _sampler(served: Served, header: Mapping[str, Any]) -> CalibratedSampler:
    """The sampler of a trace, with the thresholds that it had."""
    values, own = dict(header["sampler_parameters"]), served.sampler.mechanisms
    where = f"{_NAME}: sampler_parameters"
    for key in values:
        check_key(key, where, own)
    if missing := sorted(required(own) - values.keys()):
        raise UserError(f"{where}: '{missing[0]}' is missing")
    check_values(values, where, own)
    check_whole(values, where)
    assert own[: len(MECHANISMS)] == MECHANISMS
    sampler = Sampler(header["sampler"], "", values, mechanisms=own)
    return CalibratedSampler(sampler, sampler_settings(served.model, sampler))


def _row(served: Served, header: Mapping[str, Any], sampler: CalibratedSampler, number: int) -> Row:
    seed, ends = header.get("seed"), served.model.end_ids
    # A trace does not tell whether it is a chat's: the end of a turn ends a text as well.
    eos_ids = list(dict.fromkeys((*ends(chat=False), *ends(chat=True))))
    request = Request(
        header["prompt_tokens"],
        sampler,
        row_id=str(number),
        seed=seed if isinstance(seed, int) else 0,
        eos_ids=eos_ids,
    )
    return Row(request, number=number)


def _with_budget(row: Row) -> Request:
    """The row's request; its budget is what it has."""
    return replace(row.request, max_new_tokens=max(len(row.tokens), 1))


def _token(row: Row, line: Mapping[str, Any], model: LanguageModel) -> TokenRecord:
    """The next token of a row, whose numbers an engine can go on from."""
    values: dict[str, Any] = {name: line.get(name) for name in _FIELDS}
    if missing := [name for name in _FIELDS if values[name] is None and name not in _OWN]:
        raise ApiError(f"{_NAME}: its tokens lack {missing[0]!r}, as an older version writes them")
    if find_no_token(model, [values["token_id"]]) is not None:
        raise ApiError(f"{_NAME} holds {values['token_id']}, which is no token")
    known = values["action"] in (mechanism.name for mechanism in row.request.sampler.mechanisms)
    whole = all(0 <= values[name] <= _LARGEST for name in ("row", "top_k", "forwards"))
    here = line["type"] == "retracted" or values["position"] == _length(row)
    if not (known and whole and here):
        raise ApiError(f"{_NAME}: what it says of position {values['position']} cannot be")
    if values["branches"] is not None:
        values["branches"] = [
            BranchRecord(one["tokens"], one["text"], one.get("score"), one["chosen"])
            for one in values["branches"]
        ]
    if values["top"] is not None:
        values["top"] = [tuple(one) for one in values["top"]]
    if values["layers"] is not None:
        config = model.config
        values["layers"] = np.asarray([*chain(*values["layers"])], np.float32)
        if values["layers"].size != config.num_layers * config.num_heads:
            raise ApiError(f"{_NAME} has another number of layers or heads than the model")
        values["layers"] = values["layers"].reshape(config.num_layers, -1)
    return TokenRecord(**values)


def _length(row: Row) -> int:
    return len(row.request.prompt) + len(row.tokens)
