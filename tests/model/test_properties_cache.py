"""Random schedules of one model: prompts in chunks, steps, retracted tokens, restarted rows.

The logits equal one teacher-forced pass over the text in float64, with any values in unused slots.
Schedules of a whole engine are in `engine.test_host_forks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from entropix_jax.model.cache import KVCache, init_cache
from entropix_jax.model.params import Params
from tests.support import reference
from tests.support.models import fill_unused, logits_of, random_params, run, tiny_config
from tests.support.properties import examples

JUNK = (0.0, np.nan, np.inf, -np.inf, 1e30, 3.0)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


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
    """A row's tokens, and the logits after each."""

    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)


def check_text(kind: str, text: Text) -> None:
    """Checks that the logits of a text equal one pass over it."""
    if text.tokens:
        whole, _ = reference.forward(small_params(kind), KINDS[kind], np.array(text.tokens))
        close(np.stack(text.logits), whole)


rows = st.integers(0, ROWS - 1)


@examples(40)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_random_schedules_of_reads(kind: str, data: st.DataObject) -> None:
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
    """Reads `count` new tokens of each row, limited by the capacity. Padding is random."""
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
