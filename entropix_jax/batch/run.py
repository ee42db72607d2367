"""Runs records through the engine and hands out their results."""

import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from entropix_jax.batch.records import BadRecord, Record, content_hash, read_records
from entropix_jax.batch.storage import local_path
from entropix_jax.engine.calibrated import CalibratedSampler, calibrate_sampler
from entropix_jax.engine.loop import Engine
from entropix_jax.engine.programs import Programs
from entropix_jax.engine.records import check_recording
from entropix_jax.engine.request import Request, padded_ids
from entropix_jax.engine.results import Row, Rows
from entropix_jax.engine.state import Recording
from entropix_jax.engine.tokens import encode_prompt, prompt_messages
from entropix_jax.engine.trace import header
from entropix_jax.errors import UserError
from entropix_jax.host.files import replacing
from entropix_jax.host.lookup import Lookup
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler

_COUNTED_BYTES = 1 << 26  # a larger input is not read through to know how many records it has
_SAMPLERS = 256  # named samplers that are cached
_LONGEST_NAME = 150  # of a trace's file, in bytes, before its suffix

Write = Callable[[Record | BadRecord, Mapping[str, Any]], None]
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Defaults:
    """Settings of records that have none of their own, and of all records."""

    sampler: Sampler
    max_new_tokens: int = 256
    seed: int = 0
    chat: bool | None = None  # None: as the model does
    system: str | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    escape_special: bool = False
    lookup: Lookup | None = None


class EngineRun:
    """A run in an engine, for a line of progress."""

    engine: Engine

    tokens = 0  # committed ones

    @property
    def programs(self) -> Programs:
        """The engine's programs, which say what the run waits for."""
        return self.engine.programs

    @property
    def usage(self) -> str:
        """The share of slots with a row."""
        return f"{self.engine.used:.0%} of slots used"


class RecordRun:
    """A run of records, which `stop` ends. `left` is the number of records to run, if known."""

    left: int | None = None
    _stopping = _reading = False

    def stop(self) -> None:
        """Ends the reading of records. Safe to call in a signal handler."""
        self._stopping = True
        if self._reading:  # a read would continue after the handler
            raise KeyboardInterrupt

    def _read(self, records: Iterator[_Record]) -> Iterator[_Record]:
        """The records until `stop`, which may leave a blocked read."""
        while True:
            try:
                self._reading = True
                record = next(iter(()) if self._stopping else records)
            except (KeyboardInterrupt, StopIteration):
                return
            finally:
                self._reading = False
            yield record


class BatchRun(EngineRun, RecordRun):
    """Runs records; each result is written as soon as it is complete.

    `tokens` counts the run's committed tokens, `failed` its records whose result is an error.
    `save_trace` stores a record's trace, and returns more fields for its result.
    """

    save_trace: Callable[[Record, Rows], Mapping[str, Any]] | None

    def __init__(
        self,
        model: LanguageModel,
        defaults: Defaults,
        *,
        slots: int,
        capacity: int,
        recording: Recording | None = None,
        traces: Path | None = None,
        name: str = "",
    ) -> None:
        """Checks everything that can be checked before computing.

        `slots` rows run concurrently, each in a cache of `capacity` positions. Where there is a
        folder for `traces`, they hold the fields of `recording` and the model's `name`. UserError
        if a sampler, recording, end token or chat setting does not fit the model."""
        self.tokens = self.failed = 0
        self._model = model
        self._defaults = defaults
        recording = check_recording(model, recording)
        for ends in (model.eos_ids, model.turn_end_ids):
            padded_ids(ends)
        self._chat = model.is_chat_model if defaults.chat is None else defaults.chat
        encode_prompt(model, "any prompt", chat=self._chat, system=defaults.system)
        self.slots = slots
        self.save_trace = None if traces is None else functools.partial(_save_trace, traces)
        self._name = name
        # Of records that name none, and of those that do.
        self.sampler = calibrate_sampler(defaults.sampler, model)
        self._named_sampler = functools.lru_cache(_SAMPLERS)(self._load_sampler)
        self.engine = Engine(model, slots=slots, capacity=capacity, recording=recording)

    def run(
        self,
        records: Iterable[Record | BadRecord | None],
        write: Write,
        is_done: Callable[[Record | BadRecord], bool] = lambda record: False,
    ) -> None:
        """Runs the records, read as slots become free, and passes each result to `write`, in order
        of completion. None stands for no record yet, and ends the run if no row runs.

        A record that cannot be run has an `error` as its result. After `stop`, unfinished rows have
        none.
        """

        def requests() -> Iterator[Request | None]:
            for record in self._read(iter(records)):
                if record is None:
                    yield None
                    continue
                if is_done(record):
                    continue
                try:
                    if isinstance(record, BadRecord):
                        raise UserError(record.error)
                    request = self._request(record)
                    self.engine.check(request)
                except UserError as error:
                    self.failed += 1
                    write(record, {"error": str(error), "finish_reason": "error"})
                    continue
                yield request

        for event in self.engine.run(requests()):
            self.tokens += event.token is not None and not event.retracted
            if event.row.finish_reason is not None:
                self.failed += event.row.error is not None
                write(event.row.request.tag, self._result(event.row))

    def stop(self) -> None:
        """Ends the run after the current event. Safe to call in a signal handler."""
        self.engine.stop()
        super().stop()

    def _request(self, record: Record) -> Request:
        model, own = self._model, self._defaults
        is_plain = record.messages is None
        chat = self._chat or not is_plain
        given: Any = (record.prompt or "") if is_plain else record.messages
        system = own.system if is_plain else None
        escape = own.escape_special
        prompt = encode_prompt(model, given, chat=chat, system=system, escape_special=escape)
        sampler = self.sampler if record.sampler is None else self._named_sampler(record.sampler)
        return Request(
            prompt,
            sampler,
            max_new_tokens=record.max_new_tokens or own.max_new_tokens,
            row_id=record.id,
            seed=own.seed if record.seed is None else record.seed,
            eos_ids=() if own.ignore_eos else model.end_ids(chat=chat),
            stop=own.stop,
            lookup=own.lookup,
            tag=record,
            messages=prompt_messages(given, chat=chat, system=system),
            number=0,  # each is the only one of its trace
        )

    def _load_sampler(self, name: str) -> CalibratedSampler:
        """A sampler with the user's own mechanisms: all samplers of a run have the same."""
        sampler = load_sampler(name, self.sampler.mechanisms[len(MECHANISMS) :])
        return calibrate_sampler(sampler, self._model)

    def _result(self, row: Row) -> dict[str, Any]:
        """The result of a row that has finished, whose trace is written first."""
        record, tokens = row.request.tag, row.tokens
        assert row.started is not None
        timings = {"seconds": round(time.perf_counter() - row.started, 4)}
        if row.first_token is not None:
            timings["first_token"] = round(row.first_token - row.started, 4)
        result = row.to_json()
        if self.save_trace is not None:
            own = row.request
            about: Any = {"seed": own.seed, "name": self._name, "messages": own.messages}
            head = header(self._model, own.sampler, own.prompt, **about)
            result |= self.save_trace(record, Rows([row], head, timings))
        for name in ("entropy", "varentropy") if tokens else ():
            result[f"mean_{name}"] = sum(getattr(t, name) for t in tokens) / len(tokens)
        if record.sampler is not None:  # a file may have changed by the next run
            values = json.dumps(dict(row.request.sampler.values), sort_keys=True)
            result["sampler_digest"] = content_hash(values.encode())
        return result | {"token_ids": [t.token_id for t in tokens], "timings": timings}


def _save_trace(folder: Path, record: Record, rows: Rows) -> dict[str, Any]:
    """Writes the trace of a record to a folder, atomically."""
    with replacing(folder / f"{file_name(record.id)}.jsonl") as scratch:
        rows.save_trace(scratch)
    return {}


def count_records(address: str) -> int | None:
    """The number of records in a local file, for the progress display; None for large files, pipes
    and URLs."""
    path = None if address == "-" else local_path(address)
    if path is None or not path.is_file() or path.stat().st_size > _COUNTED_BYTES:
        return None
    return sum(1 for _ in read_records(address))


def file_name(record_id: str) -> str:
    """A unique file name for an id: URL-quoted, and shortened with a hash if it is long."""
    name = quote(record_id, safe=" ,;=@+()[]{}!#$&'")
    name = name.replace(".", "%2E", 1) if name.startswith(".") else name
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}~{hashlib.sha256(record_id.encode()).hexdigest()[:16]}"
