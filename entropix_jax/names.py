"""Names that samplers, traces and pages share: regimes, their bounds, and conditions.

Imports no JAX, so a page of a finished run needs none.
"""

import math
import re

TRACE_FORMAT = 1  # of traces

REGIMES = ("lelv", "helv", "lehv", "hehv", "mid")
BOXES = REGIMES[:-1]  # tried in this order; a point in none is MID
# Served by arms: the regimes, rows that loop, and the start of an answer.
SERVED = (*REGIMES, "loop", "start")
# Without a table the last one is NaN, and its conditions do not hold.
QUANTITIES = (
    *("entropy", "varentropy", "attn_entropy_norm", "agreement", "sequence_varentropy"),
    "p_wrong",
)
THRESHOLDS = ("h1", "h2", "u1", "u2")

# What each regime says about the model.
MEANINGS = {
    "lelv": "certain",
    "helv": "undecided",
    "lehv": "forked",
    "hehv": "scattered",
    "mid": "between",
}

# The largest bound or layer weight: beyond any useful one, and well within float32.
LARGEST = 1e6

_CONDITION = re.compile(r"\s*(\w+)\s*([<>])\s*(\S+)\s*")


def read_condition(text: str) -> tuple[str, str, str | float]:
    """Parses one side of a box, such as `entropy > h2`, into quantity, sign and bound.

    The bound is one of THRESHOLDS, a percentile of the quantity such as "40%", or a number.
    ValueError, which says why, if the text is not a condition."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError("expected QUANTITY < NUMBER or QUANTITY > NUMBER")
    quantity, sign, bound = match.groups()
    if bound in THRESHOLDS or bound.endswith("%"):
        return quantity, sign, bound
    try:
        number = float(bound)
    except ValueError:
        number = math.nan
    if not abs(number) <= LARGEST:
        raise ValueError(
            f"'{bound}' is not a number up to {LARGEST:g}, a percentile such as 40%, or one of "
            f"{', '.join(THRESHOLDS)}"
        )
    return quantity, sign, number
