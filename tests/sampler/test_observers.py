"""Observers, which change the metrics of the regimes and arms, against float64 NumPy."""

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import entropix_jax
from entropix_jax.engine.api import Generation
from entropix_jax.engine.calibrated import CalibratedSampler, calibrate_sampler
from entropix_jax.engine.request import Request
from entropix_jax.engine.tokens import encode_prompt
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.errors import UserError
from entropix_jax.lab.answers import read_prompts
from entropix_jax.lab.calibrate import PROMPTS_FILE
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import REGIMES
from entropix_jax.replay import formulas
from entropix_jax.replay.threefry import uniforms
from entropix_jax.sampler.calibration import AT_ENTROPY, KNOTS, LEVELS, Calibration
from entropix_jax.sampler.context import Context
from entropix_jax.sampler.draw import row_key
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.mechanisms import surrogate, view
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.presets import load_sampler
from tests.support.samplers import batch_of, contexts_of, params_of, proposal_of

VOCAB = 500


def test_a_view_measures_another_distribution() -> None:
    rng = np.random.default_rng(0)
    views = [(1.0, 0), (0.6, 0), (1.0, 20), (0.6, 3), (2.5, 0), (1.0, 1)]
    logits = rng.normal(0, 3, (len(views), VOCAB)).astype(np.float32)
    keys = ("view.temperature", "view.likeliest")
    rows = [
        params_of("min-p", dict(zip(keys, one, strict=True)), vocab_size=VOCAB) for one in views
    ]
    contexts = contexts_of(proposal_of([1.0] * len(views)), batch_of(*rows), jnp.asarray(logits))
    seen = jax.vmap(view.observe)(dataclasses.replace(contexts, logits=jnp.asarray(logits)))
    for row, values in enumerate(views):
        # Without a view the given metrics, here zeros, do not change.
        wanted = formulas.view(dict(zip(keys, values, strict=True)), logits[row]) or (0.0, 0.0)
        found = seen.entropy[row], seen.varentropy[row]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def at_entropy(tables: Calibration, name: str, h: float) -> list[float]:
    """Returns the quantiles of a quantity at an entropy, interpolated between the knots."""
    assert tables.at_entropy is not None
    knots = tables.at_entropy["entropy"]
    return [float(np.interp(h, knots, column)) for column in tables.at_entropy[name].T]


def seen_varentropy(kind: str, token: TokenRecord, key: np.ndarray, tables: Calibration) -> float:
    """Returns the varentropy that the regimes use."""
    h = token.entropy
    if kind == "measured":
        return token.varentropy
    if kind == "max_prob":
        rank = np.interp(token.max_prob, at_entropy(tables, "max_prob", h), LEVELS)
    else:
        drawn = uniforms((key[:1], key[1:]), token.position, 0, "observe", 1)[0]
        rank = {"permuted": drawn, "median": 0.5}[kind]
    return float(np.interp(rank, LEVELS, at_entropy(tables, "varentropy", h)))


def regime_of(h: float, u: float, sampler: CalibratedSampler) -> str:
    h1, h2, u1, u2 = (sampler.values[f"thresholds.{name}"] for name in ("h1", "h2", "u1", "u2"))
    boxes = (h < h1 and u < u1, h > h2 and u < u1, h < h2 and u > u2, h > h2 and u > u2)
    return next((name for name, holds in zip(REGIMES, boxes, strict=False) if holds), "mid")


def answer(model: LanguageModel) -> list[tuple[str, np.ndarray, TokenRecord]]:
    """Returns tokens for the calibration prompts by `min-p`, whose text does not depend on regimes,
    each with its kind of surrogate and its row's key."""
    requests = [
        Request(
            tuple(encode_prompt(model, item.prompt, chat=not isinstance(item.prompt, str))),
            calibrate_sampler(
                load_sampler("min-p").with_values({"surrogate.varentropy": kind}), model
            ),
            max_new_tokens=64,
            row_id=item.id,
            seed=1000,
            eos_ids=model.end_ids(chat=True),
            tag=kind,
        )
        for kind in surrogate.KINDS
        for item in read_prompts(model.folder / PROMPTS_FILE)
    ]
    generation = Generation(model, requests)
    list(generation)
    return [
        (row.request.tag, row_key(row.request.seed, row.request.row_id), token)
        for row in generation.rows
        for token in row.tokens
    ]


def test_a_surrogate_determines_the_regime(tiny: LanguageModel) -> None:
    """The trace contains the measured varentropy, and the regime of the surrogate."""
    sampler = calibrate_sampler(load_sampler("min-p"), tiny)
    tokens = answer(tiny)
    others, changed = 0, Counter[str]()
    for kind, key, token in tokens:
        u = seen_varentropy(kind, token, key, sampler.calibration)
        others += token.regime != regime_of(token.entropy, u, sampler)
        measured = regime_of(token.entropy, token.varentropy, sampler)
        changed[kind] += token.regime != measured
    assert others <= len(tokens) // 200  # within rounding of a threshold
    assert changed["measured"] <= 2
    assert min(changed[kind] for kind in surrogate.KINDS[1:]) > 5


def test_tables_at_an_entropy() -> None:
    """If u / (1 + h) is uniform at each entropy h, its quantiles equal the levels."""
    rng = np.random.default_rng(0)
    h, rank = rng.uniform(0, 10, 50_000), rng.uniform(size=50_000)
    values = {"entropy": h, "varentropy": rank * (1 + h), "max_prob": np.exp2(-h)}
    values |= {"attn_entropy_norm": h, "agreement": h}
    tables = Calibration.from_values(values, "", {})
    assert tables.at_entropy is not None
    assert {name: table.shape for name, table in tables.at_entropy.items()} == AT_ENTROPY
    knots = tables.at_entropy["entropy"]
    np.testing.assert_allclose(knots, np.linspace(0, 10, KNOTS), atol=0.1)
    near = tables.at_entropy["varentropy"] / (1 + knots)[:, None]
    assert np.abs(near - LEVELS).max() < 0.1  # from about 1,000 tokens each
    assert np.abs(near - LEVELS).mean() < 0.015
    np.testing.assert_allclose(tables.at_entropy["max_prob"][:, 10], np.exp2(-knots), rtol=0.1)


def test_a_surrogate_needs_tables(tiny: LanguageModel) -> None:
    sampler = load_sampler("entropix").with_values({"surrogate.varentropy": "permuted"})
    tables = calibrate_sampler(sampler, tiny).calibration
    told = r"surrogate\.varentropy = 'permuted': the model's calibration lacks .* run entropix-jax"
    with pytest.raises(UserError, match=told):
        sampler.resolve(dataclasses.replace(tables, at_entropy=None)).settings(
            num_layers=4, epsilon=1e-7, encode=lambda text: [], token_texts=list, vocab_size=10
        )
    with pytest.raises(UserError, match="must be one of measured, permuted, max_prob, median"):
        sampler.with_values({"surrogate.varentropy": "shuffled"})


def test_a_custom_observer(tiny: LanguageModel) -> None:
    """A return value of another type is a one-line error."""

    def shift(ctx: Context) -> Metrics:
        return dataclasses.replace(ctx.metrics, entropy=ctx.metrics.entropy + 100.0)

    sampler = load_sampler("min-p").with_mechanism(Mechanism("shift", observe=shift))
    (row,) = entropix_jax.generate(tiny, "Once", sampler, max_new_tokens=8)
    assert {token.regime for token in row.tokens} <= {"helv", "hehv", "mid"}
    assert max(token.entropy for token in row.tokens) < 100
    entropy: Any = lambda ctx: ctx.metrics.entropy  # noqa: E731
    invalid = Mechanism("invalid", observe=entropy)
    with pytest.raises(UserError, match="'invalid': `observe` must return Metrics, not"):
        entropix_jax.generate(tiny, "Once", load_sampler("min-p").with_mechanism(invalid))
