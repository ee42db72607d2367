"""The largest numbers of a row: by short sorts, as a GPU finds them, and as `lax.top_k`."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from entropix_jax.platforms import traced_for_all
from entropix_jax.sampler.top import flipped, sortable, top, top_in_chunks, top_of_pair
from tests.support.draw_oracles import LLAMA3
from tests.support.properties import examples

LONG = (1025, 5000, 8192, LLAMA3)  # one chunk of two in part, of four, whole ones, in three rounds
SPECIAL = (0.0, -0.0, 1.0, -1.0, 3e38, 1e-45, np.inf, -np.inf, np.nan, -np.nan)

in_chunks = jax.jit(top_in_chunks, static_argnames="k")
of_pair = jax.jit(top_of_pair, static_argnames="k")
by_jax = jax.jit(lax.top_k, static_argnames="k")


@st.composite
def rows(draw: st.DrawFn, size: int) -> np.ndarray:
    """Two rows of few values or of many, with ties, and with what is no number."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pool = draw(st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), min_size=1, max_size=6))
    made = rng.choice(np.array(pool, np.float32), size=(2, size))
    noise = rng.normal(size=made.shape).astype(np.float32)
    share = draw(st.sampled_from((0.0, 1e-3, 0.5, 1.0)))
    return np.where(rng.random(made.shape) < share, noise, made)


def check(values: np.ndarray, k: int) -> None:
    for way, some in ((in_chunks, values), (of_pair, values[0]), (of_pair, values[:1])):
        expected, places = by_jax(some, k=k)
        found, found_places = way(some, k=k)
        assert np.array_equal(found_places, places)
        assert np.array_equal(found.view(np.int32), np.asarray(expected).view(np.int32))


@pytest.mark.parametrize("size", LONG[:-1])
@examples(60)
@given(st.data())
def test_ties_and_what_is_no_number_are_in_order(size: int, data: st.DataObject) -> None:
    check(data.draw(rows(size)), data.draw(st.sampled_from((1, 20, 64))))


@examples(15)
@given(rows(LLAMA3))
def test_the_vocabulary_of_llama_3(values: np.ndarray) -> None:
    check(values, 64)
    check(values, 1024)


def test_no_row_is_sorted_that_is_longer_than_few() -> None:
    """What a GPU sorts: 1,002 chunks, then 1,024 of what the first 64 of those hold, then 512."""
    traced = str(in_chunks.trace(jax.ShapeDtypeStruct((3, LLAMA3), jnp.float32), k=64).jaxpr)
    sizes = re.findall(r":i32\[3,(\d+)\] \w+:i32\[3,\d+\] = sort\[", traced)
    assert sizes == ["1002", "1024", "512"]


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_each_platform_has_one_way(platform: str) -> None:
    """Only a GPU's program has chunks."""
    shape = jax.ShapeDtypeStruct((2, LLAMA3), jnp.float32)
    with traced_for_all(True):
        traced = jax.jit(partial(top, k=64)).trace(shape)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("1002x128" in text) == (platform == "cuda")


@given(st.floats(width=32))
def test_sortable_is_undone(value: float) -> None:
    array = jnp.float32(value)
    back = lax.bitcast_convert_type(flipped(sortable(array)), jnp.float32)
    assert back == array or np.isnan(value)
