"""The baseline presets do what their descriptions say, from the logits to the drawn token."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropix_jax.names import REGIMES
from entropix_jax.sampler.draw import Drawn, truncated_draw
from entropix_jax.sampler.metrics import measure
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.regimes import classify
from entropix_jax.sampler.settings import SamplerSettings
from entropix_jax.sampler.step import propose
from tests.support.draw_oracles import Kept, Oracle, below_one, random_logits
from tests.support.samplers import attn_stats, batch_of, params_of, proposal_of, view

ROWS, VOCAB = 60, 1000

PLAIN = dict.fromkeys((f"arms.{regime}" for regime in REGIMES), "sample")

# All in which a preset differs from `temperature`, and the numbers that its description gives.
BASELINES: dict[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "top-k": ({"base.temperature": 1.0, "base.top_k": 40}, ("base.top_k",)),
    "top-p": ({"base.temperature": 1.0, "base.top_p": 0.95}, ("base.top_p",)),
    "min-p": ({"base.temperature": 1.0, "base.min_p": 0.1}, ()),
    "top-n-sigma": (
        {"base.temperature": 1.0, "truncation.rule": "top_n_sigma", "truncation.sigmas": 1.0},
        ("truncation.sigmas",),
    ),
    "typical": (
        {"base.temperature": 1.0, "truncation.rule": "typical", "truncation.typical_mass": 0.95},
        ("truncation.typical_mass",),
    ),
    "eta": (
        {"base.temperature": 1.0, "truncation.rule": "eta", "truncation.eta_epsilon": 3e-4},
        ("truncation.eta_epsilon",),
    ),
    "edt": (
        {
            "base.temperature": 1.0,
            "base.top_p": 0.95,
            "edt.base": 0.8,
            "edt.theta": 0.1,
            **dict.fromkeys(PLAIN, "edt"),
        },
        ("base.top_p", "edt.base", "edt.theta"),
    ),
    "mirostat": (
        {
            "base.temperature": 1.0,
            "truncation.rule": "mirostat",
            "truncation.mirostat_target": 3.0,
            "truncation.mirostat_rate": 0.1,
        },
        ("truncation.mirostat_target", "truncation.mirostat_rate"),
    ),
}


@pytest.mark.parametrize("name", BASELINES)
def test_settings(name: str) -> None:
    expected, described = BASELINES[name]
    sampler, temperature = load_sampler(name), load_sampler("temperature")
    for key, value in {**PLAIN, "truncation.rule": "nucleus", **expected}.items():
        assert sampler.values[key] == value, key
    changed = {key for key in sampler.values if sampler.values[key] != temperature.values[key]}
    assert changed <= set(expected)
    numbers = {float(number) for number in re.findall(r"\d+\.?\d*", sampler.description)}
    assert numbers >= {sampler.values[key] for key in described}


@pytest.mark.parametrize("name", BASELINES)
def test_regimes_are_those_of_entropix(name: str) -> None:
    ours, theirs = params_of(name), params_of("entropix")
    np.testing.assert_array_equal(ours.low, theirs.low)
    np.testing.assert_array_equal(ours.high, theirs.high)
    assert load_sampler(name).values["thresholds.calibrated"] is True
    assert load_sampler(name).values["loop.max_period"] == 0


@jax.jit
def step(logits: jax.Array, uniforms: jax.Array, params: SamplerSettings) -> Drawn:
    """What a step of the sampler does with the logits of plain rows."""
    stats = attn_stats(ROWS)
    metrics = measure(jax.nn.log_softmax(logits), stats, params.layer_weights)
    regime = jax.vmap(classify)(metrics, params)
    arm = jnp.take_along_axis(params.arms, regime[:, None], axis=1)[:, 0]
    row = jax.tree.map(lambda x: jnp.broadcast_to(x, ROWS), view(may=False))
    proposal = jax.vmap(propose)(arm, metrics, params, row)
    mu = 2.0 * params.truncation.mirostat_target
    return truncated_draw(logits, proposal, uniforms, params.truncation, mu)


def entropy_of(logits: np.ndarray) -> float:
    """In nats."""
    possible = logits[logits > -np.inf].astype(np.float64)
    p = np.exp(possible - possible.max())
    p /= p.sum()
    return -float(np.sum(p[p > 0] * np.log(p[p > 0])))


def nucleus(**settings: float) -> Callable[[np.ndarray], Oracle]:
    return lambda logits: Oracle(logits, proposal_of(**settings))


def edt(logits: np.ndarray) -> Oracle:
    entropy = entropy_of(logits)
    temperature = 0.8 ** (0.1 / entropy) if entropy > 0 else 0.0
    return Oracle(logits, proposal_of(temperature, top_p=0.95))


def rule(name: str, number: float) -> Callable[[np.ndarray], Kept]:
    return lambda logits: Kept.of(name, logits, 1.0, number)


# What may be drawn, by what the descriptions say.
ORACLES: dict[str, Callable[[np.ndarray], Oracle | Kept]] = {
    "greedy": nucleus(temperature=0.0),
    "temperature": nucleus(temperature=0.7),
    "top-k": nucleus(top_k=40),
    "top-p": nucleus(top_p=0.95),
    "min-p": nucleus(min_p=0.1),
    "top-n-sigma": rule("top_n_sigma", 1.0),
    "typical": rule("typical", 0.95),
    "eta": rule("eta", 3e-4),
    "edt": edt,
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

    def fits(oracle: Callable[[np.ndarray], Oracle | Kept]) -> bool:
        try:
            for row in range(ROWS):
                ids, uniform = np.asarray(drawn.ids[row]), uniforms[row].astype(np.float64)
                oracle(logits[row]).check(int(drawn.kept[row]), ids, uniform)
        except AssertionError:
            return False
        return True

    assert [other for other, oracle in ORACLES.items() if fits(oracle)] == [name]
