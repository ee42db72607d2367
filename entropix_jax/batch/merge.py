"""Joins the outputs of several hosts into one."""

from __future__ import annotations

import shutil
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from entropix_jax.batch.output import (
    Key,
    ObjectParts,
    check_output,
    open_output,
    read_results,
    record_key,
)
from entropix_jax.batch.records import describe_record, read_records
from entropix_jax.batch.sidecar import check_same_run, find_difference, read_sidecar, write_sidecar
from entropix_jax.batch.storage import is_local, open_file, resolve, storage_errors
from entropix_jax.errors import UserError


def part_address(address: str, index: int, count: int) -> str:
    """Where process `index` of `count` writes: `out.part-00001-of-00004.jsonl`."""
    suffix = PurePosixPath(address).suffix
    return f"{address.removesuffix(suffix)}.part-{index:05}-of-{count:05}{suffix}"


def merge(address: str, count: int, *, input: str) -> int:
    """Joins the outputs of `count` processes, which stay; returns the number of results.

    The joined output appears entirely or not at all. It may replace an output of the same run. The
    `input` of the run is read again, to check that each record has its result. UserError if a part
    is missing, unfinished, torn or of another run; a record of the input has no result, or several;
    a result has no record; the output cannot be written.
    """
    if input == "-":
        raise UserError("standard input cannot be read again: merging needs the input as a file")
    check_output(address, input=input)
    parts = [part_address(address, index, count) for index in range(count)]
    sidecar = _merge_sidecars(parts)
    number = _check_complete(parts, input)

    def write(out: BinaryIO) -> None:
        for part in parts:
            with open_file(part) as file:
                shutil.copyfileobj(file, out, 2**20)
        write_sidecar(address, sidecar)

    output = open_output(address)
    try:
        with storage_errors(address, "written"):
            if not output.is_empty():
                check_same_run(address, read_sidecar(address), sidecar["identity"], mix=False)
            output.replace(write)
    except BaseException:
        output.close(failed=True)
        raise
    output.close()
    return number


def _merge_sidecars(parts: list[str]) -> dict[str, Any]:
    """The sidecar of the joined output; UserError if the parts are not those of one run."""
    merged: dict[str, Any] = {}
    for part in parts:
        fs, path = resolve(part)
        with storage_errors(part):
            unjoined = [] if is_local(fs) else ObjectParts(part, fs, path).list_parts()
            if unjoined or not fs.isfile(path):
                raise UserError(f"{part}: missing or not finished: run this part to its end")
        sidecar = read_sidecar(part)
        if sidecar is None:
            raise UserError(f"{part}: no run's results: no {part}.run.json")
        merged = merged or sidecar
        if difference := find_difference(merged["identity"], sidecar["identity"]):
            raise UserError(f"{part}: another run than {parts[0]}: {difference}")
        for name, digest in sidecar.get("samplers", {}).items():
            if merged.setdefault("samplers", {}).setdefault(name, digest) != digest:
                raise UserError(f"{part}: another run than earlier parts: sampler '{name}' differs")
    return merged


def _check_complete(parts: list[str], input: str) -> int:
    """The number of results; UserError unless results and records of the input match one to one."""
    done: dict[Key, str] = {}
    for part in parts:
        with open_file(part) as file:
            for line in read_results(file, part, strict=True):
                if line.key is None:
                    raise UserError(f"{part}: line {line.number} is not a result")
                if line.key in done:
                    raise UserError(f"{part}: line {line.number} is a second result of its record")
                done[line.key] = line.digest
    records = 0
    missing = []
    for record in read_records(input):
        records += 1
        if done.get(record_key(record)) != record.digest:
            missing.append(describe_record(record))
    if missing:
        raise UserError(
            f"{input}: {len(missing)} of {records} records have no result in the parts, the first"
            f" one in {missing[0]}: run all parts to their end"
        )
    if len(done) > records:
        raise UserError(
            f"{input}: {len(done) - records} of {len(done)} results in the parts are of no record"
            " of it: is it the input that they were made from?"
        )
    return len(done)
