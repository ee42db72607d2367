"""The output of a batch: results as JSON Lines, kept record by record, whatever end a run comes to.

A local output is one file, which is appended to. Object stores cannot append: there the output
grows in numbered parts beside its address, `out.jsonl.parts/000000.jsonl` and so on, which are
joined at the end. In either case `out.jsonl.run.json` says which run the results are of.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from entropix_jax.batches.identity import agreed
from entropix_jax.batches.index import Index
from entropix_jax.batches.lines import key_of
from entropix_jax.batches.places import is_local, located, reaching
from entropix_jax.batches.sinks import Sink, check_file, check_name, sink_of
from entropix_jax.batches.source import BadRecord, Record, named
from entropix_jax.errors import UserError


class Store:
    """The results of one run, in a file or in an object store. A context manager.

    A result is an object with the record's `id` (null where the record has none of its own), its
    `line`, its `digest` (15 hexadecimal digits) and what the run adds. Nothing is written twice:
    a record is known by its id, or by line and digest where it has none. Whatever has a result is
    done, errors included.
    """

    def __init__(
        self,
        address: str,
        sink: Sink,
        index: Index,
        sidecar: Mapping[str, Any],
        mix: bool,
    ) -> None:
        """As `open` makes it."""
        self.address = address
        self._sink = sink
        self._index = index
        self._sidecar = sidecar
        self._mix = mix

    @classmethod
    def open(cls, address: str, identity: Mapping[str, Any], *, mix: bool = False) -> Store:
        """Begins a run's output, or goes on with it.

        A last line that a killed run left torn is dropped; what is done is read and indexed, in
        about 20 bytes a record.

        Args:
            address: a path, or a URL that fsspec knows.
            identity: what makes the run what it is (model, sampler, input, ...), in JSON's types,
                and the same in all processes that share one run.
            mix: take an output whatever it holds: results of another run, or other JSON Lines. An
                id that is done then counts as done, whatever its input was.

        Raises:
            UserError: the output cannot be read or written, is in use, holds what is not JSON
                Lines, or is not this run's.
        """
        check_name(address)
        own = json.loads(json.dumps(dict(identity), allow_nan=False))
        sink = sink_of(address)
        try:
            old = sink.read_sidecar()
            # Torn lines are dropped from what a run wrote only.
            new = agreed(address, old, own, empty=sink.is_empty(), mix=mix)
            index = Index()
            for line in sink.resume(whole=old is None):
                if line.key is not None:
                    index.add(line.key, line.digest)
            if new != old:
                sink.write_sidecar(new)
        except BaseException:
            sink.abandon()
            raise
        return cls(address, sink, index, new, mix)

    @property
    def done(self) -> int:
        """How many results there are."""
        return len(self._index)

    def is_done(self, record: Record | BadRecord) -> bool:
        """Whether a record has its result.

        Raises:
            UserError: its id has one, of a record that was written otherwise.
        """
        digest = self._index.find(key_of(record.id, record.line, record.digest))
        if digest is not None and digest != record.digest and not self._mix:
            raise UserError(
                f"{self.address}: {named(record)} has a result of another record: another input"
                " under the same output; choose another output"
            )
        return digest is not None

    def write(self, record: Record | BadRecord, result: Mapping[str, Any]) -> None:
        """Adds the result of a record that is not done.

        On this machine it is in the file when this returns. In an object store it is when its part
        is full, or old as the next one is added, and on closing.

        Args:
            record: what the result is of.
            result: more for its object, in JSON's types; `id`, `line` and `digest` in it are
                replaced. `sampler_digest` tells what the sampler that the record names was.

        Raises:
            UserError: it cannot be written (a full disk, say), or the sampler that the record names
                was another one for earlier results. The file is as it was before.
            ValueError: a number in the result is NaN or infinite.
        """
        if isinstance(record, Record) and record.sampler and "sampler_digest" in result:
            self._agree_on_sampler(record, record.sampler, result["sampler_digest"])
        own = {"id": record.id, "line": record.line, "digest": f"{record.digest:015x}"}
        text = json.dumps({**own, **result, **own}, ensure_ascii=False, allow_nan=False)
        # Half a surrogate pair becomes a JSON escape.
        self._sink.append(text.encode("utf-8", "backslashreplace") + b"\n")
        self._index.add(key_of(record.id, record.line, record.digest), record.digest)

    def _agree_on_sampler(self, record: Record, name: str, digest: str) -> None:
        known = self._sidecar.get("samplers", {})
        if known.get(name) == digest:
            return
        if name in known and not self._mix:
            raise UserError(
                f"{self.address}: {named(record)}: sampler '{name}' is not what it was for earlier"
                " results: choose another output"
            )
        self._sidecar = {**self._sidecar, "samplers": {**known, name: digest}}
        self._sink.write_sidecar(self._sidecar)

    def finish(self) -> None:
        """Leaves the output whole at its address: joins the parts, if there are any.

        Raises:
            UserError: it cannot be written. Nothing is lost: the next run goes on from there.
        """
        self._sink.finish()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._sink.flush()
        except UserError:
            if error is None:  # else that one is to be told
                raise
        finally:
            if error is None:
                self._sink.close()
            else:
                self._sink.abandon()


def check_output(address: str, *, input: str | None = None) -> None:
    """Looks whether an output could be written, without leaving anything.

    In an object store it tries, with an object that it removes.

    Args:
        address: the output.
        input: the address that is read, which the output must not be.

    Raises:
        UserError: it could not.
    """
    check_name(address)
    fs, path = located(address)
    if input not in (None, "-"):
        input_fs, input_path = located(input)
        if is_local(fs) and is_local(input_fs):
            same = os.path.realpath(path) == os.path.realpath(input_path)
        else:
            same = fs == input_fs and path == input_path
        if same:
            raise UserError(f"{address}: cannot be written: it is the input")
    if is_local(fs):
        check_file(address, Path(path))
        return
    with reaching(address, "written"):
        if fs.isdir(path):
            raise UserError(f"{address}: cannot be written: it is a folder")
        fs.pipe_file(f"{path}.probe", b"{}\n")
        fs.rm(f"{path}.probe")
