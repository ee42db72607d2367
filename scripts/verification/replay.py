"""Whether a difference is float32's own rounding: a row's text once more, in float64.

Sums of the same terms in another order differ by their rounding, and at a few positions the model
magnifies that. By how much is measured, not assumed: a model whose channels and MLP units are
numbered otherwise is the same model, but for the order in which it sums.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from entropix_jax.loading import LanguageModel
from entropix_jax.params import Params, ParamSpec, param_specs
from tests import reference
from tests.models import teacher_forced

ORDERS = 24
DEVIATIONS = 4.0  # from float64, in standard deviations over the orders: one float in 16,000


def rounding(
    model: LanguageModel, tokens: Sequence[int], records: Sequence[Mapping[str, Any]]
) -> float | None:
    """How far apart, as `repeats.apart` has it, rounding leaves records of the last of `tokens`.

    None if one of them is not near enough to float64: in its entropy and varentropy (bits), or in
    its log-probability (nats).
    """
    before = np.array(tokens[:-1])
    exact = _numbers(reference.forward(model.params, model.config, before)[0], tokens[-1])
    others = [
        _numbers(
            teacher_forced(_in_order(model, order), model.config, before[None])[0][0], tokens[-1]
        )
        for order in range(ORDERS)
    ]
    widest = 0.0
    for name, value in exact.items():
        far = DEVIATIONS * np.sqrt(np.mean([(other[name] - value) ** 2 for other in others]))
        if max(abs(record[name] - value) for record in records) > far:
            return None
        widest = max(widest, float(2 * far) / max(1.0, abs(value)))
    return widest


def _in_order(model: LanguageModel, seed: int) -> Params:
    """The model with its channels and the units of its MLPs in a random order."""
    rng = np.random.default_rng(seed)
    orders = {
        "width": rng.permutation(model.config.width),
        "mlp": rng.permutation(model.config.mlp_width),
    }

    def ordered(spec: ParamSpec, x: jax.Array) -> np.ndarray:
        array = np.asarray(x)
        for axis, name in enumerate(spec.axes):
            if name in orders:
                array = array.take(orders[name], axis)
        return array

    specs = param_specs(model.config)
    found: Params = jax.tree.map(
        ordered, specs, model.params, is_leaf=lambda x: isinstance(x, ParamSpec)
    )
    return found


def _numbers(logits: np.ndarray, token: int) -> dict[str, float]:
    """What the last of `logits[T, V]` say of the token that follows."""
    log_probs = reference.log_softmax(logits[-1])
    return {
        "entropy": reference.entropy_bits(np.exp(log_probs)),
        "varentropy": reference.varentropy_bits(np.exp(log_probs)),
        "logprob": float(log_probs[token]),
    }
