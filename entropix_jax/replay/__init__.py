"""One reading of a recorded run: recomputes each token of a trace in NumPy, without the engine."""

from entropix_jax.replay.trace import Replay, Trace, read_trace, replay

__all__ = ["Replay", "Trace", "read_trace", "replay"]
