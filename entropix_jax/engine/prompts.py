"""Prefill: caches the texts of new rows before their first steps.

Rows that arrive together are read four at a time, in the parts in which each would be read alone,
so that the last digits of a row do not depend on the arrival of others. On GPUs and TPUs a call of
four rows gives other digits than a call of one, so there all such parts are read by calls of four.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from entropix_jax.engine.prefill import prefill
from entropix_jax.engine.programs import Programs
from entropix_jax.engine.row import RunningRow
from entropix_jax.engine.shapes import (
    DECODE_WINDOW,
    MAX_PREFILL,
    PREFILL_WINDOW,
    bucket,
    chunk_size,
)
from entropix_jax.engine.slots import Layout, share_prefix
from entropix_jax.engine.state import DecodeState
from entropix_jax.model.loading import LanguageModel
from entropix_jax.platforms import on_cpu

_MIN_PART = 16  # tokens of a prompt that are read in one call, at least
# Where caches are kept texts grow in parts of any length: few programs serve all of them.
_KEPT_PART = 64
# Where other rows go on between two parts: half a second for SmolLM2-135M on two cores, twice as
# long while a program compiles.
_BACKGROUND_PART = 128
# Rows that are read in one call; another number would be a program of its own. On a CPU, prompts of
# SmolLM2-135M take half the time so if they have 32 tokens, and three quarters if they have 128.
TOGETHER = 4
# Tokens of each row that are read together, at least. A CPU multiplies fewer vectors in another
# way, to other last digits. (So many vectors and four times as many it multiplies alike.)
_MIN_TOGETHER = 32
# Cache positions of such a row, at most: those of all four are copied, and a long row gains little.
_MAX_WINDOW = 512


def may_join(size: int, window: int) -> bool:
    """Whether parts of `size` tokens, padding included, with `window` positions may be read
    together."""
    return _MIN_TOGETHER <= size <= MAX_PREFILL // TOGETHER and window <= _MAX_WINDOW


class PromptReader:
    """Caches the texts of rows in slots, except for their last tokens."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        capacity: int,
        keep: bool,
        programs: Programs | None = None,
    ) -> None:
        """Prepares to read rows of `capacity` cache positions. With `keep` caches outlive a run, so
        few programs should serve all lengths. Only `programs` are run, see `request`."""
        self.read = 0  # tokens, padding not counted
        self._model = model
        self._capacity = capacity
        self._keep = keep
        self._programs = programs

    def cache(
        self,
        state: DecodeState,
        layout: Layout,
        rows: Mapping[int, RunningRow],
        arrived: Sequence[int],
        stops: Callable[[], bool],
    ) -> DecodeState:
        """Caches the uncached tokens of new rows. A text that another slot has cached is copied.

        Args:
            state: donated.
            layout: where the slots are.
            rows: those in slots, by slot.
            arrived: the slots of the new rows; the others are fully cached.
            stops: called before each call; True skips the rest.
        """
        cached = [slot for slot in rows if slot not in arrived]
        while arrived and not stops():
            # Of several rows with one prompt the first is read, for the others to copy.
            first: dict[tuple[int, ...], int] = {}
            others = []
            for slot in arrived:
                row = rows[slot]
                source = next((other for other in cached if rows[other].has_cached(row)), None)
                if source is not None:
                    row.cached = row.to_cache
                    places = layout.numbers[source], layout.numbers[slot]
                    state = share_prefix(state, *places, np.int32(row.cached))
                    cached.append(slot)
                elif first.setdefault(tuple(row.request.prompt), slot) != slot:
                    others.append(slot)
            state = self._read(state, layout, {slot: rows[slot] for slot in first.values()}, stops)
            cached += first.values()
            arrived = others
        return state

    def _read(
        self,
        state: DecodeState,
        layout: Layout,
        rows: Mapping[int, RunningRow],
        stops: Callable[[], bool],
    ) -> DecodeState:
        """Reads the rows in parts, so that the run can be stopped in between."""
        while not stops():
            # Parts of one size and window can be read in one call.
            alike = defaultdict(list)
            for slot, row in rows.items():
                if row.cached < (length := row.to_cache):
                    alike[self._part(length, row.cached)].append(slot)
            if not alike:
                break
            for (size, window), slots in alike.items():
                while slots and not stops():
                    places = self._places(size, window, len(slots), layout.slots)
                    if not self._has_program(state, layout, places, size, window):
                        places = 1
                    now, slots = slots[:places], slots[places:]
                    part = {slot: rows[slot] for slot in now}
                    state = self._read_part(state, layout, part, places, size, window)
        return state

    def request(self, state: DecodeState, layout: Layout, row: RunningRow) -> bool:
        """Returns whether the programs that read a row from its start are compiled, and requests
        missing ones."""
        length, cached, ready = row.to_cache, 0, True
        while cached < length:
            size, window = self._part(length, cached)
            ready &= self._has_program(state, layout, 1, size, window)
            cached += size
        return ready

    def _has_program(
        self, state: DecodeState, layout: Layout, places: int, size: int, window: int
    ) -> bool:
        """Whether the program for such a call can be run now."""
        if self._programs is None:
            return True
        key = ("prefill", size, window, places, layout)
        if key in self._programs:
            return True
        tokens, numbers = np.zeros((places, size), np.int32), np.zeros(places, np.int32)
        traced = self._arguments(state, layout, tokens, numbers, numbers)
        together = "" if places == 1 else f" of {places} rows"
        name = f"prompts of {size} tokens{together} in {window} positions"
        # A program for several rows is never needed.
        self._programs.request(key, name, prefill, traced, self._static(window), ahead=places > 1)
        return False

    def _arguments(
        self,
        state: DecodeState,
        layout: Layout,
        tokens: np.ndarray,
        count: np.ndarray,
        numbers: np.ndarray,
    ) -> tuple[Any, ...]:
        """The traced arguments of `prefill`. With one slot there is nothing to gather or copy."""
        return self._model.params, state, tokens, count, None if layout.slots == 1 else numbers

    def _static(self, window: int) -> dict[str, Any]:
        return {"config": self._model.config, "window": window}

    def _part(self, length: int, cached: int) -> tuple[int, int]:
        """The size of the next part of a text, padding included, and the cache positions it reads,
        where `cached` of the `length` tokens to read are cached."""
        remaining, window = length - cached, PREFILL_WINDOW
        size = bucket(remaining, _MIN_PART)
        if self._keep:
            size, window = MAX_PREFILL if remaining >= MAX_PREFILL else _KEPT_PART, DECODE_WINDOW
        elif self._programs is not None and length > _BACKGROUND_PART:
            size = _BACKGROUND_PART
        size = min(size, chunk_size(self._model.config, length, 1, MAX_PREFILL))
        return size, min(bucket(cached + size, window), self._capacity)

    def _places(self, size: int, window: int, waiting: int, slots: int) -> int:
        """Returns the number of rows of the next call for `waiting` rows: on a CPU four only if at
        most one is padding, since padding costs time."""
        enough = waiting >= TOGETHER - 1 if on_cpu() else slots >= TOGETHER
        return TOGETHER if enough and may_join(size, window) else 1

    def _read_part(
        self,
        state: DecodeState,
        layout: Layout,
        rows: Mapping[int, RunningRow],
        places: int,
        size: int,
        window: int,
    ) -> DecodeState:
        """Reads the next part of some rows in one call for that number of rows."""
        tokens = np.zeros((places, size), np.int32)
        count = np.zeros(places, np.int32)
        numbers = np.full(places, len(layout.slot_of), np.int32)  # of padding: no row's
        for i, (slot, row) in enumerate(rows.items()):
            part = row.ids[row.cached : min(row.cached + size, row.to_cache)]
            tokens[i, : len(part)] = part
            count[i], numbers[i] = len(part), layout.numbers[slot]
            row.cached += len(part)
        arguments = self._arguments(state, layout, tokens, count, numbers)
        if self._programs is None:
            state = prefill(*arguments, **self._static(window))
        else:
            state = self._programs.get(("prefill", size, window, places, layout))(*arguments)
        jax.block_until_ready(state.cache.length)
        self.read += int(count.sum())
        return state
