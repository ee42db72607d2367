"""What is recorded of a step, and the states that a row can be in."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine import state as decode_state
from entropix_jax.engine.state import Recording, extras_of, finish_of, init_log
from entropix_jax.sampler.mechanisms.branch import MAX_DEPTH
from tests.support.models import tiny_config
from tests.support.samplers import attn_stats

B, V = 3, 40


def test_the_likeliest_tokens_are_each_rows_own() -> None:
    logits = np.random.default_rng(0).normal(size=(B, V)).astype(np.float32) * 3
    stats = attn_stats(B)
    extras = extras_of(jnp.asarray(logits), stats, Recording(top=4, layers=True))
    z = logits.astype(np.float64)
    probs = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    order = np.argsort(-probs, axis=1)[:, :4]
    np.testing.assert_array_equal(extras.top_ids, order)
    np.testing.assert_allclose(
        extras.top_probs, np.take_along_axis(probs, order, axis=1), rtol=1e-6
    )
    np.testing.assert_array_equal(extras.layers, stats.entropy)


def test_the_log_has_room_for_what_is_recorded_of_each_token() -> None:
    config = tiny_config()
    shape = (B, config.num_layers, config.num_heads)
    stats = replace(attn_stats(B), entropy=jnp.zeros(shape))
    for recording in (Recording(), Recording(top=3), Recording(layers=True)):
        one = extras_of(jnp.zeros((B, V)), stats, recording)
        assert one.top_ids.shape == one.top_probs.shape == (B, recording.top)
        notes = init_log(config, 5, recording).branches.notes
        for room, leaf in zip(jax.tree.leaves(notes), jax.tree.leaves(one), strict=True):
            assert room.shape == (5, MAX_DEPTH, *leaf.shape[1:])
            assert room.dtype == leaf.dtype


def test_how_a_row_ends() -> None:
    left = jnp.asarray([1, 0, 0, 1, -1])
    token = jnp.asarray([7, 7, 5, 5, 6])
    eos_ids = jnp.asarray([[5, 6], [5, 6], [5, 6], [5, -1], [5, -1]])
    eos, length = decode_state.FINISHED_EOS, decode_state.FINISHED_LENGTH
    expected = [decode_state.RUNNING, length, eos, eos, length]
    assert finish_of(left, token, eos_ids).tolist() == expected
