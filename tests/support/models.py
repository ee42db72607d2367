"""Tiny random models, and the compiled functions that the tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.engine.slots import Layout, empty_slots
from entropix_jax.engine.state import RUNNING, DecodeState
from entropix_jax.model.cache import KVCache, init_cache
from entropix_jax.model.checkpoint import check_tensors, open_tensors, read_params
from entropix_jax.model.config import ModelConfig, RopeScaling
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.params import Params, ParamSpec, param_specs
from entropix_jax.packed import pack
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.metrics import measure
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.stats import AttnStats

# A small version of a published configuration. The original context is short, so that a prompt of
# 200 tokens reaches the scaled wavelengths.
SCALING = RopeScaling(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
)
TINY = ModelConfig(
    vocab_size=64,
    width=32,
    mlp_width=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=1024,
    norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=SCALING,
    tied_head=True,
    dtype="float32",
)


def load_params(folder: Path, config: ModelConfig, dtype: str, **options: Any) -> Params:
    """The weights of a folder, which needs no other file."""
    stored = open_tensors(folder)
    check_tensors(folder, stored, config)
    return read_params(stored, config, dtype, **options)


def tiny_config(**changes: Any) -> ModelConfig:
    return replace(TINY, **changes)


def random_params(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> Params:
    """Returns weights with unit activations, uneven norms and sharp attention, so that each has an
    effect."""
    rng = np.random.default_rng(seed)

    def leaf(spec: ParamSpec) -> jax.Array:
        if len(spec.shape) == 1:
            return jnp.asarray(rng.uniform(0.5, 1.5, spec.shape), dtype)
        gain = 2.0 if "q_proj" in spec.name or "k_proj" in spec.name else 1.0
        return jnp.asarray(gain * rng.normal(size=spec.shape) / np.sqrt(spec.shape[1]), dtype)

    return jax.tree.map(leaf, param_specs(config))


def random_tokens(config: ModelConfig, number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(1000 + seed).integers(0, config.vocab_size, number, dtype=np.int32)


# All tests share one compiled program for each shape.
run = jax.jit(forward, static_argnames=("config", "window"))
logits_of = jax.jit(unembed)
metrics_of = jax.jit(
    lambda logits, stats, weights: measure(jax.nn.log_softmax(logits, axis=-1), stats, weights)
)


def teacher_forced(
    params: Params, config: ModelConfig, tokens: np.ndarray
) -> tuple[np.ndarray, AttnStats, KVCache]:
    """Returns logits [B, T, V] of rows in one pass, the last position's statistics, and cache."""
    batch, number = tokens.shape
    cache = init_cache(config, batch, number, jnp.dtype(jnp.float32))
    count = jnp.full(batch, number, jnp.int32)
    hidden, stats, cache = run(params, config, jnp.asarray(tokens), count, cache, window=number)
    return np.asarray(logits_of(params, hidden)), stats, cache


def fill_unused(cache: KVCache, junk: float) -> KVCache:
    """Returns the cache with `junk` in all unused slots. Unused values are always finite."""
    slot = jnp.arange(cache.capacity, dtype=jnp.int32)[None, :]
    used = (slot < cache.length[:, None])[:, None, :, None]

    def fill(arrays: tuple[jax.Array, ...], junk: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.where(used, x, junk.astype(x.dtype)) for x in arrays)

    finite = jnp.nan_to_num(jnp.asarray(junk), nan=1e30, posinf=1e30, neginf=-1e30)
    return replace(
        cache, keys=fill(cache.keys, jnp.asarray(junk)), values=fill(cache.values, finite)
    )


def uncached(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    keys: np.ndarray,
    settings: SamplerSettings,
    eos_ids: np.ndarray,
    *,
    capacity: int,
    lanes: int = 0,
    shards: int = 1,
) -> DecodeState:
    """Returns float32 rows with uncached prompts, and with their own settings."""
    layout = Layout(len(prompts), lanes, shards)
    first = jax.tree.map(lambda x: x[0], settings)
    state = empty_slots(
        config, layout, first, mechanisms=MECHANISMS, capacity=capacity, dtype=jnp.dtype("float32")
    )
    history = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in enumerate(prompts):
        history[row, : len(prompt)] = prompt

    def put(rows: jax.Array, own: Any) -> jax.Array:
        return rows.at[layout.indices].set(own)

    return replace(
        state,
        history=put(state.history, history),
        prompt_length=put(state.prompt_length, np.array([*map(len, prompts)])),
        budget=put(state.budget, np.array(budgets)),
        keys=put(state.keys, keys),
        settings=jax.tree.map(put, state.settings, pack(settings, 1)),
        eos_ids=jnp.broadcast_to(jnp.asarray(eos_ids), (len(layout.slot_of), len(eos_ids))),
        status=put(state.status, RUNNING),
    )
