"""Single steps of the sampler: rows by hand, and logits for each regime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropix_jax.names import REGIMES
from entropix_jax.sampler.keys import row_key
from entropix_jax.sampler.mechanisms import ACTIONS
from entropix_jax.sampler.state import Rows
from entropix_jax.sampler.step import choose
from tests.support.samplers import LITERAL, attn_stats, batch_of, fresh_state, params_of

VOCAB = 128
SLOTS = 96
PROMPT = 4

choose_jit = jax.jit(choose)


def rows_of(
    *histories: Sequence[int],
    generated: int = 0,
    remaining: int = 50,
    asks: bool = False,
    ahead: Sequence[int] = (),
) -> Rows:
    """Rows that hold these tokens under different ids. Tokens that are ahead follow, then junk."""
    batch = len(histories)
    slots = np.full((batch, SLOTS), VOCAB - 1, np.int32)
    for row, history in zip(slots, histories, strict=True):
        row[: len(history) + len(ahead)] = [*history, *ahead]
    return Rows(
        running=jnp.ones(batch, bool),
        keys=jnp.asarray(np.stack([row_key(0, str(i)) for i in range(batch)])),
        history=jnp.asarray(slots),
        length=jnp.asarray([len(history) for history in histories], jnp.int32),
        generated=jnp.full(batch, generated, jnp.int32),
        remaining=jnp.full(batch, remaining, jnp.int32),
        eos_ids=jnp.full((batch, 2), -1, jnp.int32),
        asks=jnp.full(batch, asks),
        branch=jnp.full(batch, -1, jnp.int32),
        vocab_size=VOCAB,
    )


# Bounds under which `logits_for` has logits for each regime.
BOUNDS: Mapping[str, Any] = {
    "regimes.lelv": ["entropy < 1", "varentropy < 0.5"],
    "regimes.helv": ["entropy > 5", "varentropy < 0.5"],
    "regimes.lehv": ["entropy < 5", "varentropy > 0.5"],
    "regimes.hehv": ["entropy > 5", "varentropy > 0.5"],
}


def logits_for(regime: str, top: int = 9) -> np.ndarray:
    """Logits of a regime whose most likely token is `top` (the lowest id of a tie is 0)."""
    logits = np.full(VOCAB, -60.0, np.float32)
    if regime == "lelv":
        logits[top] = 0
    elif regime == "helv":
        logits[:] = 0
    elif regime == "lehv":
        logits[top], logits[20:60] = 3.5, 0
    elif regime == "hehv":
        logits[:], logits[top] = 0, 3.0
    else:
        logits[top : top + 4] = 0
    return logits


class Play:
    """One row that is played step by step, a regime's logits at each."""

    def __init__(self, *, budget: int = 60, **changes: Any) -> None:
        settings = {key.replace("__", "."): value for key, value in changes.items()}
        # The arms of documents 000 and 001: it is about thoughts.
        drawing = {"arms.lehv": "explore", "arms.hehv": "resample", "loop.max_period": 0}
        self.sampler = batch_of(params_of(LITERAL, {**BOUNDS, **drawing, **settings}))
        self.budget = budget
        self.tokens = list(range(1, 1 + PROMPT))
        self.ahead: list[int] = []  # what stands in the history past the tokens
        self.state = fresh_state(1)

    def play(self, script: str) -> str:
        """Steps in the regimes of a script (l LELV, h HELV, e LEHV, r HEHV, m MID). Returns the
        actions: i inject, a argmax, s sample, and so on by first letters (d: adaptive)."""
        actions = ""
        for regime in (REGIMES["lherm".index(letter)] for letter in script):
            done = len(self.tokens) - PROMPT
            rows = rows_of(
                self.tokens, generated=done, remaining=self.budget - done, ahead=self.ahead
            )
            logits = jnp.asarray(logits_for(regime))[None]
            choice, step, self.state = choose_jit(
                logits, attn_stats(1), self.sampler, self.state, rows
            )
            self.tokens.append(int(choice.token[0]))
            queued, length = int(self.state.tally.queued[0]), len(self.tokens)
            self.ahead = step.rows.history[0, length : length + queued].tolist()
            action = ACTIONS[int(choice.proposal.action[0])]
            actions += "d" if action == "adaptive" else action[0]
        return actions

    @property
    def generated(self) -> list[int]:
        return self.tokens[PROMPT:]
