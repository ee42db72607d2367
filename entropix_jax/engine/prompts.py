"""Prefill: the texts of rows that arrive are cached before the rows' first steps.

Rows that arrive together are read four at a time, but never so that the last digits of one depend
on when another came: each is read in the parts in which it would be read alone. Off the CPU, where
a call of four rows gives other digits than one of one row, all such parts are read by calls of
four.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.decode import prefill
from entropix_jax.engine.preparation import (
    DECODE_WINDOW,
    MAX_PREFILL,
    PREFILL_WINDOW,
    bucket,
    chunk_size,
)
from entropix_jax.engine.running import RunningRow
from entropix_jax.engine.slots import Layout, share_prefix
from entropix_jax.engine.state import DecodeState
from entropix_jax.model.loading import LanguageModel
from entropix_jax.platforms import on_cpu

_MIN_PART = 16  # tokens of a prompt that are read in one call, at least
# Where caches are kept texts grow in parts of any length: few programs serve all of them.
_KEPT_PART = 64
# Rows that are read in one call; another number would be a program of its own. On a CPU, prompts of
# SmolLM2-135M take half the time so if they have 32 tokens, and three quarters if they have 128.
TOGETHER = 4
# Tokens of each row that are read together, at least. A CPU multiplies fewer vectors in another
# way, to other last digits. (So many vectors and four times as many it multiplies alike.)
_MIN_TOGETHER = 32
# Cache positions of such a row, at most: those of all four are copied, and a long row gains little.
_MAX_WINDOW = 512


def may_join(size: int, window: int) -> bool:
    """Whether parts of so many tokens, padding included, which read so many positions, may be read
    together."""
    return _MIN_TOGETHER <= size <= MAX_PREFILL // TOGETHER and window <= _MAX_WINDOW


class PromptReader:
    """Caches the texts of rows in slots, except for their last tokens."""

    def __init__(self, model: LanguageModel, *, capacity: int, keep: bool, check: bool) -> None:
        """For rows of `capacity` cache positions. With `keep` caches outlive a run, so few programs
        should serve texts of all lengths; with `check` the state notes where activations are not
        finite."""
        self.read = 0  # tokens, padding not counted
        self._model = model
        self._capacity = capacity
        self._keep = keep
        self._check = check

    def cache(
        self,
        state: DecodeState,
        layout: Layout,
        rows: Mapping[int, RunningRow],
        arrived: Sequence[int],
        stops: Callable[[], bool],
    ) -> DecodeState:
        """Caches what is not cached yet of rows that arrived. A text that another slot has cached
        is copied from there.

        Args:
            state: donated.
            layout: where the slots are.
            rows: those in slots, by slot.
            arrived: the slots of the rows that arrived; all that the others need is cached.
            stops: asked before each call whether to leave the rest.
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
                    row.cached = len(row.text) - 1
                    places = layout.numbers[source], layout.numbers[slot]
                    state = share_prefix(state, *places, jnp.int32(row.cached))
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
                if row.cached < len(row.text) - 1:
                    alike[self._part(row)].append(slot)
            if not alike:
                break
            for (size, window), slots in alike.items():
                while slots and not stops():
                    places = self._places(size, window, len(slots), layout.slots)
                    now, slots = slots[:places], slots[places:]
                    part = {slot: rows[slot] for slot in now}
                    state = self._read_part(state, layout, part, places, size, window)
        return state

    def _part(self, row: RunningRow) -> tuple[int, int]:
        """The size of a row's next part, padding included, and the cache positions it reads."""
        length = len(row.text) - 1
        left, window = length - row.cached, PREFILL_WINDOW
        size = bucket(left, _MIN_PART)
        if self._keep:
            size, window = MAX_PREFILL if left >= MAX_PREFILL else _KEPT_PART, DECODE_WINDOW
        size = min(size, chunk_size(self._model.config, length, 1, MAX_PREFILL))
        return size, min(bucket(row.cached + size, window), self._capacity)

    def _places(self, size: int, window: int, waiting: int, slots: int) -> int:
        """The places of the next call, where so many rows wait for one: on a CPU four only if at
        most one of them is padding, since each takes its time."""
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
        """Reads the next part of some rows in one call of so many places."""
        tokens = np.zeros((places, size), np.int32)
        count = np.zeros(places, np.int32)
        numbers = np.full(places, len(layout.slot_of), np.int32)  # of padding: no row's
        for i, (slot, row) in enumerate(rows.items()):
            part = row.text[row.cached : len(row.text) - 1][:size]
            tokens[i, : len(part)] = part
            count[i], numbers[i] = len(part), layout.numbers[slot]
            row.cached += len(part)
        state = prefill(
            self._model.params,
            state,
            tokens,
            count,
            # With one slot there is nothing to gather, and nothing to copy.
            None if layout.slots == 1 else numbers,
            config=self._model.config,
            window=window,
            check=self._check,
        )
        jax.block_until_ready(state.cache.length)
        self.read += int(count.sum())
        return state
