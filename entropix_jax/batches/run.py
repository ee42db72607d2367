"""The run of a batch: records in, rows through the engine, results out."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from entropix_jax.batches.ahead import Ahead
from entropix_jax.batches.index import hash_of
from entropix_jax.batches.places import local_path
from entropix_jax.batches.source import BadRecord, Record, read_records
from entropix_jax.calibration.automatic import May, calibrate_sampler
from entropix_jax.decode_state import Recording
from entropix_jax.engine import Engine
from entropix_jax.errors import UserError
from entropix_jax.files import replacing
from entropix_jax.loading import LanguageModel
from entropix_jax.preparation import check_recording, encode_prompt, sampler_params
from entropix_jax.results import Event, Request, Row
from entropix_jax.running import RunningRow, budget_of
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.slots import padded_ids
from entropix_jax.trace import TraceWriter, footer, header

_COUNTED_BYTES = 1 << 26  # a larger input is not read through to know how many records it has
_PATIENCE = 0.02  # seconds to wait for a record while the device works, too
_SAMPLERS = 256  # that records name are kept at hand
_LONGEST_NAME = 150  # of a trace's file, in bytes, before its suffix


@dataclass(frozen=True)
class Defaults:
    """What holds for a record that does not say otherwise, and what holds for all."""

    sampler: Sampler
    max_new_tokens: int = 256
    seed: int = 0
    chat: bool | None = None  # None: as the model does
    system: str | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False


@dataclass
class Progress:
    """How far a run is."""

    done: int = 0  # records that have a result, those of earlier runs included
    failed: int = 0  # of this run's, those whose result is an error
    tokens: int = 0  # committed in this run


@dataclass
class _Job:
    """A record whose row runs."""

    record: Record
    row: RunningRow
    first_token: float | None = None
    events: list[Event] = field(default_factory=list)  # for its trace


class BatchRun:
    """Runs records and hands each one's result out as soon as it is there."""

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
        thresholds: May = "make",
    ) -> None:
        """Checks what can be checked before anything is computed.

        Args:
            slots: rows that run side by side.
            capacity: cache slots of a row: what its prompt and its new tokens may take together.
            recording: what the tokens of traces hold besides the usual.
            traces: a folder for a trace of each record.
            name: what traces call the model.
            thresholds: how the samplers get the model's own, see `calibrate_sampler`.

        Raises:
            UserError: a sampler, a recording, end tokens or a way to put prompts that do not fit
                the model.
        """
        self.progress = Progress()
        self._stopping = False
        self._model = model
        self._defaults = defaults
        self._capacity = capacity
        self._recording = recording or Recording()
        check_recording(model, self._recording)
        for ends in (model.generation.eos_ids, model.turn_end_ids):
            padded_ids(ends)
        self._chat = model.is_chat_model if defaults.chat is None else defaults.chat
        encode_prompt(model, "any prompt", chat=self._chat, system=defaults.system)
        self._traces = traces
        self._name = name
        self._thresholds = thresholds
        own = calibrate_sampler(defaults.sampler, model, thresholds)
        self._own = (own, sampler_params(model, own))
        self._sampler = functools.lru_cache(_SAMPLERS)(self._load_sampler)
        self._jobs: dict[int, _Job] = {}
        self.engine = Engine(
            model, self._own[1], slots=slots, capacity=capacity, recording=self._recording
        )

    def run(
        self,
        records: Iterable[Record | BadRecord],
        write: Callable[[Record | BadRecord, Mapping[str, Any]], None],
        is_done: Callable[[Record | BadRecord], bool] = lambda record: False,
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs the records and gives `write` each result as it comes, not in their order.

        A record that cannot be run has an `error` for its result. After `stop` rows that are on
        their way have none.

        Args:
            records: are read in a thread of their own. While they do not come, what is there runs.
            is_done: whether a record has its result already.
            looked: is called after each token and each record, and while nothing comes.
        """
        with Ahead(records) as ahead:
            for event in self.engine.run(self._rows(ahead, write, is_done, looked)):
                job = self._jobs[event.row]
                if event.token is not None:
                    if job.first_token is None:
                        job.first_token = time.perf_counter()
                    self.progress.tokens += 1 if not event.retracted else 0
                    if self._traces is not None:
                        job.events.append(event)
                if not job.row.running:
                    self._end(job, write)
                looked()

    def stop(self) -> None:
        """Asks the run to end after the event that is on its way. A signal handler may call it."""
        self._stopping = True
        self.engine.stop()

    def _rows(
        self,
        records: Ahead[Record | BadRecord],
        write: Callable[[Record | BadRecord, Mapping[str, Any]], None],
        is_done: Callable[[Record | BadRecord], bool],
        looked: Callable[[], None],
    ) -> Iterator[RunningRow | None]:
        """The rows of the records that have no result, None while the next one does not come."""
        for number in itertools.count():
            looked()
            if self._stopping:
                return
            try:
                record = records.get(_PATIENCE)
            except queue.Empty:
                yield None
                continue
            if record is None:
                return
            if is_done(record):
                continue
            try:
                if isinstance(record, BadRecord):
                    raise UserError(record.error)
                row = self._row(number, record)
            except UserError as error:
                self.progress.done += 1
                self.progress.failed += 1
                write(record, {"error": str(error), "finish_reason": "error"})
                continue
            self._jobs[number] = _Job(record, row)
            yield row

    def _row(self, number: int, record: Record) -> RunningRow:
        model, own = self._model, self._defaults
        chat = self._chat or record.messages is not None
        if record.messages is None:
            assert record.prompt is not None
            prompt = encode_prompt(model, record.prompt, chat=chat, system=own.system)
        else:
            prompt = encode_prompt(model, record.messages, chat=True)
        request = Request(prompt, record.id, record.max_new_tokens or own.max_new_tokens)
        sampler, params = self._own if record.sampler is None else self._sampler(record.sampler)
        ends = model.turn_end_ids if chat else model.generation.eos_ids
        return RunningRow(
            number,
            Row(request),
            model,
            sampler,
            params,
            budget=budget_of(model, request, self._capacity),
            seed=own.seed if record.seed is None else record.seed,
            eos_ids=() if own.ignore_eos else ends,
            stop=own.stop,
        )

    def _load_sampler(self, name: str) -> tuple[Sampler, SamplerSettings]:
        sampler = load_sampler(name)
        for mechanism in self._own[0].mechanisms[len(sampler.mechanisms) :]:  # of the user's
            sampler = sampler.with_mechanism(mechanism)
        sampler = calibrate_sampler(sampler, self._model, self._thresholds)
        return sampler, sampler_params(self._model, sampler)

    def _end(
        self, job: _Job, write: Callable[[Record | BadRecord, Mapping[str, Any]], None]
    ) -> None:
        """Gives out the result of a record whose row has ended."""
        row, started = job.row.row, job.row.started
        assert started is not None
        timings = {"seconds": time.perf_counter() - started}
        if job.first_token is not None:
            timings["first_token"] = job.first_token - started
        timings = {name: round(seconds, 4) for name, seconds in timings.items()}
        if self._traces is not None:
            self._write_trace(self._traces, job, timings)
        del self._jobs[job.row.number]
        self.progress.done += 1
        self.progress.failed += row.error is not None
        tokens = row.tokens
        means = {
            f"mean_{name}": sum(getattr(token, name) for token in tokens) / len(tokens)
            for name in ("entropy", "varentropy")
            if tokens
        }
        result = row.to_json() | means
        if job.record.sampler is not None:  # a file's values may change from run to run
            values = json.dumps(dict(job.row.sampler.values), sort_keys=True)
            result["sampler_digest"] = f"{hash_of(values.encode()):015x}"
        ids = [token.token_id for token in tokens]
        write(job.record, result | {"token_ids": ids, "timings": timings})

    def _write_trace(self, folder: Path, job: _Job, timings: Mapping[str, float]) -> None:
        """The trace of one record, which appears whole or not at all."""
        sampler, request = job.row.sampler, job.row.row.request
        path = folder / f"{file_name(job.record.id)}.jsonl"
        with replacing(path) as scratch, TraceWriter(scratch) as writer:
            writer.write(
                header(
                    model=self._name,
                    model_config=self._model.config,
                    precision=self._model.precision,
                    sampler=sampler.name,
                    sampler_values=sampler.values,
                    seed=job.row.seed,
                    prompt=self._model.tokenizer.decode(request.prompt, skip_special=False),
                    prompt_tokens=request.prompt,
                )
            )
            for event in job.events:
                assert event.token is not None
                # A trace stands alone: its one row is row 0.
                line = event.token.to_json(retracted=event.retracted) | {"row": 0}
                writer.write(line)
            writer.write(footer([{"row": 0, **job.row.row.to_json()}], timings))


def count_records(address: str, share: tuple[int, int] = (0, 1)) -> int | None:
    """How many records a share of a file has, for a display; None where that would take long to
    know. A pipe is left alone: it is read once."""
    if address == "-":  # whatever files there are
        return None
    try:
        path = local_path(address)
        if path is None or not path.is_file() or path.stat().st_size > _COUNTED_BYTES:
            return None
    except (OSError, ValueError):  # not a file of this machine
        return None
    return sum(1 for _ in read_records(address, share=share))


def file_name(record_id: str) -> str:
    """A name for a file that no other id has: the id, where it can be a name, with the other
    characters as in a URL; a long one is cut and told apart by its hash."""
    name = quote(record_id, safe=" ,;=@+()[]{}!#$&'")
    name = name.replace(".", "%2E", 1) if name.startswith(".") else name
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}~{hashlib.sha256(record_id.encode()).hexdigest()[:16]}"
