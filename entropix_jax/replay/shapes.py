"""Shapes of what a replay reads of the lines of a trace, see `host.shapes`."""

from typing import Any

from entropix_jax.report.reading import METRICS

TOKEN: dict[str, Any] = {
    **dict.fromkeys(("row", "position", "token_id", "top_k", "forwards"), int),
    **dict.fromkeys(("text", "regime", "action"), str),
    **dict.fromkeys(METRICS, float),
    "loop": bool,
    **dict.fromkeys(("token_confidence?", "self_certainty?", "max_prob?"), float),
    "top?": [(int, str, float)],
    "branches?": [{"tokens": list, "text": str, "chosen": bool, "score?": float}],
    "layers?": [[float]],
    "chosen?": bool,
}
ROW: dict[str, Any] = {
    **dict.fromkeys(("row", "tokens", "forwards"), int),
    **dict.fromkeys(("text", "finish_reason?", "error?"), str),
}
