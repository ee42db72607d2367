"""The process of `test_sharding` with eight devices, which runs the same rows on one device and on
several meshes."""

import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.decode import decode
from entropix_jax.engine.prefill import prefill
from entropix_jax.engine.slots import Layout, answer
from entropix_jax.engine.state import (
    BRANCH_ENDED,
    FORKS,
    RUNNING,
    WAITS_FOR_TEXT,
    DecodeState,
    Program,
    Recording,
    StepRecord,
)
from entropix_jax.model.mesh import param_shardings, parse_mesh, row_shardings
from entropix_jax.model.params import Params
from entropix_jax.sampler.draw import row_key
from tests.support.models import random_params, tiny_config, uncached
from tests.support.samplers import ARMS, FEW, LANES, LITERAL, Line, Recorder, batch_of, params_of

MESHES = ("data=8", "data=2,model=4")
BATCH, CAPACITY, STEPS = 16, 64, 16
PROMPTS = 9  # prefilled per call, so that the last call has padding
PRESETS = (LITERAL, "greedy", "document-000", "entropix")
OFTEN = {"backspace.max_prob": 0.5, "inject.earliest": 0, "start.tokens": 0}
CONFIG = tiny_config(
    vocab_size=304, num_layers=2, num_heads=16, num_kv_heads=8, mlp_width=48, tied_head=False
)


@dataclass
class Outcome:
    """Results of the rows on one mesh, on the host."""

    lines: list[list[Line]]  # of each row
    states: list[DecodeState] = field(default_factory=list)  # of the slots, after each call
    answered: DecodeState | None = None
    held: list[StepRecord] = field(default_factory=list)  # of calls while a row waits for the host
    layout: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    kept: bool = True  # donated buffers were freed, and results have the same sharding
    texts: list[str] = field(default_factory=list)  # the compiled step, without and with lanes


def rows(shards: int) -> tuple[Params, DecodeState]:
    """Returns uncached rows of several samplers and lengths, on the host."""
    params = random_params(CONFIG)
    params = replace(params, head=5.0 * params.head)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG.vocab_size, 3 + i).tolist() for i in range(BATCH)]
    state = uncached(
        CONFIG,
        prompts,
        [32 - 3 * (i % 5) for i in range(BATCH)],
        np.stack([row_key(0, str(i)) for i in range(BATCH)]),
        batch_of(
            *(
                params_of(PRESETS[i % len(PRESETS)], {**OFTEN, "branch.width": 1 + i % 5})
                for i in range(BATCH)
            )
        ),
        np.full(2, -1, np.int32),
        capacity=CAPACITY,
        lanes=LANES,
        shards=shards,
    )
    return jax.tree.map(np.array, (params, state))


class Job:
    """The rows on one mesh, or on one device."""

    def __init__(self, text: str | None) -> None:
        mesh = text and parse_mesh(text, jax.devices())
        shards = mesh.shape["data"] if mesh else 1
        self.places = Layout(BATCH, LANES, shards)
        self.params, self.state = rows(shards)
        self.history = self.state.history[self.places.indices]
        self.counts = self.state.prompt_length[self.places.indices] - 1
        if mesh:
            self.params = jax.device_put(self.params, param_shardings(mesh, CONFIG))
            self.state = jax.device_put(self.state, row_shardings(mesh, self.state))
        else:
            self.params, self.state = jax.device_put((self.params, self.state))
        self.layout = layout(self.state)

        arguments = (self.params, self.state, jnp.int32(STEPS), jnp.int32(1))
        static: Any = {"config": CONFIG, "max_steps": STEPS}
        self.lowered = [
            decode.lower(
                *arguments, **static, program=Program(FEW, CAPACITY, Recording(top=3), lanes)
            )
            for lanes in (False, True)
        ]

    def run(self, steps: Sequence[Any]) -> Outcome:
        """Runs the compiled `steps`, which fail on arguments with another sharding than in their
        lowering."""
        told = Recorder(BATCH)
        texts = [step.as_text() for step in steps]
        outcome = Outcome(told.lines, texts=texts, layout=self.layout)
        state, numbers = self.state, self.places.indices

        def taken(donated: DecodeState, state: DecodeState) -> DecodeState:
            gone = all(x.is_deleted() for x in jax.tree.leaves(donated))
            outcome.kept &= gone and layout(state) == outcome.layout
            return state

        for first in range(0, BATCH, PROMPTS):
            read = np.arange(first, min(first + PROMPTS, BATCH))[::-1]
            nobody = PROMPTS - len(read)
            slots = np.pad(numbers[read], (nobody, 0), constant_values=len(self.places.slot_of))
            tokens = np.pad(self.history[read, :32], ((nobody, 0), (0, 0)))
            counts = np.pad(self.counts[read], (nobody, 0))
            cached = prefill(
                self.params, state, tokens, counts, slots, config=CONFIG, window=CAPACITY
            )
            state = taken(state, cached)
        forked, going = False, True
        while going:
            stepped, records, now = steps[forked](
                self.params, state, jnp.int32(STEPS), jnp.int32(1)
            )
            state, forked = taken(state, stepped), bool(now)
            told.add(self.by_slot(jax.device_get(records).unpack()))
            outcome.states.append(self.slots(state))
            finish = outcome.states[-1].status
            going = bool(np.isin(finish, (RUNNING, FORKS, BRANCH_ENDED)).any())
        ahead = jnp.arange(CAPACITY, dtype=jnp.int32)
        values = [jnp.int32(number) for number in (numbers[9], 2, ARMS.index("inject"))]
        state = taken(state, answer(state, values[0], ahead, *values[1:]))
        outcome.answered = self.slots(state)
        waiting = np.where(self.places.slot_of == 3, WAITS_FOR_TEXT, RUNNING).astype(np.int32)
        for step in steps:
            state = replace(state, status=jax.device_put(waiting, state.status.sharding))
            state, records, _ = step(self.params, state, jnp.int32(STEPS), jnp.int32(1))
            outcome.held.append(jax.device_get(records).unpack())
        return outcome

    def by_slot(self, records: StepRecord) -> StepRecord:
        """Returns the records with slots before lanes, as on one device."""
        slot_of = self.places.slot_of
        if records.live.shape[1] == len(slot_of):
            order = np.argsort(slot_of < 0, kind="stable")
            records = jax.tree.map(lambda x: x[:, order], records)
        return replace(records, parent=slot_of[records.parent])

    def slots(self, state: DecodeState) -> DecodeState:
        """Returns the state of the rows in the slots, with the trail's floats as floats."""
        fetched = jax.tree.map(lambda x: np.array(x)[self.places.indices], state)
        sampler = replace(fetched.sampler, trail=fetched.sampler.trail.entries.unpack())
        return replace(fetched, sampler=sampler, fork=None, settings=None)


def layout(tree: Any) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the shape of each leaf, and the shape of one device's part."""
    return {
        jax.tree_util.keystr(path): (x.shape, x.sharding.shard_shape(x.shape))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def main(output: str) -> None:
    """Runs the rows on one device and on each mesh. Writes the outcomes by mesh, with "" for one
    device."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jobs = {mesh or "": Job(mesh) for mesh in (None, *MESHES)}
    with ThreadPoolExecutor(2) as pool:
        both = [[pool.submit(one.compile) for one in job.lowered] for job in jobs.values()]
    outcomes = {
        mesh: job.run([step.result() for step in steps])
        for (mesh, job), steps in zip(jobs.items(), both, strict=True)
    }
    Path(output).write_bytes(pickle.dumps(outcomes))
