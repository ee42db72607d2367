"""What `test_sharding` does in a process of its own, with eight devices: the same rows on one
device and on several meshes."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.decode import answer, decode, prefill
from entropix_jax.engine.state import RUNNING, WAITS_FOR_TEXT, DecodeState, Recording, init_state
from entropix_jax.model.mesh import parse_mesh, place, rules_for
from entropix_jax.model.params import Params
from entropix_jax.sampler.keys import row_key
from entropix_jax.sampler.settings import SamplerSettings
from tests.support.models import random_params, tiny_config
from tests.support.samplers import ARMS, batch_of, params_of

MESHES = ("data=8", "model=8", "data=2,model=4")
BATCH, CAPACITY, STEPS, CHUNKS = 16, 64, 16, 2
LANES = 9  # rows whose prompts are read at a time: the last call has room for nobody, too
PRESETS = ("entropix", "greedy", "document-000", "entropix")
CONFIG = tiny_config(
    vocab_size=304, num_layers=2, num_heads=16, num_kv_heads=8, mlp_width=48, tied_head=False
)


@dataclass
class Outcome:
    """What came of the rows on one mesh, on the host."""

    states: list[DecodeState] = field(default_factory=list)  # after each chunk
    records: list[Any] = field(default_factory=list)  # of each chunk
    logs: list[Any] = field(default_factory=list)
    answered: DecodeState | None = None
    held: Any = None  # records of a call in which one row waits for the host
    layout: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    kept: bool = True  # donated buffers were taken, and what came back lies as they lay
    text: str = ""  # the compiled step


def rows() -> tuple[Params, SamplerSettings, DecodeState]:
    """Rows of several samplers and lengths, on the host, nothing cached."""
    params = random_params(CONFIG)
    params = replace(params, head=5.0 * params.head)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG.vocab_size, 3 + i).tolist() for i in range(BATCH)]
    budgets = [STEPS * CHUNKS - 3 * (i % 5) for i in range(BATCH)]
    keys = np.stack([row_key(0, str(i)) for i in range(BATCH)])
    dtype = jnp.dtype(jnp.float32)
    state = init_state(CONFIG, prompts, budgets, keys, capacity=CAPACITY, dtype=dtype)
    sampler = batch_of(*(params_of(PRESETS[i % len(PRESETS)]) for i in range(BATCH)))
    return jax.tree.map(np.array, (params, sampler, state))


class Job:
    """The rows on one mesh, or on one device."""

    def __init__(self, mesh: str | None) -> None:
        params, sampler, state = rows()
        ends = np.full((BATCH, 2), -1, np.int32)
        self.counts = np.append(state.prompt_length - 1, 0).astype(np.int32)
        self.history = state.history
        if mesh is None:
            params, sampler, state, ends = jax.device_put((params, sampler, state, ends))
        else:
            rules = rules_for(parse_mesh(mesh, jax.devices()), CONFIG)
            params = place(params, rules.params(CONFIG))
            by_row = (sampler, state, ends)
            sampler, state, ends = place(by_row, rules.rows(by_row))
        self.params, self.sampler, self.state, self.ends = params, sampler, state, ends
        self.layout = layout(state)
        self.lowered = decode.lower(
            *(params, sampler, ends, state, jnp.int32(STEPS)),
            config=CONFIG,
            window=CAPACITY,
            max_steps=STEPS,
            recording=Recording(top=3),
        )

    def run(self, step: Any) -> Outcome:
        """`step` is the compiled one: given what lies elsewhere than it was told it fails."""
        outcome = Outcome(text=step.as_text(), layout=self.layout)
        state = self.state

        def taken(donated: DecodeState, state: DecodeState) -> DecodeState:
            gone = all(x.is_deleted() for x in jax.tree.leaves(donated))
            outcome.kept &= gone and layout(state) == outcome.layout
            return state

        for first in range(0, BATCH, LANES):
            lanes = np.arange(first, first + LANES, dtype=np.int32)[::-1].copy()
            lanes = np.minimum(lanes, BATCH)
            tokens = np.zeros((LANES, 32), np.int32)
            tokens[lanes < BATCH] = self.history[lanes[lanes < BATCH], :32]
            given = (tokens, self.counts[lanes], lanes)
            state = taken(
                state, prefill(self.params, state, *given, config=CONFIG, window=CAPACITY)
            )
        for _ in range(CHUNKS):
            stepped, records, log = step(
                self.params, self.sampler, self.ends, state, jnp.int32(STEPS)
            )
            state = taken(state, stepped)
            outcome.states.append(fetched(state))
            outcome.records.append(jax.device_get(records))
            outcome.logs.append(jax.device_get(log))
        ahead = jnp.arange(CAPACITY, dtype=jnp.int32)
        numbers = [jnp.int32(number) for number in (9, 2, ARMS.index("inject"), 0)]
        state = taken(state, answer(state, numbers[0], ahead, *numbers[1:]))
        outcome.answered = fetched(state)
        finish = np.full(BATCH, RUNNING, np.int32)
        finish[3] = WAITS_FOR_TEXT
        state = replace(state, finish=jax.device_put(finish, state.finish.sharding))
        held = step(self.params, self.sampler, self.ends, state, jnp.int32(STEPS))[1]
        outcome.held = jax.device_get(held)
        return outcome


def fetched(state: DecodeState) -> DecodeState:
    """A copy: what the host still looks at is not donated."""
    return jax.device_get(jax.tree.map(jnp.copy, state))


def layout(tree: Any) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each leaf: its shape, and that of one device's part."""
    return {
        jax.tree_util.keystr(path): (x.shape, x.sharding.shard_shape(x.shape))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def main(output: str) -> None:
    """Runs the rows on one device and on each mesh. Writes the outcomes by their meshes, that of
    one device as ""."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", True)  # half the time to compile
    jobs = {mesh or "": Job(mesh) for mesh in (None, *MESHES)}
    with ThreadPoolExecutor(2) as pool:
        steps = [*pool.map(lambda job: job.lowered.compile(), jobs.values())]
    outcomes = {mesh: job.run(step) for (mesh, job), step in zip(jobs.items(), steps, strict=True)}
    Path(output).write_bytes(pickle.dumps(outcomes))
