"""The closed list of a server's programs: sets of mechanisms, windows, lanes, and prompt parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from entropix_jax.engine.calibrated import CalibratedSampler
from entropix_jax.engine.programs import Programs, PromptPart, Steps
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
from entropix_jax.sampler.mechanisms.clarify import CLARIFY
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
        return not used.isdisjoint((BRANCH.name, CLARIFY.name, *(m.name for m in own if m.control)))

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
    """Queues all programs of a list: those that are required at the start, then the smallest and
    the largest of each further set, then the others. Only shapes of the `state` are kept."""
    sampler, capacity = listed.sampler, state.history.shape[1]
    parts = Parts(sampler.mechanisms)
    windows = [decode_window(1, capacity)]
    while windows[-1] < capacity:
        windows.append(decode_window(windows[-1] + 1, capacity))
    prompts = [part for part in reader.list_parts() if part.rows <= layout.slots]
    steps = []
    for used in listed.sets:
        lanes = (False, True) if listed.may_fork(used) else (False,)
        steps.append([Steps(used, window, one) for one in lanes for window in windows])
        programs.largest[used] = steps[-1][-1]
    first, *further = ((keys[0], keys[-1]) for keys in steps)

    # Programs that each row needs.
    row = RunningRow(Row(Request([0], sampler)), model, capacity)
    arrival, number = row.arrival(sampler.mechanisms, capacity), np.int32(0)
    programs.add("insert", insert, (state, number, arrival), {"mechanisms": sampler.mechanisms})
    text = np.zeros(capacity, np.int32)
    programs.add("answer", answer, (state, number, text, number, number), {})
    programs.add("copy", share_prefix, (state, number, number, number), {})

    required: tuple[Steps | PromptPart, ...] = (*first, prompts[0], prompts[-1])
    programs.required = [*dict.fromkeys(required), "insert", "answer", "copy"]
    for key in dict.fromkeys((*required, *chain(*further), *prompts, *chain(*steps))):
        if isinstance(key, Steps):
            programs.add_steps(key, parts, state)
        else:
            reader.add(key, layout, state)
