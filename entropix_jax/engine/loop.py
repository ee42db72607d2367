"""Continuous batching: rows run in parallel in a fixed number of slots, and a row that ends frees
its slot for the next one.

The device runs chunks of decode steps. While the host reads one chunk back, the device already runs
the next.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.memory import check_cache
from entropix_jax.engine.moves import Roster
from entropix_jax.engine.programs import CompileError, Programs, decode_for_backend
from entropix_jax.engine.prompts import PromptReader
from entropix_jax.engine.records import outcomes
from entropix_jax.engine.request import Request, check_request
from entropix_jax.engine.results import Event
from entropix_jax.engine.row import RunningRow
from entropix_jax.engine.shapes import DECODE_WINDOW, MAX_STEPS, bucket
from entropix_jax.engine.slots import Layout, answer, emptied, empty_slots, insert, park, widen
from entropix_jax.engine.state import STOPPED, DecodeState, Program, Recording, StepRecord
from entropix_jax.host.integers import check_integer
from entropix_jax.model.loading import LanguageModel
from entropix_jax.model.mesh import DATA, check_mesh
from entropix_jax.sampler.settings import MAX_WIDTH, Parts

_LOOK_SECONDS = 0.1  # target time between two reads by the host
# Slots for each one that may be empty before the device returns for the next row.
_SLOTS_PER_EMPTY = 16
_SLOTS_PER_LANE = 6  # where rows may fork
_MANY_TOKENS = 64  # of a row that will probably fork before its end
_MOST_IDLE = 8  # chunks in a row that make no step; more is a defect


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
    records: StepRecord
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
        widest: bool = False,
        keep: bool = False,
        background: bool = False,
    ) -> None:
        """Nothing is allocated before `run`.

        Args:
            capacity: cache slots of a row: its prompt and its new tokens together.
            recording: optional parts of each token's record.
            look: maximum seconds of a chunk of steps; a new request waits for up to two chunks.
            widest: allocate lanes for the widest forks at the start, so that no later row needs an
                allocation or compilation for its branches.
            keep: the caches outlive a run and keep their memory. A row only reads tokens that its
                slot has not cached before. Its last digits then depend on the row before.
            background: compile programs in a thread, on one device. A row is held until its
                programs are compiled, and parked if it outgrows them. The others continue. A row's
                last digits then depend on the other rows.

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
        self._widest = widest
        self._keep = keep
        self._programs = Programs() if background and model.mesh is None else None
        self._failed: dict[RunningRow, str] = {}  # errors of rows whose programs failed to compile
        self._parts = Parts(())  # what the decode steps are made of
        self._reading: list[int] = []  # slots whose texts are read part by part
        self._fitting_window = 0  # of the last steps, where programs compile in the background
        self._used_sets: set[frozenset[str]] = set()  # of all programs that were requested
        self._reader = PromptReader(
            model,
            capacity=capacity,
            keep=keep,
            programs=self._programs,
        )
        self._chunk_steps = 1
        self._unpaced = 0  # chunks in flight to leave out of pacing
        self._forked = False
        self._compiling: Thread | None = None  # the program with lanes
        self._stopping = False
        self._kept: tuple[DecodeState, list[RunningRow | None]] | None = None  # of the run before
        self._layout = Layout(slots, 0, 1 if model.mesh is None else model.mesh.shape[DATA])
        per_shard = slots // self._layout.shards
        self._check_cache(shared_lanes(per_shard, MAX_WIDTH - 1 if widest else 0))

    @property
    def used(self) -> float:
        """Share of slots with a running row, over the steps so far."""
        return self.useful / max(self.steps * self._layout.slots, 1)

    @property
    def compiling(self) -> str | None:
        """Name of the program that compiles in the background, or None."""
        return None if self._programs is None else self._programs.compiling

    @property
    def read(self) -> int:
        """Number of tokens read before the rows' first steps."""
        return self._reader.read

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

        Raises:
            UserError: a request that `check` refuses, samplers whose mechanisms differ, or lanes
                for branches that do not fit into memory.
        """
        self._begin_rows(requests)
        first = self._fetch()
        if first is None:
            return
        self._chunk_steps = 1
        kept, self._kept = self._kept, None
        if kept is None or first.request.sampler.mechanisms != self._parts.mechanisms:
            kept = None  # its memory is free before more is allocated
            self._begin(first)
        else:
            self._state = emptied(kept[0])
            self._take_over(kept[1])
            kept = None
        try:
            yield from self._run(between or (lambda: None))
            if self._keep:
                self._kept = self._state, self._slots
        finally:  # the results may be kept for long: free the cache now
            del self._state
            self._known.clear()
            self._forked, self._stopping, self._unpaced = False, False, 0
            self._reading = []
            self._failed.clear()

    def _begin(self, first: RunningRow) -> None:
        """Begins with empty caches."""
        sampler = first.request.sampler
        self._parts = Parts(sampler.mechanisms)
        self._layout = replace(self._layout, lanes=self._lanes_for(first))
        self._check_cache(self._layout.lanes)
        self._state = empty_slots(
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
            self._insert_arrivals()
            if time.perf_counter() - began > self._look / 2:
                self._unpaced = len(in_flight)
            while len(in_flight) < 2 and self._wants_more(sum(c.steps for c in in_flight)):
                if not self._choose_program():
                    break
                in_flight.append(self._dispatch())
            if self._failed:
                yield from self._end_failed()
                continue
            if not in_flight:
                if self._programs is None or not (self._held or self._wants_more(0)):
                    return
                self._programs.wait(self._look)
                continue
            moved = yield from self._read_back(in_flight.popleft())
            # Chunks may make no step: the one before ended rows, filled the window, or needs the
            # other program, and that twice where a stop string ends the row that is forked.
            idle = 0 if moved else idle + 1
            if idle > _MOST_IDLE:
                raise RuntimeError("rows are running, but no step is made")

    def _end_failed(self) -> Iterator[Event]:
        """Ends the rows whose programs failed to compile, with an error."""
        for row, error in self._failed.items():
            if row in self._held:
                self._held.remove(row)
            row.row.error = error
            yield from row.interrupt("error")
        self._failed.clear()

    # Insert

    def _insert_arrivals(self) -> None:
        """Puts the next rows into the free slots, and caches their texts."""
        arrived = []
        for slot, row in enumerate(self._slots):
            if row is not None and row.running:
                if row.moved:  # what it has kept is cached there
                    self._insert(slot, row, cached=row.to_cache)
                continue
            if self._stopping or (fresh := self._next_row()) is None:
                continue
            self._slots[slot] = fresh
            if row is not None and fresh.row.tokens and row.has_cached(fresh):
                self._insert(slot, fresh, cached=fresh.to_cache)
            else:
                shared = row.shared(fresh) if self._keep and row is not None else 0
                self._insert(slot, fresh, cached=shared)
                arrived.append(slot)
        if not self._stopping:  # whether another one waits decides when the device returns
            self._fetch()
        self._read_texts(arrived)

    def _read_texts(self, arrived: Sequence[int]) -> None:
        """Caches the texts of new rows and of rows that are only partly cached. If programs compile
        in the background and other rows run, caches one part per call."""
        rows = {slot: row for slot, row in enumerate(self._slots) if row is not None}
        running = self._running
        reading = [slot for slot in dict.fromkeys((*self._reading, *arrived)) if slot in running]
        by_part = self._programs is not None and len(running) > len(reading)
        before = self._reader.read

        def stops() -> bool:
            return self._stopping or (by_part and self._reader.read > before)

        if reading:
            with self._decode_compiles():
                self._state = self._reader.cache(self._state, self._layout, rows, reading, stops)
        self._reading = [slot for slot in reading if rows[slot].cached < rows[slot].to_cache]

    def _next_row(self) -> RunningRow | None:
        """Removes and returns the next row that can run. Rows whose programs are missing are held,
        and later rows overtake them. Each held row reserves a free slot."""
        if self._programs is None:
            return self._waiting.popleft() if self._fetch() is not None else None
        for row in self._held:
            if self._has_programs(row):
                self._held.remove(row)
                return row
        running = len(self._running)
        while running + len(self._held) < len(self._slots) and self._fetch() is not None:
            row = self._waiting.popleft()
            if self._has_programs(row):
                return row
            self._held.append(row)
        return None

    def _insert(self, slot: int, row: RunningRow, cached: int) -> None:
        """Puts a row into a slot that has cached the first `cached` tokens of its text."""
        row.row.started = row.row.started or time.perf_counter()
        row.moved = False
        row.cached = cached
        self._parts = replace(self._parts, used=self._parts.used | row.request.sampler.parts.used)
        arrival = row.arrival(self._parts.mechanisms, self._capacity)
        if (lanes := self._lanes_for(row)) > self._layout.lanes:
            self._state = widen(self._state, self._layout, lanes)
            self._layout = replace(self._layout, lanes=lanes)
        self._state = insert(
            self._state, self._layout.numbers[slot], arrival, mechanisms=self._parts.mechanisms
        )

    def _lanes_for(self, row: RunningRow) -> int:
        """The lanes of a shard that a row needs."""
        needed = MAX_WIDTH - 1 if self._widest else row.request.sampler.lanes
        return shared_lanes(self._layout.slots // self._layout.shards, needed)

    def _check_cache(self, lanes: int) -> None:
        """UserError unless the slots and `lanes` lanes of each shard fit into memory."""
        check_cache(
            self._model.config,
            self._model.precision,
            slots=self._layout.slots + self._layout.shards * lanes,
            capacity=self._capacity,
            mesh=self._model.mesh,
        )

    @contextmanager
    def _decode_compiles(self) -> Iterator[None]:
        """Compiles the first chunk's program, or reads it from the cache, in a thread: the host is
        idle while a prompt is read. The program with lanes is traced meanwhile, and compiled next.
        An error is raised where a program is called."""

        def compile_decode(lanes: bool) -> None:
            with suppress(Exception):
                lanes_too = replace(static["program"], lanes=lanes)
                lowered = decode_for_backend().lower(*arguments, **static | {"program": lanes_too})
                if lanes:
                    compiling.join()
                lowered.compile()

        # Compiled already; on a mesh the layouts of the arguments are not known yet.
        if self.steps or self._model.mesh is not None or self._programs is not None:
            yield
            return
        arguments, static = self._decode_arguments(self._state)
        # Prefilling donates the state, so only shapes are kept.
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        compiling = Thread(target=compile_decode, args=(False,))
        compiling.start()
        try:
            yield
            running = self._running.values()
            if self._layout.lanes and any(row.remaining >= _MANY_TOKENS for row in running):
                self._compiling = Thread(target=compile_decode, args=(True,))
                self._compiling.start()
        finally:
            compiling.join()

    # Decode

    def _wants_more(self, steps: int) -> bool:
        """Whether a row will still run after the `steps` in flight, as far as the host knows."""
        running = self._running.values()
        return not self._stopping and any(steps == 0 or row.remaining > steps for row in running)

    def _dispatch(self) -> _Chunk:
        """Gives the device a chunk of steps; it ends early where rows wait and slots are free."""
        steps = self._chunk_steps
        state = self._with_answers(self._state)
        if self._programs is not None:
            reading = np.zeros(len(self._layout.slot_of), bool)
            reading[self._layout.numbers[[*self._reading]]] = True
            state = park(state, np.int32(self._window()), reading)
        arguments, static = self._decode_arguments(state)
        if self._forked and self._compiling is not None:
            self._compiling.join()
            self._compiling = None
        if self._programs is None:
            state, records, forked = decode_for_backend()(*arguments, **static)
        else:
            program = self._programs.get(self._key(static["program"]))
            state, records, forked = program(*arguments)
        self._state = state
        return _Chunk(steps, tuple(self._slots), self._layout, records, forked)

    def _decode_arguments(
        self, state: DecodeState, program: Program | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `decode`, traced ones and static ones: for the next chunk, if no other
        `program` is given."""
        number, waits = self._layout.slots, bool(self._waiting)
        if self._programs is not None:  # without free slots for held rows, and parked rows
            number = sum(
                row.reach <= self._fitting_window
                for slot, row in self._running.items()
                if slot not in self._reading
            )
        fewest = number + 1 - max(number // _SLOTS_PER_EMPTY, 1) if waits else 1
        traced = (self._model.params, state, np.int32(self._chunk_steps), np.int32(fewest))
        static = {
            "config": self._model.config,
            "max_steps": MAX_STEPS,
            "program": program or self._program(self._window(), self._forked),
        }
        return traced, static

    def _window(self) -> int:
        """Cache slots that a step reads: enough for the longest row that the host knows of. A row
        that is longer already ends the chunk before its first step. So the number, and with it the
        last digits of the results, depends on the rows and not on when the host looked."""
        if self._programs is not None:
            return self._fitting_window
        longest = max(row.reach for row in self._slots if row is not None)
        return self._window_of(longest)

    def _window_of(self, length: int) -> int:
        return min(bucket(length, DECODE_WINDOW), self._capacity)

    def _program(self, window: int, lanes: bool, used: frozenset[str] | None = None) -> Program:
        """The program of steps, by default of what the rows use."""
        parts = self._parts if used is None else replace(self._parts, used=used)
        return Program(parts, window, self._recording, lanes)

    # Programs that compile in the background

    def _key(self, program: Program) -> tuple[Any, ...]:
        return "decode", program, self._layout

    def _needs(self, *more: RunningRow) -> tuple[frozenset[str], bool]:
        """The mechanisms of the running rows and of some more, and whether the rows may fork."""
        rows = [*self._running.values(), *more]
        used = (row.request.sampler.parts.used for row in rows)
        forks = self._forked or any(row.request.sampler.lanes for row in rows)
        return frozenset().union(*used), forks

    def _compiled(self, used: frozenset[str], window: int, forks: bool) -> frozenset[str] | None:
        """The mechanisms of the compiled programs that contain those `used` and the fewest others:
        of one without lanes, and of one with them where rows may fork. None if there is none."""
        assert self._programs is not None
        lanes = (False, True) if forks else (False,)
        fitting = [
            mechanisms
            for mechanisms in self._used_sets
            if used <= mechanisms
            and all(
                self._key(self._program(window, each, mechanisms)) in self._programs
                for each in lanes
            )
        ]
        return min(fitting, key=lambda each: (len(each), sorted(each)), default=None)

    def _has(self, used: frozenset[str], window: int, forks: bool, **when: bool) -> bool:
        """Returns whether programs for such rows are compiled. Requests missing ones, which include
        the mechanisms of the current program so that one program serves all rows. `when`: see
        `Programs.request`."""
        if self._compiled(used, window, forks) is not None:
            return True
        assert self._programs is not None
        used |= self._parts.used
        self._used_sets.add(used)
        for lanes in (False, True) if forks else (False,):
            name = f"steps of {window} positions{' with forks' if lanes else ''}"
            name += f" ({', '.join(sorted(used)) or 'plain'})"
            program = self._program(window, lanes, used)
            traced, static = self._decode_arguments(self._state, program)
            key = self._key(program)
            self._programs.request(key, name, decode_for_backend(), traced, static, **when)
        return False

    def _has_programs(self, row: RunningRow) -> bool:
        """Returns whether the row can run now with the running rows. Requests missing programs."""
        if row in self._failed:
            return False
        used, forks = self._needs(row)
        window = self._window_of(row.reach)
        if self._running:
            window = max(window, self._fitting_window)
        try:
            can_read = self._reader.request(self._state, self._layout, row)
            return self._has(used, window, forks) and can_read
        except CompileError as error:
            self._failed[row] = str(error)
            return False

    def _choose_program(self) -> bool:
        """Chooses the program of the next chunk: the window that the running rows need, or the
        longest compiled one, which parks longer rows. Returns whether a row can run in it."""
        if self._programs is None:
            return True
        used, forks = self._needs()
        rows = [
            row
            for slot, row in self._running.items()
            if slot not in self._reading and row not in self._failed
        ]
        if not rows:
            return False
        lengths = [row.reach for row in rows]
        needed = window = self._window_of(max(lengths))
        try:
            has_needed = self._has(used, needed, forks, urgent=True)
            if has_needed and any(row.reach + row.remaining > needed for row in rows):
                self._has(used, self._window_of(needed + 1), forks, ahead=True)
        except CompileError as error:
            longest = [row for row in rows if self._window_of(row.reach) == needed]
            self._failed |= dict.fromkeys(longest, str(error))
        while (chosen := self._compiled(used, window, forks)) is None or window < min(lengths):
            if window <= DECODE_WINDOW:
                return False
            window = self._window_of(window // 2)
        self._parts, self._fitting_window = replace(self._parts, used=chosen), window
        return True

    def _with_answers(self, state: DecodeState) -> DecodeState:
        """Returns the state with the host's decisions: answers to waiting rows, and ended rows.

        On the device a row that a stop string or the caller ended may still run, wait or have
        ended. A failed row has all its tokens cached, including the last one. None of them may fill
        the window.
        """
        for slot, row in enumerate(self._slots):
            if row is None or row.answer is None:
                continue
            tokens, action = row.answer
            row.answer = None
            padded = np.zeros(self._capacity, np.int32)
            padded[: len(tokens)] = tokens
            place, count = self._layout.numbers[slot], np.int32(len(tokens))
            state = answer(state, place, padded, count, np.int32(action))
        ended = np.zeros(state.status.shape, bool)
        for slot, row in enumerate(self._slots):
            reason = None if row is None else row.row.finish_reason
            ended[self._layout.numbers[slot]] = reason in ("stop", "error", "cancelled")
        if ended.any():
            state = replace(state, status=jnp.where(ended, STOPPED, state.status))
        return state

    # Read back

    def _read_back(self, chunk: _Chunk) -> Generator[Event, None, bool]:
        """Applies a chunk's outcomes to its rows. Returns whether it made any step."""
        asked = time.perf_counter()
        records, forked = jax.device_get((chunk.records, chunk.forked))
        if self._unpaced:  # it was ready long ago: nobody asked for it meanwhile
            self._unpaced -= 1
        else:
            self._pace(time.perf_counter() - asked)
        self._forked = bool(forked)
        self.steps += int(records.live.any(axis=-1).sum())
        numbers = [0 if row is None else row.row.number for row in chunk.rows]
        decode_text = self._model.tokenizer.decode_within
        actions = [mechanism.name for mechanism in self._parts.mechanisms]
        for outcome in outcomes(
            chunk.layout, numbers, actions, records, self._recording, decode_text
        ):
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
