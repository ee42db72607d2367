"""Prefill: caches the texts of new rows before their first steps.

Rows that arrive together are read four at a time, in the parts in which each would be read alone,
so that the last digits of a row do not depend on the arrival of others. On GPUs and TPUs a call of
four rows gives other digits than a call of one, so there all such parts are read by calls of four.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from entropix_jax.engine.prefill import prefill
from entropix_jax.engine.programs import Programs, PromptPart
from entropix_jax.engine.row import RunningRow
from entropix_jax.engine.shapes import (
    DECODE_WINDOW,
    MAX_PREFILL,
    PREFILL_WINDOW,
    bucket,
    chunk_size,
)
from entropix_jax.engine.slots import Layout, restore, share_prefix
from entropix_jax.engine.state import DecodeState
from entropix_jax.model.loading import LanguageModel
from entropix_jax.platforms import on_cpu

_MIN_PART = 16  # tokens of a prompt that are read in one call, at least
# Where caches are kept texts grow in parts of any length: few programs serve all of them.
_KEPT_PART = 64
# With a list of programs: other rows continue between two parts. Half a second for SmolLM2-135M on
# two cores, twice as long while a program compiles.
_LISTED_PART = 128
# Rows that are read in one call; another number would be a program of its own. On a CPU, prompts of
# SmolLM2-135M take half the time so if they have 32 tokens, and three quarters if they have 128.
TOGETHER = 4
# Tokens of each row that are read together, at least. A CPU multiplies fewer vectors in another
# way, to other last digits. (32 and 128 vectors use the same kernel.)
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
        self, model: LanguageModel, *, capacity: int, keep: bool, programs: Programs
    ) -> None:
        """Prepares to read rows of `capacity` cache positions. With `keep` caches outlive a run, so
        few programs should serve all lengths."""
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
        """Caches the uncached tokens of new rows. A text that another slot has cached is copied, or
        that of a parent.

        Args:
            state: donated.
            layout: where the slots are.
            rows: those in slots, by slot.
            arrived: the slots to read; the others are fully cached, or wait to be read.
            stops: called before each call; True skips the rest.
        """
        cached = [slot for slot in rows if slot not in arrived]
        while arrived and not stops():
            # Of several rows with one prompt the first is read, for the others to copy.
            first: dict[tuple[int, ...], int] = {}
            others = []
            for slot in arrived:
                row = rows[slot]
                place, count = layout.indices[slot], np.int32(row.to_cache)
                options = {"generated": self._keep}
                source = next((i for i in cached if rows[i].has_cached(row, **options)), None)
                if source is not None:
                    arguments = state, layout.indices[source], place, count
                    state = self._programs.call("copy", share_prefix, arguments)
                elif (kept := row.inherited) is not None:
                    key = f"restore {kept[0].shape[1]}"
                    state = self._programs.call(key, restore, (state, place, kept, count))
                else:
                    if first.setdefault(row.begin, slot) != slot:
                        others.append(slot)
                    continue
                row.cached = row.to_cache
                cached.append(slot)
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
        began = time.monotonic()
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
                    key = self._programs.find(PromptPart(size, window, places))
                    # A program for several rows is never needed.
                    key = key or self._programs.find(PromptPart(size, window))
                    assert key is not None, f"no program for {PromptPart(size, window)}"
                    now, slots = slots[: key.rows], slots[key.rows :]
                    left = sum(row.to_cache - row.cached for row in rows.values())
                    self._programs.waits = f"reading the prompt, {left} tokens left", began
                    state = self._read_part(state, layout, {i: rows[i] for i in now}, size, key)
        self._programs.waits = None
        return state

    def list_parts(self) -> list[PromptPart]:
        """Returns the keys of the programs that read texts: the smallest first, and last the
        largest, which can read any part."""
        largest = self._part(self._capacity, 0)[0]
        sizes = [1 << i for i in range(_MIN_PART.bit_length() - 1, largest.bit_length())]
        windows = [self._window(size, 0) for size in sizes]
        while windows[-1] < self._capacity:
            windows.append(min(2 * windows[-1], self._capacity))
            sizes.append(largest)
        shapes = [*zip(sizes, windows, strict=True)]
        together = [PromptPart(*shape, TOGETHER) for shape in shapes if may_join(*shape)]
        single = [PromptPart(*shape) for shape in shapes]
        return [*single[:-1], *together, single[-1]]

    def add(self, key: PromptPart, layout: Layout, state: DecodeState) -> None:
        """Queues the program of a part."""
        tokens, numbers = np.zeros((key.rows, key.size), np.int32), np.zeros(key.rows, np.int32)
        arguments = self._arguments(state, layout, tokens, numbers, numbers)
        self._programs.add(key, prefill, arguments, self._static(key.window))

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
        unread, listed = length - cached, bool(self._programs.sets)
        size = bucket(unread, _MIN_PART)
        if self._keep:
            size = MAX_PREFILL if unread >= MAX_PREFILL else _KEPT_PART
        elif listed:
            size = min(size, _LISTED_PART)
        # One size for all lengths, so that a list is short.
        longest = self._capacity if listed else length
        size = min(size, chunk_size(self._model.config, longest, 1, MAX_PREFILL))
        return size, self._window(size, cached)

    def _window(self, size: int, cached: int) -> int:
        """Returns the cache positions that a part reads."""
        window = DECODE_WINDOW if self._keep else PREFILL_WINDOW
        return min(bucket(cached + size, window), self._capacity)

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
        size: int,
        key: PromptPart,
    ) -> DecodeState:
        """Reads the next part of some rows, up to `size` tokens of each, in one call."""
        tokens = np.zeros((key.rows, key.size), np.int32)
        count = np.zeros(key.rows, np.int32)
        numbers = np.full(key.rows, len(layout.slot_of), np.int32)  # of padding: no row's
        for i, (slot, row) in enumerate(rows.items()):
            part = row.ids[row.cached : min(row.cached + size, row.to_cache)]
            tokens[i, : len(part)] = part
            count[i], numbers[i] = len(part), layout.indices[slot]
            row.cached += len(part)
        arguments = self._arguments(state, layout, tokens, count, numbers)
        state = self._programs.call(key, prefill, arguments, **self._static(key.window))
        jax.block_until_ready(state.cache.length)
        self.read += int(count.sum())
        return state
