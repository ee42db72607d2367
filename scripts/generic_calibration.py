"""Writes weights/generic/calibration.json, the quantile tables for models without their own.

    python scripts/generic_calibration.py

They are the tables of smollm2. They are rescaled so that the 30th and 70th percentiles of the
entropy and the 40th and 75th of the varentropy are the thresholds of the public implementation.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from entropix_jax.host.files import replacing
from entropix_jax.sampler.calibration import PERCENTS, read_calibration

WEIGHTS = Path(__file__).resolve().parent.parent / "weights"
# Percentiles and the published thresholds, which are in nats and nats^2: 0.3 and 2.5, 1.2 and 2.5.
ANCHORS = {
    "entropy": ((30, 0.3 / math.log(2)), (70, 2.5 / math.log(2))),
    "varentropy": ((40, 1.2 / math.log(2) ** 2), (75, 2.5 / math.log(2) ** 2)),
}


def rescale(table: np.ndarray, anchors: tuple[tuple[int, float], ...]) -> np.ndarray:
    """Maps a table piecewise linearly so that the anchors' percentiles have the anchors' values."""
    old = [0.0, *(float(np.interp(percent, PERCENTS, table)) for percent, _ in anchors)]
    new = [0.0, *(value for _, value in anchors)]
    return np.where(table > old[-1], table * new[-1] / old[-1], np.interp(table, old, new))


if __name__ == "__main__":
    own = read_calibration(WEIGHTS / "smollm2" / "calibration.json")
    rescaled = {name: rescale(own.quantiles[name], anchors) for name, anchors in ANCHORS.items()}
    source = "the tables of smollm2, rescaled to the thresholds of the public implementation"
    generic = replace(own, quantiles={**own.quantiles, **rescaled}, source=source, model={})
    with replacing(WEIGHTS / "generic" / "calibration.json") as scratch:
        scratch.write_text(generic.to_text(), encoding="utf-8")
