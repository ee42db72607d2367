"""The tables that `calibrate` prints: quantiles, and the regimes of the quadrant presets."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from entropix_jax.engine.preparation import sampler_settings
from entropix_jax.errors import UserError
from entropix_jax.model.loading import LanguageModel
from entropix_jax.names import REGIMES
from entropix_jax.sampler.calibration import TABLES, Calibration
from entropix_jax.sampler.metrics import Metrics
from entropix_jax.sampler.presets import load_sampler, preset_names
from entropix_jax.sampler.regimes import classify
from entropix_jax.sampler.sampler import Sampler

_PERCENTS = (5, 25, 50, 75, 95, 99)
_UNITS = {"entropy": "entropy, bits", "varentropy": "varentropy, bits²"}

_classify = jax.jit(jax.vmap(classify, in_axes=(0, None)))


def print_report(
    model: LanguageModel, calibration: Calibration, values: Mapping[str, np.ndarray]
) -> None:
    """Prints the quantiles of the measured tokens, and the share of each regime by preset."""
    console = Console(highlight=False, width=80)
    table = Table(f"{calibration.tokens} tokens")
    for percent in _PERCENTS:
        table.add_column(f"{percent}%", justify="right")
    for name in TABLES:
        quantiles = (calibration.value(name, percent) for percent in _PERCENTS)
        table.add_row(_UNITS.get(name, name), *(f"{value:.3f}" for value in quantiles))
    console.print(table)

    table = Table("regimes")
    for regime in REGIMES:
        table.add_column(regime, justify="right")
    for sampler in quadrant_presets():
        with suppress(UserError):  # the preset does not fit the model
            shares = regime_shares(model, sampler.resolve(calibration), values)
            table.add_row(sampler.name, *(f"{share:.1%}" for share in shares.values()))
    console.print(table)


def quadrant_presets() -> list[Sampler]:
    """Returns the presets that serve the regimes by more than one arm."""
    samplers = map(load_sampler, preset_names())
    return [s for s in samplers if len({s.values[f"arms.{regime}"] for regime in REGIMES}) > 1]


def regime_shares(
    model: LanguageModel, sampler: Sampler, values: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Returns the share of each regime among measured tokens.

    Args:
        sampler: resolved, see `Sampler.resolve`.
        values: float32 [n], for each of `TABLES`.

    Raises:
        UserError: the sampler does not fit the model.
    """
    # With the same static fields one compiled program serves all presets.
    settings = replace(sampler_settings(model, sampler), used=frozenset())
    measured = {name: jnp.asarray(values[name], jnp.float32) for name in TABLES}
    others = jnp.zeros_like(measured["entropy"])
    metrics = Metrics(**{f.name: measured.get(f.name, others) for f in fields(Metrics)})
    counts = np.bincount(np.asarray(_classify(metrics, settings)), minlength=len(REGIMES))
    return dict(zip(REGIMES, (counts / counts.sum()).tolist(), strict=True))
