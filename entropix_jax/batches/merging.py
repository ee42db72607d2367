"""Several hosts' parts of one output, joined once each record has its result."""

from __future__ import annotations

import shutil
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from entropix_jax.batches.identity import agreed, difference_of, parse_sidecar
from entropix_jax.batches.index import Index
from entropix_jax.batches.lines import key_of, lines_of
from entropix_jax.batches.places import is_local, located, opened, reaching
from entropix_jax.batches.sinks import ObjectParts, sink_of
from entropix_jax.batches.source import named, read_records
from entropix_jax.batches.store import check_output
from entropix_jax.errors import UserError


def part_address(address: str, index: int, count: int) -> str:
    """Where process `index` of `count` writes: `out.part-00001-of-00004.jsonl`.

    Raises:
        ValueError: no such process.
    """
    if not 0 <= index < count:
        raise ValueError(f"part {index} of {count}")
    suffix = PurePosixPath(address).suffix
    return f"{address.removesuffix(suffix)}.part-{index:05}-of-{count:05}{suffix}"


def merge(address: str, count: int, *, input: str) -> int:
    """Joins the outputs of `count` processes into one, which appears at once or not at all; gives
    the number of results.

    The parts, at `part_address`, are kept. An output that is there already is replaced if it is the
    same run's.

    Args:
        address: the output.
        count: how many processes there were.
        input: the address of the input, which is read again.

    Raises:
        UserError: a part is missing, unfinished, torn, of another run or not the run's own; two
            results have one id; a record of the input has no result, or a result no record; the
            output cannot be written.
    """
    if input == "-":
        raise UserError("standard input cannot be read again: merging needs the input as a file")
    check_output(address, input=input)
    parts = [part_address(address, index, count) for index in range(count)]
    sidecar = _common_sidecar(parts)
    index = Index()
    for part in parts:
        with opened(part) as file:
            for line in lines_of(file, part, whole=True):
                if line.key is None:
                    raise UserError(f"{part}: line {line.number} is not a result")
                if not index.add(line.key, line.digest):
                    raise UserError(f"{part}: line {line.number} is a second result of its record")
    _check_complete(index, input, count)

    sink = sink_of(address)
    try:
        # What is there must be the same run's, or nothing.
        agreed(address, sink.read_sidecar(), sidecar["identity"], empty=sink.is_empty(), mix=False)

        def write(out: BinaryIO) -> None:
            for part in parts:
                with opened(part) as file:
                    shutil.copyfileobj(file, out, 2**20)
            sink.write_sidecar(sidecar)

        sink.replace(write)
    except BaseException:
        sink.abandon()
        raise
    sink.close()
    return len(index)


def _common_sidecar(parts: list[str]) -> dict[str, Any]:
    """What the sidecars of all parts say.

    Raises:
        UserError: one is missing, unfinished, or another run's.
    """
    sidecars = []
    for part in parts:
        fs, path = located(part)
        with reaching(part):
            unjoined = [] if is_local(fs) else ObjectParts(part, fs, path).parts()
            if unjoined or not fs.isfile(path):
                raise UserError(f"{part}: missing or not finished: run this part to its end")
            try:
                sidecar = parse_sidecar(fs.cat_file(f"{path}.run.json"), f"{part}.run.json")
            except FileNotFoundError:
                raise UserError(f"{part}: no run's results: no {part}.run.json") from None
        sidecars.append(sidecar)
        if difference := difference_of(sidecars[0]["identity"], sidecar["identity"]):
            name, first, this = difference
            raise UserError(f"{part}: another run than {parts[0]}: {name} is {this}, not {first}")
    samplers: dict[str, str] = {}
    for part, sidecar in zip(parts, sidecars, strict=True):
        for name, digest in sidecar.get("samplers", {}).items():
            if samplers.setdefault(name, digest) != digest:
                raise UserError(f"{part}: another run than earlier parts: sampler '{name}' differs")
    earlier = []
    for identity in (old for sidecar in sidecars for old in sidecar.get("earlier", [])):
        if identity not in earlier:
            earlier.append(identity)
    return (
        sidecars[0]
        | ({"samplers": samplers} if samplers else {})
        | ({"earlier": earlier} if earlier else {})
    )


def _check_complete(index: Index, input: str, count: int) -> None:
    """Looks whether each record of an input has its result, and each result its record.

    Raises:
        UserError: not so.
    """
    records = missing = 0
    first = ""
    for record in read_records(input):
        records += 1
        if index.find(key_of(record.id, record.line, record.digest)) != record.digest:
            missing += 1
            first = first or named(record)
    if missing:
        raise UserError(
            f"{input}: {missing} of {records} records have no result in the {count} parts, the"
            f" first one in {first}: run all parts to their end"
        )
    if len(index) > records:
        raise UserError(
            f"{input}: {len(index) - records} of {len(index)} results in the {count} parts are of"
            " no record of it: is it the input that they were made from?"
        )
