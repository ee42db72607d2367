"""Strategies of property tests: logits of any kind."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from entropix_jax.sampler.prefix import HEAD
from tests.support.draw_oracles import LLAMA3

# Few shapes, so that few programs are compiled: the smallest, one longer than the head, and that of
# Llama 3.
VOCABULARIES = {2: 8, HEAD + 1: 8, LLAMA3: 2}  # with the number of rows per batch

LEAST = 1e-30
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e4, -1e4, 3e38, -3e38, 1e-30, -1e-30, 1e-40, -1e-45, -np.inf)


def numbers(least: float, most: float) -> st.SearchStrategy[float]:
    """Draws numbers that no temperature turns into denormals. Those would be 0 on machines without
    denormals, so that ties would depend on the order of operations."""
    drawn = st.floats(least, most, width=32)
    return drawn.map(lambda number: number if abs(number) >= LEAST else 0.0)


values = st.sampled_from(SPECIAL) | numbers(-30, 30)


@st.composite
def short_rows(draw: st.DrawFn, vocab: int) -> np.ndarray:
    """Draws logits separately, from few or many values, with frequent ties."""
    pool = draw(st.lists(values, min_size=1, max_size=5))
    row = draw(st.lists(st.sampled_from(pool) | values, min_size=vocab, max_size=vocab))
    row[draw(st.integers(0, vocab - 1))] = draw(numbers(-1e4, 1e4))  # a finite one
    return np.array(row, np.float32)


@st.composite
def long_rows(draw: st.DrawFn, vocab: int) -> np.ndarray:
    """Draws logits by kind: levels with ties, slopes, noise of any width, or nearly all -inf."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = draw(st.sampled_from((1e-6, 1e-3, 0.1, 1.0, 4.0, 30.0)))
    levels = numbers(-20, 20) | st.sampled_from((0.0, -0.0, 1e4, -1e4, 3e38, -3e38))
    kinds = {
        "levels": lambda: rng.choice(draw(st.lists(levels, min_size=1, max_size=6)), size=vocab),
        "slope": lambda: -width * rng.permutation(vocab) / vocab,
        "noise": lambda: width * rng.normal(size=vocab),
        "far": lambda: width * rng.normal(size=vocab) + draw(st.sampled_from((-1e4, 1e4))),
        # One token at 0, all others far below it, or half of the mass.
        "one": lambda: np.where(
            np.arange(vocab) == rng.integers(vocab),
            0.0,
            -draw(st.sampled_from((0.0, 1e-3, 5.0, np.log(vocab - 1), 17.0, 95.0, 1e4))),
        ),
    }
    row = kinds[draw(st.sampled_from(sorted(kinds)))]()
    if draw(st.booleans()):
        holes = rng.random(vocab) < draw(st.sampled_from((0.1, 0.9, 0.9999, 1.0)))
        holes[rng.integers(vocab)] = False
        row = np.where(holes, -np.inf, row)
    return row.astype(np.float32)


def rows_of(vocab: int) -> st.SearchStrategy[np.ndarray]:
    """Draws a row of a vocabulary, often with only one finite logit."""
    if vocab == 2:
        return short_rows(vocab)
    lone = st.tuples(st.integers(0, vocab - 1), st.sampled_from((0.0, 1e4, -1e4, 1e-40))).map(
        lambda at: np.where(np.arange(vocab) == at[0], at[1], -np.inf).astype(np.float32)
    )
    made_up = (short_rows(vocab),) if vocab <= HEAD + 1 else ()
    return st.one_of(long_rows(vocab), lone, *made_up)
