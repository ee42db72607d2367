"""The baseline presets do what their descriptions say, from the logits to the drawn token."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.sampler.metrics import measure
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.regimes import classify
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.step import propose
from tests.support.draw_oracles import (
    Drawn,
    Kept,
    below_one,
    entropy,
    random_logits,
    softmax,
    truncated_draw,
)
from tests.support.samplers import attn_stats, batch_of, context, params_of, proposal_of

ROWS, VOCAB = 60, 1000


@jax.jit
def step(logits: jax.Array, uniforms: jax.Array, params: SamplerSettings) -> Drawn:
    """What a step of the sampler does with the logits of plain rows."""
    stats = attn_stats(ROWS)
    metrics = measure(jax.nn.log_softmax(logits), stats, params.layer_weights)
    regime = jax.vmap(classify)(metrics, params)
    arm = jnp.take_along_axis(params.arms, regime[:, None], axis=1)[:, 0]
    contexts = jax.vmap(lambda *row: context(*row, may=False))(metrics, params)
    proposal = jax.vmap(propose)(arm, contexts)
    return truncated_draw(logits, proposal, uniforms, params)


def nucleus(**settings: float) -> Callable[[np.ndarray], Kept]:
    return lambda logits: Kept.of_nucleus(logits, proposal_of(**settings))


def edt(logits: np.ndarray) -> Kept:
    nats = entropy(softmax(logits.astype(np.float64), 1.0))
    temperature = 0.8 ** (0.1 / nats) if nats > 0 else 0.0
    return Kept.of_nucleus(logits, proposal_of(temperature, top_p=0.95))


def dynatemp(logits: np.ndarray) -> Kept:
    share = entropy(softmax(logits.astype(np.float64), 1.0)) / math.log(1000)
    return Kept.of_nucleus(logits, proposal_of(2 * share, min_p=0.1))


def forking(logits: np.ndarray) -> Kept:
    forks = entropy(softmax(logits.astype(np.float64), 1.0)) > 0.97 * math.log(2)
    return Kept.of_nucleus(logits, proposal_of(1.0 if forks else 0.6, top_p=0.95))


def rule(name: str, number: float) -> Callable[[np.ndarray], Kept]:
    return lambda logits: Kept.of(name, logits, 1.0, number)


# What may be drawn, by what the descriptions say.
ORACLES: dict[str, Callable[[np.ndarray], Kept]] = {
    "greedy": nucleus(temperature=0.0),
    "temperature": nucleus(temperature=0.7),
    "top-k": nucleus(top_k=40),
    "top-p": nucleus(top_p=0.95),
    "min-p": nucleus(min_p=0.1),
    "top-n-sigma": rule("top_n_sigma", 1.0),
    "typical": rule("typical", 0.95),
    "eta": rule("eta", 3e-4),
    "epsilon": rule("epsilon", 3e-4),
    "top-a": rule("top_a", 0.2),
    "p-less": rule("p_less", 0.0),
    "top-h": rule("top_h", 0.4),
    "ees": rule("ees", 0.0),
    "min-k": rule("min_k", 3.0),
    "edt": edt,
    "dynatemp": dynatemp,
    "forking-tokens": forking,
    "mirostat": rule("mirostat", 6.0),
}


@pytest.mark.parametrize("name", ORACLES)
def test_draws(name: str) -> None:
    """Each preset keeps and draws what its own oracle says, and no other preset's oracle does."""
    rng = np.random.default_rng(5)
    logits = random_logits(rng, ROWS, VOCAB)
    uniforms = below_one(rng.random((ROWS, 1)))
    params = batch_of(*[params_of(name)] * ROWS)
    drawn = step(jnp.asarray(logits), jnp.asarray(uniforms), params)
    left = np.asarray(drawn.left) > -np.inf

    def fits(oracle: Callable[[np.ndarray], Kept]) -> bool:
        try:
            for row in range(ROWS):
                ids, uniform = np.asarray(drawn.ids[row]), uniforms[row].astype(np.float64)
                oracle(logits[row]).check(left[row], ids, uniform)
        except AssertionError:
            return False
        return True

    assert [other for other, oracle in ORACLES.items() if fits(oracle)] == [name]
    # Its regimes are those of `entropix`, and nothing else interferes.
    entropix = params_of("entropix")
    for bounds in ("low", "high", "low_thresholds", "high_thresholds"):
        np.testing.assert_array_equal(getattr(params, bounds)[0], getattr(entropix, bounds))
    np.testing.assert_array_equal(params.thresholds.values[0], entropix.thresholds.values)
    assert params.loop.max_period[0] == 0
    # No percentile can change what it draws: a model needs no tables for it.
    assert not load_sampler(name).follows_tables
