"""Any schedule: prompts in chunks, steps, tokens taken back, slots given to row after row.

The logits are those of one teacher-forced pass over the text, in float64, whatever the unused slots
hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.engine.decode import prefill
from entropix_jax.engine.slots import (
    Arrival,
    Layout,
    empty_slots,
    fresh_tally,
    insert,
    padded_ids,
    share_prefix,
)
from entropix_jax.engine.state import BRANCH_ENDED, FINISHED_STOP, FORKS, RUNNING, DecodeState
from entropix_jax.model.cache import KVCache, init_cache
from entropix_jax.model.params import Params
from entropix_jax.sampler.keys import row_key
from tests.support import reference
from tests.support.models import fill_unused, logits_of, random_params, run, tiny_config
from tests.support.properties import examples
from tests.support.samplers import CAPACITY, LANES, Job, Line, Told, advance
from tests.support.schedules import CONFIG, PARAMS, random_job

JUNK = (0.0, np.nan, np.inf, -np.inf, 1e30, 3.0)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


# The model alone: any chunks of any rows, any number of tokens taken back, any row begun again.

ROWS, CHUNK, SLOTS = 3, 4, 24
WINDOWS = (12, SLOTS)
SMALL = tiny_config(num_layers=2)
KINDS = {"GQA": SMALL, "MHA, no scaling": replace(SMALL, num_kv_heads=4, rope_scaling=None)}
fill = jax.jit(fill_unused)


@cache
def small_params(kind: str) -> Params:
    return random_params(KINDS[kind])


@dataclass
class Text:
    """A row's tokens, and the logits that were given after each."""

    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)


def check_text(kind: str, text: Text) -> None:
    """The logits of a text are those of one pass over it."""
    if text.tokens:
        whole, _ = reference.forward(small_params(kind), KINDS[kind], np.array(text.tokens))
        close(np.stack(text.logits), whole)


rows = st.integers(0, ROWS - 1)


@examples(40)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_any_schedule_of_reads(kind: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    slots = init_cache(KINDS[kind], ROWS, SLOTS, jnp.dtype(jnp.float32))
    texts = [Text() for _ in range(ROWS)]
    for _ in range(data.draw(st.integers(3, 14))):
        event = data.draw(st.sampled_from(("chunk", "chunk", "step", "back", "begin", "junk")))
        if event in ("chunk", "step"):
            most = st.integers(0, CHUNK if event == "chunk" else 1)
            count = data.draw(st.lists(most, min_size=ROWS, max_size=ROWS))
            slots = read(kind, slots, texts, np.array(count), rng)
        elif event == "junk":
            slots = fill(slots, data.draw(st.sampled_from(JUNK)))
        else:
            row = data.draw(rows)
            check_text(kind, texts[row])
            number = data.draw(st.integers(1, 6)) if event == "back" else SLOTS
            left = max(0, len(texts[row].tokens) - number)
            texts[row] = Text(texts[row].tokens[:left], texts[row].logits[:left])
            slots = replace(slots, length=slots.length.at[row].set(left))
    for text in texts:
        check_text(kind, text)


def read(
    kind: str, slots: KVCache, texts: list[Text], count: np.ndarray, rng: np.random.Generator
) -> KVCache:
    """As many new tokens of each row, as far as there is room; padding is junk, too."""
    size = 1 if count.max() <= 1 else CHUNK
    lengths = np.array([len(text.tokens) for text in texts])
    count = np.minimum(count, SLOTS - lengths)
    window = next(w for w in WINDOWS if w >= (lengths + count).max())
    tokens = rng.integers(0, KINDS[kind].vocab_size, (ROWS, size), dtype=np.int32)
    given_count = jnp.asarray(count, jnp.int32)
    hidden, stats, slots = run(
        small_params(kind), KINDS[kind], jnp.asarray(tokens), given_count, slots, window=window
    )
    logits = np.asarray(logits_of(small_params(kind), hidden))
    np.testing.assert_array_equal(slots.length, lengths + count)
    for row, text in enumerate(texts):
        text.tokens += tokens[row, : count[row]].tolist()
        text.logits += list(logits[row, : count[row]])
        if count[row]:
            np.testing.assert_array_equal(stats.keys[row], len(text.tokens))
    return slots


# Rows through the slots of a batch: admitted, their prompts cached in chunks or shared, steps of
# samplers that think, branch and go back, stopped at any time, and the next row in their place.

BATCH, READS, PART, STEPS = 4, 2, 8, 8
NOBODY = BATCH + LANES
STEM = tuple(np.random.default_rng(0).integers(0, CONFIG.vocab_size, 20).tolist())


@dataclass
class Tenant:
    """A row in its slot, and how much of its prompt is cached."""

    job: Job
    cached: int = 0

    @property
    def wanted(self) -> int:
        """Tokens of the prompt that are cached before the first step: all but the last."""
        return len(self.job.prompt) - 1

    def check(self, lines: Sequence[Line], text: list[int]) -> None:
        """What the steps said of the row, and its log-probabilities, against one pass over its
        text. Of the last lines those may not be in it that the row went back from."""
        tokens = list(self.job.prompt)
        logprobs: list[float] = []
        for line in lines:
            # What is drawn once more, after the row went back, may end the text too early.
            again = line.action in ("backspace", "budget_forcing", "think_end")
            assert line.position == len(tokens) or again
            generated = line.position - len(self.job.prompt)
            tokens = tokens[: line.position] + line.tokens
            logprobs = logprobs[:generated] + line.logprobs
        assert len(logprobs) <= self.job.budget
        assert text == tokens[: len(text)]
        logits, _ = reference.forward(PARAMS, CONFIG, np.array(tokens))
        at = np.arange(len(self.job.prompt), len(tokens))
        close(np.array(logprobs), reference.log_softmax(logits)[at - 1, np.array(tokens)[at]])


def arrival(job: Job) -> Arrival:
    history = np.zeros(CAPACITY, np.int32)
    history[: len(job.prompt)] = job.prompt
    return Arrival(
        history=history,
        confidences=np.zeros(len(history), np.float32),
        prompt_length=np.int32(len(job.prompt)),
        cached=np.int32(0),
        budget=np.int32(job.budget),
        key=row_key(job.seed, job.row_id),
        asks_for_text=np.bool_(False),
        asks_for_choice=np.bool_(False),
        settings=job.sampler,
        eos_ids=padded_ids([7]),
        tally=fresh_tally(job.sampler.mechanisms),
        forwards=np.int32(0),
    )


@dataclass
class House:
    """The slots, and who is in them."""

    state: DecodeState
    tenants: dict[int, Tenant] = field(default_factory=dict)
    told: Told = field(default_factory=lambda: Told(BATCH))

    def insert(self, number: int, job: Job) -> None:
        self.state = insert(self.state, jnp.int32(number), arrival(job))
        self.tenants[number] = Tenant(job)
        self.told.begin(number)

    def share(self, source: int, target: int) -> None:
        """The beginning of a prompt that another row has, too."""
        one, other = self.tenants[source], self.tenants[target]
        pairs = zip(one.job.prompt[: one.cached], other.job.prompt[: other.wanted], strict=False)
        same = [a == b for a, b in pairs]
        other.cached = same.index(False) if False in same else len(same)
        given_slots = jnp.int32(source), jnp.int32(target), jnp.int32(other.cached)
        self.state = share_prefix(self.state, *given_slots)

    def read(self, parts: Sequence[tuple[int, int]]) -> None:
        """So many more tokens of some rows' prompts, at most READS of them."""
        tokens, count = np.zeros((READS, PART), np.int32), np.zeros(READS, np.int32)
        numbers = np.full(READS, NOBODY, np.int32)
        for i, (number, size) in enumerate(parts):
            tenant = self.tenants[number]
            size = min(size, tenant.wanted - tenant.cached)
            tokens[i, :size] = tenant.job.prompt[tenant.cached : tenant.cached + size]
            tokens[i, size:] = 299
            count[i], numbers[i] = size, number
            tenant.cached += size
        given_parts = map(jnp.asarray, (tokens, count, numbers))
        self.state = prefill(PARAMS, self.state, *given_parts, config=CONFIG, window=CAPACITY)

    def step(self, number: int) -> None:
        for state, records in advance(PARAMS, self.state, number, config=CONFIG):
            self.state = state
            self.told.add(records)

    def leave(self, number: int) -> None:
        state = self.state
        forked = state.finish[number] == FORKS or state.fork.branch[number] >= 0
        end = state.fork.start[number] if forked else state.cache.length[number] + 1
        text = np.asarray(state.history[number, : int(end)]).tolist()
        self.tenants.pop(number).check(self.told.lines[number], text)
        self.state = replace(state, finish=state.finish.at[number].set(FINISHED_STOP))


def jobs(seed: int) -> Iterator[Job]:
    """Rows of all sorts, many of which begin alike."""
    rng = np.random.default_rng(seed)
    for i in range(8):
        job = random_job(rng, f"{seed}/{i}")
        stem = STEM[: int(rng.integers(0, len(STEM)))]
        prompt = [*stem, *job.prompt[: int(rng.integers(1, 8))]]
        yield replace(job, prompt=prompt, budget=min(job.budget, 16))


@examples(12)
@given(st.integers(0, 2**32 - 1), st.data())
def test_any_schedule_of_slots(seed: int, data: st.DataObject) -> None:
    coming = list(jobs(seed))
    layout = Layout(BATCH, LANES, 1)
    sizes: Any = {"capacity": CAPACITY, "dtype": jnp.dtype(jnp.float32)}
    house = House(empty_slots(CONFIG, layout, coming[0].sampler, **sizes))
    draw: Any = data.draw
    for _ in range(draw(st.integers(2, 6))):
        for number in sorted({*range(BATCH)} - {*house.tenants}):
            if coming and draw(st.booleans()):
                others = [n for n, tenant in house.tenants.items() if tenant.cached]
                house.insert(number, coming.pop())
                if others and draw(st.booleans()):
                    house.share(draw(st.sampled_from(others)), number)
        while behind := [n for n, one in house.tenants.items() if one.cached < one.wanted]:
            some = draw(st.permutations(behind))[:READS]
            house.read([(number, draw(st.integers(1, PART))) for number in some])
        if draw(st.booleans()):
            junk = draw(st.sampled_from(JUNK))
            house.state = replace(house.state, cache=fill(house.state.cache, junk))
        house.step(draw(st.integers(1, STEPS)))
        finish = np.asarray(house.state.finish)
        for number in sorted(house.tenants):
            ended = finish[number] not in (RUNNING, FORKS, BRANCH_ENDED)
            if ended or draw(st.integers(0, 4)) == 0:
                house.leave(number)
    for number in sorted(house.tenants):
        house.leave(number)
