"""Weights of fewer bits: how far they may be from float32; their layout changes nothing."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.model.cache import init_cache
from entropix_jax.model.llama import forward, unembed
from entropix_jax.model.loading import LanguageModel, load
from tests.support.runs import Spec, run_specs

# Mean KL(float32 || narrow) of a token, nats, on the embedded model's own texts: some three times
# what is measured.
TOLERANCE = {"bfloat16": 1.5e-5, "int8": 1.5e-4}
LENGTH = 256


@cache
def embedded(weights: str) -> LanguageModel:
    return load("tiny", weights)


@cache
def texts() -> np.ndarray:
    """What the embedded model writes at temperature 1: int32 [4, LENGTH]."""
    model = embedded("float32")
    start = model.tokenizer.encode("The ", add_bos=True)
    requests = [Spec(start, str(i), LENGTH - len(start)) for i in range(4)]
    run = run_specs(model, requests, "temperature", ignore_eos=True)
    for _ in run:
        pass
    return np.asarray([[*start, *(token.token_id for token in row.tokens)] for row in run.rows])


def log_probs(model: LanguageModel) -> np.ndarray:
    """Float64 [4 * LENGTH, V], at every position of the texts."""
    tokens = jnp.asarray(texts(), jnp.int32)
    cache = init_cache(model.config, 4, LENGTH, model.precision.activations)
    count = jnp.full(4, LENGTH, jnp.int32)
    hidden, _, _ = jax.jit(forward, static_argnums=1, static_argnames="window")(
        model.params, model.config, tokens, count, cache, window=LENGTH
    )
    logits = np.asarray(unembed(model.params, hidden), np.float64)
    logits = logits.reshape(-1, logits.shape[-1])
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@pytest.mark.parametrize("weights", list(TOLERANCE))
def test_narrow_weights_stay_close_to_float32(weights: str) -> None:
    true, narrow = log_probs(embedded("float32")), log_probs(embedded(weights))
    divergence = np.sum(np.exp(true) * (true - narrow), axis=-1)
    assert 0 < divergence.mean() < TOLERANCE[weights]
    # Where the likeliest token changes, the two were about as likely.
    changed = true.argmax(-1) != narrow.argmax(-1)
    rows = np.arange(len(true))[changed]
    gap = true[rows, true[rows].argmax(-1)] - true[rows, narrow[rows].argmax(-1)]
    assert changed.mean() < 0.08
    assert gap.max(initial=0.0) < 0.2
