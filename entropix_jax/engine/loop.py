"""Continuous batching: rows run in parallel in a fixed number of slots, and a row that ends frees
its slot for the next one.

The device runs chunks of decode steps. While the host reads one chunk back, the device already runs
the next.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.calibrated import CalibratedSampler
from entropix_jax.engine.listed import ProgramList, compile_listed
from entropix_jax.engine.memory import check_cache
from entropix_jax.engine.moves import Roster
from entropix_jax.engine.programs import Programs, Steps
from entropix_jax.engine.prompts import PromptReader
from entropix_jax.engine.records import outcomes
from entropix_jax.engine.request import Request, check_request
from entropix_jax.engine.results import Event
from entropix_jax.engine.row import RunningRow
from entropix_jax.engine.shapes import MAX_STEPS, bucket, decode_window
from entropix_jax.engine.slots import Layout, answer, emptied, empty_slots, insert, keep, widen
from entropix_jax.engine.state import RUNNING, STOPPED, DecodeState, Recording, StepRecord
from entropix_jax.host.arguments import check_integer
from entropix_jax.model.loading import LanguageModel
from entropix_jax.model.mesh import DATA, check_mesh
from entropix_jax.packed import Packed
from entropix_jax.sampler.settings import MAX_WIDTH, Parts

_LOOK_SECONDS = 0.1  # target time between two reads by the host
_SLOTS_PER_EMPTY = 16  # one slot in this many may idle before a chunk ends early
_SLOTS_PER_LANE = 6  # where rows may fork
_MANY_TOKENS = 64  # budget from which the program with lanes is compiled ahead
_KEPT_BLOCK = 64  # the kept caches have a power of two of tokens, at least this many
_POLL_SECONDS = 0.05  # between two looks for requests while all rows wait for the host
_MAX_IDLE = 8  # consecutive chunks without a step; more is a defect


def shared_lanes(slots: int, needed: int = MAX_WIDTH - 1) -> int:
    """Returns the number of lanes that `slots` slots share, where one row needs `needed` (by
    default the maximum): 0 if `needed` is 0."""
    return max(needed, slots // _SLOTS_PER_LANE) if needed else 0


@dataclass(frozen=True)
class _Chunk:
    """Steps that the device was given, and the rows that were in its slots."""

    steps: int
    rows: tuple[RunningRow | None, ...]
    layout: Layout
    records: Packed[StepRecord]
    forked: jax.Array  # bool, whether the steps after these need the lanes


class Engine(Roster):
    """Runs requests on one model, `slots` at a time.

    `steps` counts decode steps, `useful` their slots with a running row.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        slots: int,
        capacity: int,
        recording: Recording | None = None,
        look: float = _LOOK_SECONDS,
        keep: bool = False,
        listed: ProgramList | None = None,
    ) -> None:
        """Nothing is allocated before `run`.

        Args:
            capacity: cache slots of a row: its prompt and its new tokens together.
            recording: optional parts of each token's record.
            look: maximum seconds of a chunk of steps; a new request waits for up to two chunks.
            keep: the caches outlive a run and keep their memory. A row only reads tokens that its
                slot has not cached before. Its last digits then depend on the row before.
            listed: only these programs are used, on one device, see `compile`. Long texts are read
                between the chunks of other rows. A row's last digits then depend on the other rows.

        UserError if slots or capacity are below 1, slots cannot be split evenly over the model's
        mesh, or they do not fit into memory.
        """
        slots = check_integer("slots", slots, 1)
        capacity = check_integer("capacity", capacity, 1)
        super().__init__(model, slots, capacity)
        if model.mesh is not None:
            check_mesh(model.mesh, model.config, slots)
        self.steps = 0
        self.useful = 0
        self._recording = recording or Recording()
        self._look = look
        self._keep = keep
        self._listed = listed
        self.programs = Programs(model, self._recording, () if listed is None else listed.sets)
        self._parts = Parts(())  # static parts of the decode steps
        self._reading: list[int] = []  # slots whose texts are read part by part
        self._paused: list[int] = []  # of them, those that are STOPPED on the device
        self._reader = PromptReader(model, capacity=capacity, keep=keep, programs=self.programs)
        self._chunk_steps = 1
        self._unpaced = 0  # in-flight chunks to exclude from pacing
        self._forked = False
        self._stopping = False
        self._kept: tuple[DecodeState, list[RunningRow | None]] | None = None  # of the run before
        self._layout = Layout(slots, 0, 1 if model.mesh is None else model.mesh.shape[DATA])
        if listed is not None:
            assert model.mesh is None
            self._layout = replace(self._layout, lanes=shared_lanes(slots, listed.lanes))
        self._check_cache(self._layout.lanes)

    @property
    def used(self) -> float:
        """Share of slots with a running row, over the steps so far."""
        return self.useful / max(self.steps * self._layout.slots, 1)

    def check(self, request: Request) -> None:
        """Raises UserError if a request cannot run here, see `check_request`."""
        check_request(self._model, request, self._capacity)

    def stop(self) -> None:
        """Requests the end of the run after the current event. Safe in a signal handler."""
        self._stopping = True

    def run(
        self, requests: Iterable[Request | None], between: Callable[[], None] | None = None
    ) -> Iterator[Event]:
        """Runs requests until all have ended, and yields the events, step by step.

        Args:
            requests: fetched one by one, when a slot is free or soon will be. None means that no
                request is available yet. If no row runs, None ends the run, so an iterator that
                waits for requests must block then.
            between: called before each chunk of steps, after all events of earlier chunks.

        UserError if `check` rejects a request, samplers have different mechanisms, or lanes for
        branches do not fit into memory."""
        self._slots = [None] * len(self._slots)
        self._waiting.clear()
        self._source = iter(requests)
        first = self._fetch()
        if first is None:
            return
        self._chunk_steps = 1
        kept, self._kept = self._kept, None
        if kept is None or first.request.sampler.mechanisms != self._parts.mechanisms:
            kept = None  # its memory is free before more is allocated
            self._parts = Parts(first.request.sampler.mechanisms)
            if self._listed is None:
                self._layout = replace(self._layout, lanes=self._lanes_for(first))
                self._check_cache(self._layout.lanes)
            self._state = self._empty_state(first.request.sampler)
        else:
            self._state = emptied(kept[0])
            self._slots, kept = kept[1], None
            for row in self._slots:
                if row is not None:
                    row.replaced = True  # it has ended
        try:
            yield from self._run(between or (lambda: None))
            if self._keep:
                self._kept = self._state, self._slots
        finally:  # the results may be kept for long: free the cache now
            del self._state
            self._known.clear()
            self._next_number = 0
            self._forked, self._stopping, self._unpaced = False, False, 0
            self._reading, self._paused = [], []

    def _empty_state(self, sampler: CalibratedSampler) -> DecodeState:
        return empty_slots(
            self._model.config,
            self._layout,
            sampler.settings,
            mechanisms=sampler.mechanisms,
            capacity=self._capacity,
            dtype=self._model.precision.activations,
            mesh=self._model.mesh,
        )

    def _run(self, between: Callable[[], None]) -> Iterator[Event]:
        in_flight: deque[_Chunk] = deque()
        idle = 0
        while not self._stopping:
            began = time.perf_counter()
            between()
            for row in self._running.values():
                row.poll()
            self._insert_arrivals()
            if time.perf_counter() - began > self._look / 2:
                self._unpaced = len(in_flight)
            while len(in_flight) < 2 and self._wants_more(sum(c.steps for c in in_flight)):
                in_flight.append(self._dispatch())
            if not in_flight:
                if self._reading or self._wait_for_host():
                    continue
                return
            moved = yield from self._read_back(in_flight.popleft())
            # Chunks may make no step: the one before ended rows, filled the window, or needs the
            # other program, and that twice where a stop string ends the row that is forked.
            idle = 0 if moved else idle + 1
            if idle > _MAX_IDLE:
                raise RuntimeError("rows are running, but no step is made")

    def _wait_for_host(self) -> bool:
        """Waits until the host has an answer, for at most `_POLL_SECONDS`. Returns False if no row
        waits for one."""
        futures = [row.pending.future for row in self._running.values() if row.pending]
        if futures:
            wait(futures, _POLL_SECONDS, FIRST_COMPLETED)
        return bool(futures)

    # Insert

    def _insert_arrivals(self) -> None:
        """Puts the next rows into the free slots, and caches their texts."""
        arrived = []
        for slot, row in enumerate(self._slots):
            if row is not None and row.running:
                if row.moved:
                    self._insert(slot, row, cached=row.cached)
                    if row.cached < row.to_cache:
                        arrived.append(slot)
                continue
            if self._stopping or self._fetch() is None:
                continue
            fresh = self._waiting.popleft()
            if row is not None:
                self._keep_cache(slot, row)
            self._slots[slot] = fresh
            if row is not None and fresh.row.tokens and row.has_cached(fresh):
                self._insert(slot, fresh, cached=fresh.to_cache)
            else:
                shared = row.shared(fresh) if self._keep and row is not None else 0
                self._insert(slot, fresh, cached=shared)
                arrived.append(slot)
        if not self._stopping:  # a waiting row makes the next chunk return early
            self._fetch()
        self._read_texts(arrived)

    def _read_texts(self, arrived: Sequence[int]) -> None:
        """Caches the texts of new rows and of rows that are only partly cached. With a list of
        programs it caches one part per call."""
        rows = {slot: row for slot, row in enumerate(self._slots) if row is not None}
        running = self._running
        reading = [slot for slot in dict.fromkeys((*self._reading, *arrived)) if slot in running]
        before = self._reader.read

        def stops() -> bool:
            return self._stopping or (self._listed is not None and self._reader.read > before)

        if reading:
            self._compile_ahead()
            self._state = self._reader.cache(self._state, self._layout, rows, reading, stops)
        self._reading = [slot for slot in reading if rows[slot].cached < rows[slot].to_cache]

    def _insert(self, slot: int, row: RunningRow, cached: int) -> None:
        """Puts a row into a slot that has cached the first `cached` tokens of its text."""
        row.row.started = row.row.started or time.perf_counter()
        row.moved = False
        row.cached = cached
        self._parts = replace(self._parts, used=self._parts.used | row.request.sampler.parts.used)
        arrival = row.arrival(self._parts.mechanisms, self._capacity)
        if (lanes := self._lanes_for(row)) > self._layout.lanes:
            self._check_cache(lanes)
            self._state = widen(self._state, self._layout, lanes)
            self._layout = replace(self._layout, lanes=lanes)
        arguments = self._state, self._layout.indices[slot], arrival
        mechanisms = self._parts.mechanisms
        self._state = self.programs.call("insert", insert, arguments, mechanisms=mechanisms)

    def _keep_cache(self, slot: int, row: RunningRow) -> None:
        """Copies the cache of a row that has ended, if it may be forked later. With kept slots or a
        list of programs, last digits depend on other rows anyway."""
        kept = row.row.kept
        if kept is None or not row.cached or self._keep or self._listed is not None:
            return
        size = min(bucket(row.cached, _KEPT_BLOCK), self._capacity)
        arguments = self._state, self._layout.indices[slot]
        kept.ids = row.ids[: row.cached]
        kept.layers = self.programs.call(f"keep {size}", keep, arguments, size=size)

    def _lanes_for(self, row: RunningRow) -> int:
        """The lanes of a shard that a row needs."""
        slots = self._layout.slots // self._layout.shards
        return shared_lanes(slots, row.request.sampler.lanes)

    def _check_cache(self, lanes: int) -> None:
        """UserError unless the slots and `lanes` lanes of each shard fit into memory."""
        slots = self._layout.slots + self._layout.shards * lanes
        check_cache(self._model, slots=slots, capacity=self._capacity)

    def _compile_ahead(self) -> None:
        """Queues the first chunk's program, which is compiled or loaded while the host reads a
        prompt, and the program with lanes. An error is raised by the call."""
        # Compiled already; on a mesh the layouts of the arguments are not known yet.
        if self.steps or self._model.mesh is not None or self._listed is not None:
            return
        first, rows = self._needed(), self._running.values()
        self.programs.add_steps(first, self._parts, self._state)
        if self._layout.lanes and any(row.remaining >= _MANY_TOKENS for row in rows):
            with_lanes = replace(first, lanes=True)
            self.programs.add_steps(with_lanes, self._parts, self._state)

    # Programs

    def compile(self) -> None:
        """Compiles the listed programs in a thread, and returns at once."""
        assert self._listed is not None
        state = self._empty_state(self._listed.sampler)
        place = self._reader, self._model, self._layout
        compile_listed(self._listed, self.programs, *place, state)

    def _needed(self) -> Steps:
        """Returns the program that the running rows need.

        Its window is enough for the longest row that the host has. A row that is longer already
        ends the chunk before its first step. So the window, and with it the last digits of the
        results, depends on the rows and not on when the host read them.
        """
        if self._listed is None:
            rows = [row for row in self._slots if row is not None]
            used = self._parts.used  # of all rows so far
        else:
            rows = [*self._decoding.values()]
            used = frozenset().union(*(row.request.sampler.parts.used for row in rows))
            found = self.programs.set_of(used)
            assert found is not None
            used = found
        longest = max(row.reach for row in rows)
        return Steps(used, decode_window(longest, self._capacity), self._forked)

    @property
    def _decoding(self) -> dict[int, RunningRow]:
        """The running rows whose texts have been read, by slot."""
        return {slot: row for slot, row in self._running.items() if slot not in self._reading}

    # Decode

    def _wants_more(self, steps: int) -> bool:
        """Whether a row will still run after the `steps` in flight, as far as the host knows."""
        rows = [row for row in self._decoding.values() if row.pending is None]
        return not self._stopping and any(steps == 0 or row.remaining > steps for row in rows)

    def _dispatch(self) -> _Chunk:
        """Dispatches a chunk of steps. It returns early once slots are free while rows wait."""
        needed, steps = self._needed(), self._chunk_steps
        key = self.programs.find(needed)
        assert key is not None, f"no program for {needed}"
        leaves = key.lanes and self.programs.find(replace(needed, lanes=False)) != key
        idle = sum(row.pending is not None for row in self._decoding.values())
        slots = self._layout.slots - len(self._reading) - idle
        fewest = slots + 1 - max(slots // _SLOTS_PER_EMPTY, 1) if self._waiting else 1
        counts = np.int32(steps), np.int32(fewest), np.bool_(leaves)
        state = self._with_answers(self._state)
        self._state, records, forked = self.programs.run_steps(key, self._parts, state, *counts)
        return _Chunk(steps, tuple(self._slots), self._layout, records, forked)

    def _with_answers(self, state: DecodeState) -> DecodeState:
        """Returns the state with the host's decisions: answers to waiting rows, ended rows, and
        rows whose texts are only partly read.

        On the device a row that a stop string or the caller ended may still run, wait or have
        ended. A failed row has all its tokens cached, including the last one. None of them may fill
        the window. With a list, the window is only enough for running rows.
        """
        for slot, row in enumerate(self._slots):
            if row is None or not row.running or row.answer is None:
                continue
            tokens, action = row.answer
            row.answer = None
            padded = np.zeros(self._capacity, np.int32)
            padded[: len(tokens)] = tokens
            place, count = self._layout.indices[slot], np.int32(len(tokens))
            arguments = state, place, padded, count, np.int32(action)
            state = self.programs.call("answer", answer, arguments)
        status = np.full(state.status.shape, -1, np.int32)  # -1: no change
        status[self._layout.indices[self._paused]] = RUNNING
        for slot, row in enumerate(self._slots):
            reason = None if row is None else row.row.finish_reason
            ended = reason is not None and self._listed is not None
            if ended or reason in ("stop", "error", "cancelled") or slot in self._reading:
                status[self._layout.indices[slot]] = STOPPED
        self._paused = [*self._reading]
        if (status >= 0).any():
            state = replace(state, status=jnp.where(status >= 0, status, state.status))
        return state

    # Read back

    def _read_back(self, chunk: _Chunk) -> Generator[Event, None, bool]:
        """Applies a chunk's outcomes to its rows. Returns whether it made any step."""
        asked = time.perf_counter()
        packed, forked = jax.device_get((chunk.records, chunk.forked))
        records = packed.unpack()
        if self._unpaced:  # its wait says nothing about the device
            self._unpaced -= 1
        else:
            self._pace(time.perf_counter() - asked)
        self._forked = bool(forked)
        self.steps += int(records.live.any(axis=-1).sum())
        numbers = [0 if row is None else row.row.number for row in chunk.rows]
        decode_text = self._model.tokenizer.decode_within
        actions = [mechanism.name for mechanism in self._parts.mechanisms]
        read = outcomes(chunk.layout, numbers, actions, records, self._recording, decode_text)
        for outcome in read:
            row = chunk.rows[outcome.slot]
            if row is None or not row.running:
                continue
            self.useful += outcome.live and outcome.branch <= 0
            for event in row.apply(outcome, lambda: self._stopping):
                yield event
                if self._stopping:
                    return True
        return bool(records.live.any())

    def _pace(self, waited: float) -> None:
        """Increases the steps per chunk while chunks are fast: a first token at once, then a steady
        flow."""
        if waited < self._look / 2:
            self._chunk_steps = min(2 * self._chunk_steps, MAX_STEPS)
        elif waited > self._look:
            self._chunk_steps = max(self._chunk_steps // 2, 1)
