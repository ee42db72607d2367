"""Rows through a fixed number of slots: a row that has ended makes room for the next one at once.

The host only hands out work and reads what came back. While it reads one chunk of steps, the device
already runs the next.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.decode import answer, decode, prefill
from entropix_jax.decode_state import (
    FINISHED_STOP,
    BranchLog,
    DecodeState,
    Recording,
    StepRecord,
)
from entropix_jax.loading import LanguageModel
from entropix_jax.memory import check_cache
from entropix_jax.preparation import (
    MAX_PREFILL,
    MAX_STEPS,
    PREFILL_WINDOW,
    bucket,
    chunk_size,
)
from entropix_jax.records import branchings, outcomes
from entropix_jax.results import Event
from entropix_jax.running import RunningRow
from entropix_jax.sampler.keys import row_key
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sharding import check_mesh
from entropix_jax.slots import (
    Arrival,
    Slots,
    admit,
    empty_slots,
    padded_ids,
    share_prefix,
)

_LOOK_SECONDS = 0.1  # how often the host would like to look, for a stream that flows
# Cache slots that a step reads, at least: each number is a program of its own.
DECODE_WINDOW = 512
_MIN_PREFILL = 16  # tokens of a prompt that are read in one call, at least
# Of so many slots one may stand empty before the device comes back for the next row.
_SLOTS_PER_EMPTY = 16


@dataclass(frozen=True)
class _Chunk:
    """Steps that the device was given, and whose rows they were."""

    steps: int
    rows: tuple[RunningRow | None, ...]
    records: StepRecord
    log: BranchLog


class Engine:
    """Runs rows. What is static lives here: the model, how many slots there are, and how large.

    `steps` counts the steps that were run, `useful` the slots of them that had a running row.
    """

    def __init__(
        self,
        model: LanguageModel,
        params: SamplerSettings,
        *,
        slots: int,
        capacity: int,
        recording: Recording,
    ) -> None:
        """Nothing is allocated before `run`.

        Args:
            params: any row's; they say what shapes, and what mechanisms, the others' have.
            capacity: cache slots of a row: no row may have more tokens than that.

        Raises:
            UserError: slots that cannot be split evenly over the model's mesh, or that memory has
                no room for.
        """
        mesh = None if model.rules is None else model.rules.mesh
        if mesh is not None:
            check_mesh(mesh, model.config, slots)
        check_cache(model.config, model.precision, slots=slots, capacity=capacity, mesh=mesh)
        self.steps = 0
        self.useful = 0
        self._model = model
        self._params = params
        self._rows: list[RunningRow | None] = [None] * slots
        self._capacity = capacity
        self._recording = recording
        self._source: Iterator[RunningRow | None] = iter(())
        self._more = True
        self._next: RunningRow | None = None
        self._chunk_steps = 1
        self._stopping = False

    @property
    def used(self) -> float:
        """The share of slots that had a running row, of the steps so far."""
        return self.useful / max(self.steps * len(self._rows), 1)

    def stop(self) -> None:
        """Asks the run to end after the event that is on its way. A signal handler may call it."""
        self._stopping = True

    def run(self, rows: Iterable[RunningRow | None]) -> Iterator[Event]:
        """Runs rows to their ends and gives the events, step by step. A row is fetched when there
        is a slot for it, or soon will be.

        Where `rows` gives None the next row is not there yet: those that are go on meanwhile, and
        it is asked again. So it should wait a moment where there are none.
        """
        self._source, self._more = iter(rows), True
        self._slots = empty_slots(
            self._model.config,
            len(self._rows),
            self._params,
            capacity=self._capacity,
            dtype=self._model.precision.activations,
            rules=self._model.rules,
        )
        try:
            yield from self._run()
        finally:  # the results may be kept for long: the cache goes at once
            del self._slots

    def _run(self) -> Iterator[Event]:
        in_flight: deque[_Chunk] = deque()
        moved = True
        while not self._stopping:
            self._fill()
            while len(in_flight) < 2 and self._wants_more(sum(c.steps for c in in_flight)):
                in_flight.append(self._dispatch())
            if in_flight:
                before, moved = moved, (yield from self._read(in_flight.popleft()))
                # One chunk may come back as it went: the one before it has ended rows, or filled
                # the window. The next one was given with that in mind.
                if not (moved or before):
                    raise RuntimeError("rows are running, but no step is made")
            elif not self._more:
                return

    def _fetch(self) -> RunningRow | None:
        """The row that comes next, if it is there."""
        if self._next is None and self._more:
            try:
                self._next = next(self._source)
            except StopIteration:
                self._more = False
        return self._next

    def _fill(self) -> None:
        """Puts rows into the slots that are free, as long as there are more of them."""
        arrived = []
        for number, row in enumerate(self._rows):
            if row is not None and row.running:
                continue
            if self._stopping or (fresh := self._fetch()) is None:
                break
            fresh.started = time.perf_counter()
            self._rows[number], self._next = fresh, None
            self._slots = admit(self._slots, jnp.int32(number), self._arrival(number))
            arrived.append(number)
        else:  # whether another one waits says when the device is to come back
            self._fetch()
        if arrived:
            with self._decode_compiles():
                self._prefill(arrived)

    @contextmanager
    def _decode_compiles(self) -> Iterator[None]:
        """Meanwhile the first chunk's program is made, or read from the cache: the host is idle
        while a prompt is read. Any error comes again, and is told, when it is called."""

        def compile_decode() -> None:
            with suppress(Exception):
                decode.lower(*arguments, **static).compile()

        if (
            self.steps or self._model.rules is not None
        ):  # made already; a mesh, whose layout differs
            yield
            return
        arguments, static = self._call(self._slots)
        # Prefilling donates the state: its shapes alone are looked at.
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        compiling = Thread(target=compile_decode)
        compiling.start()
        try:
            yield
        finally:
            compiling.join()

    def _arrival(self, number: int) -> Arrival:
        row = self._rows[number]
        assert row is not None
        request = row.row.request
        history = np.zeros(self._capacity, np.int32)
        history[: len(request.prompt)] = request.prompt
        return Arrival(
            history=history,
            prompt_length=np.int32(len(request.prompt)),
            budget=np.int32(row.budget),
            key=row_key(row.seed, request.row_id),
            asks_for_text=np.bool_(row.retrieve is not None),
            asks_for_choice=np.bool_(row.ask is not None),
            sampler=row.params,
            eos_ids=padded_ids(row.eos_ids),
        )

    def _prefill(self, arrived: list[int]) -> None:
        """Caches the prompts of rows that have just come, but for their last tokens. One that a row
        in another slot has too, or had, is not run again."""
        prompts = {
            number: tuple(row.row.request.prompt)
            for number, row in enumerate(self._rows)
            if row is not None
        }
        cached = {prompt: number for number, prompt in prompts.items() if number not in arrived}
        for number in arrived:
            prompt = prompts[number]
            state = self._slots.state
            if prompt in cached:
                source, count = jnp.int32(cached[prompt]), jnp.int32(len(prompt) - 1)
                state = share_prefix(state, source, jnp.int32(number), count)
            else:
                cached[prompt] = number
                state = self._prefilled(state, number, prompt[:-1])
            self._slots = replace(self._slots, state=state)

    def _prefilled(self, state: DecodeState, number: int, prompt: tuple[int, ...]) -> DecodeState:
        """Part by part: handed out all at once, they could not be stopped."""
        model, done = self._model, 0
        while done < len(prompt) and not self._stopping:
            left = len(prompt) - done
            size = min(bucket(left, _MIN_PREFILL), self._prefill_size(len(prompt)))
            tokens = np.zeros((1, size), np.int32)
            part = prompt[done : done + size]
            tokens[0, : len(part)] = part
            state = prefill(
                model.params,
                state,
                tokens,
                jnp.full(1, len(part), jnp.int32),
                # One slot is all there are: nothing to pick out, and nothing to copy.
                None if len(self._rows) == 1 else jnp.full(1, number, jnp.int32),
                config=model.config,
                window=min(bucket(done + size, PREFILL_WINDOW), self._capacity),
                check=self._recording.check,
            )
            done += len(part)
            jax.block_until_ready(state.cache.length)
        return state

    def _prefill_size(self, length: int) -> int:
        return chunk_size(self._model.config, length, 1, MAX_PREFILL)

    def _wants_more(self, steps: int) -> bool:
        """Whether a row will still run after the `steps` that are on their way, as far as is
        known."""
        if self._stopping:
            return False
        running = (row for row in self._rows if row is not None and row.running)
        return any(steps == 0 or row.left > steps for row in running)

    def _dispatch(self) -> _Chunk:
        """Gives the device a chunk of steps; it ends early where rows wait and slots are free."""
        slots = self._with_answers(self._slots)
        steps = self._chunk_steps
        arguments, static = self._call(slots)
        state, records, log = decode(*arguments, **static)
        self._slots = replace(slots, state=state)
        return _Chunk(steps, tuple(self._rows), records, log)

    def _call(self, slots: Slots) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `decode` for the next chunk: traced ones, and static ones."""
        number = len(self._rows)
        fewest = number + 1 - max(number // _SLOTS_PER_EMPTY, 1) if self._next else 1
        traced = (
            self._model.params,
            slots.sampler,
            slots.eos_ids,
            slots.state,
            jnp.int32(self._chunk_steps),
            jnp.int32(fewest),
        )
        static = {
            "config": self._model.config,
            "window": self._window(),
            "max_steps": MAX_STEPS,
            "recording": self._recording,
        }
        return traced, static

    def _window(self) -> int:
        """Slots enough for the longest row as far as it is known, and no more: a row that is longer
        already ends the chunk before its first step. So how many slots a step reads, and with them
        the last digits of what it computes, depends on the rows and not on when the host looked."""
        longest = max(row.known for row in self._rows if row is not None)
        return min(bucket(longest, DECODE_WINDOW), self._capacity)

    def _read(self, chunk: _Chunk) -> Generator[Event, None, bool]:
        """What a chunk did, once it has come back. Returns whether it did a step at all."""
        asked = time.perf_counter()
        log = chunk.log if int(chunk.log.count) else None
        records, log = jax.device_get((chunk.records, log))
        self._pace(time.perf_counter() - asked)
        decode_text = self._model.tokenizer.decode_within
        live = records.live
        branched = {}
        if log is not None:  # each data shard's part of it has room that is not used
            used = np.unique(records.branch[live & (records.branch >= 0)])
            log = jax.tree.map(lambda x: x[used], replace(log, count=log.committed))
            log = replace(log, count=np.int32(len(used)))
            branched = dict(zip(used, branchings(log, self._recording, decode_text), strict=True))
        self.steps += int(live.any(axis=-1).sum())
        rows = [chunk.rows[number] for number in np.nonzero(live)[1]]
        happened = outcomes(
            [row.number for row in rows if row is not None],
            jax.tree.map(lambda x: x[live], records),
            self._recording,
            decode_text,
            [mechanism.name for mechanism in self._params.mechanisms],
        )
        for row, outcome in zip(rows, happened, strict=True):
            if row is None or not row.running:
                continue
            self.useful += 1
            branching = branched[outcome.branch] if outcome.branch >= 0 else None
            for event in row.take(outcome, branching, lambda: self._stopping):
                yield event
                # What took a token's place comes next, and belongs to it.
                if self._stopping and not event.retracted:
                    return True
        return bool(live.any())

    def _with_answers(self, slots: Slots) -> Slots:
        """Tells the device what the host knows: answers, and rows that have ended. One that a stop
        string has ended may have gone on meanwhile, to wait or to an end of its own; of one that
        failed all tokens are cached, the last one too. Neither is to fill the window."""
        state = slots.state
        for number, row in enumerate(self._rows):
            if row is None or row.answer is None:
                continue
            tokens, action = row.answer
            row.answer = None
            padded = np.zeros(self._capacity, np.int32)
            padded[: len(tokens)] = tokens
            state = answer(
                state,
                jnp.int32(number),
                jnp.asarray(padded),
                jnp.int32(len(tokens)),
                jnp.int32(action),
                jnp.int32(max(row.sampler.values["inject.cooldown"], 1)),
            )
        ended = [
            row is not None and row.row.finish_reason in ("stop", "error") for row in self._rows
        ]
        if any(ended):
            state = replace(state, finish=jnp.where(np.array(ended), FINISHED_STOP, state.finish))
        return replace(slots, state=state)

    def _pace(self, waited: float) -> None:
        """More steps a chunk while chunks come fast: a first token at once, then a steady flow."""
        if waited < _LOOK_SECONDS / 2:
            self._chunk_steps = min(2 * self._chunk_steps, MAX_STEPS)
        elif waited > _LOOK_SECONDS:
            self._chunk_steps = max(self._chunk_steps // 2, 1)
