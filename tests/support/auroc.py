"""The area under a ROC curve, by its definition."""

from typing import Any

import numpy as np


def auroc(scores: Any, positive: Any) -> float:
    """Returns the probability that a positive case scores higher than another, ties as half."""
    over = scores[positive][:, None] - scores[~positive]
    return float(np.mean(np.sign(over) + 1) / 2)
