"""Rotary position embedding in the rotate-half form of the Hugging Face layout (Su et al. 2021)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.model.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each rotated pair, float32 [H/2].

    With `RopeScaling`, Llama 3's rule: wavelengths longer than `original / low_freq_factor` are
    stretched by `factor`, those shorter than `original / high_freq_factor` are kept, and between
    the two the frequency is interpolated linearly in `original / wavelength`. With `RopeDivisors`
    each frequency is divided by its own divisor.
    """
    pairs = np.arange(0, config.head_dim, 2, dtype=np.float64)
    frequencies = config.rope_theta ** (-pairs / config.head_dim)
    scaling = config.rope_scaling
    if isinstance(scaling, RopeScaling):
        turns = scaling.original_max_positions * frequencies / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        kept = np.clip(kept, 0.0, 1.0)
        frequencies = kept * frequencies + (1 - kept) * frequencies / scaling.factor
    elif scaling is not None:
        frequencies = frequencies / np.asarray(scaling.divisors, np.float64)
    return frequencies.astype(np.float32)


def rotations(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each pair's angle at `positions[B, T]`: two float32 [B, T, 1, H/2]."""
    frequencies = jnp.asarray(inverse_frequencies(config))
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs `(x[..., i], x[..., i + H/2])` of `x[B, T, heads, H]`, in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
