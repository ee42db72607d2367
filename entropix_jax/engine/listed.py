"""The closed list of a server's programs: sets of mechanisms, windows, lanes, and prompt parts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from entropix_jax.engine.calibrated import CalibratedSampler
from entropix_jax.engine.programs import Programs, Steps
from entropix_jax.engine.prompts import PromptReader
from entropix_jax.engine.request import Request
from entropix_jax.engine.results import Row
from entropix_jax.engine.row import RunningRow
from entropix_jax.engine.shapes import decode_window
from entropix_jax.engine.slots import Layout, answer, insert, share_prefix
from entropix_jax.engine.state import DecodeState
from entropix_jax.model.loading import LanguageModel
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.mechanisms.branch import BRANCH
from entropix_jax.sampler.settings import MAX_WIDTH, Parts


@dataclass(frozen=True)
class ProgramList:
    """The mechanisms of a server's programs. Each set contains the one before it. All samplers have
    the mechanisms, used or not, and the shapes of `sampler`."""

    sampler: CalibratedSampler
    sets: Sequence[frozenset[str]]

    def may_fork(self, used: frozenset[str]) -> bool:
        """Whether rows with these mechanisms may need lanes. A user's own control may fork."""
        own = {*self.sampler.mechanisms} - {*MECHANISMS}
        return not used.isdisjoint((BRANCH.name, *(m.name for m in own if m.control)))

    @property
    def lanes(self) -> int:
        """Number of lanes that a fork of a row may need."""
        return MAX_WIDTH - 1 if any(map(self.may_fork, self.sets)) else 0


def compile_listed(
    listed: ProgramList,
    programs: Programs,
    reader: PromptReader,
    model: LanguageModel,
    layout: Layout,
    state: DecodeState,
) -> None:
    """Queues all programs of a list: of the first set those that are required at the start, then
    the others, then the further sets. The smallest and the largest of each set come first. Only
    shapes of the `state` are kept."""
    sampler, capacity = listed.sampler, state.history.shape[1]
    parts = Parts(sampler.mechanisms)
    windows = [decode_window(1, capacity)]
    while windows[-1] < capacity:
        windows.append(decode_window(windows[-1] + 1, capacity))
    prompts = [part for part in reader.list_parts() if part.rows <= layout.slots]
    whole = list(dict.fromkeys((prompts[0], prompts[-1])))
    for index, used in enumerate(listed.sets):
        lanes = (False, True) if listed.may_fork(used) else (False,)
        keys = [Steps(used, window, one) for one in lanes for window in windows]
        programs.largest[used] = keys[-1]
        ends = list(dict.fromkeys((keys[0], keys[-1])))
        if index == 0:
            programs.required = [*ends, *whole, "insert", "answer", "copy"]
        for key in ends:
            programs.add_steps(key, parts, state)
        if index == 0:
            row = RunningRow(Row(Request([0], sampler)), model, capacity)
            arrival, number = row.arrival(sampler.mechanisms, capacity), np.int32(0)
            static = {"mechanisms": sampler.mechanisms}
            programs.add("insert", insert, (state, number, arrival), static)
            text = np.zeros(capacity, np.int32)
            programs.add("answer", answer, (state, number, text, number, number), {})
            programs.add("copy", share_prefix, (state, number, number, number), {})
            for part in (*whole, *(one for one in prompts if one not in whole)):
                reader.add(part, layout, state)
        for key in keys:
            if key not in ends:
                programs.add_steps(key, parts, state)
