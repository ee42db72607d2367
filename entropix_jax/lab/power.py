"""Power sampling: whole texts x from p(x)^alpha, by Metropolis-Hastings (Karan and Du 2025,
"Reasoning with Sampling", arXiv 2510.14901).

A text grows block by block. After each block the chain makes some steps: it is cut at a token, and
the rest is drawn again from the proposal q, token by token at temperature 1 / alpha. With w(x) the
weights of the cuts of x, the new text y takes the place of x with probability min(1, r),

    ln r = alpha ln p(y) - ln q(y) - ln sum w(y) - (alpha ln p(x) - ln q(x) - ln sum w(x)),

where p and q are those of the tokens from the cut on, to the end token or the limit of the block.
The weight of the cut itself is the same in both texts, as it depends on what is before it alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from entropix_jax.engine.engine import Engine
from entropix_jax.engine.results import Request, Row
from entropix_jax.engine.trace import TokenRecord
from entropix_jax.errors import UserError, check_range
from entropix_jax.sampler.context import Context
from entropix_jax.sampler.keys import row_key
from entropix_jax.sampler.mechanism import Mechanism
from entropix_jax.sampler.presets import load_sampler
from entropix_jax.sampler.sampler import Sampler
from entropix_jax.sampler.state import DrawnToken

_NAME = "power"
_FLOOR = 0.1  # bits: `at_jumps` can cut anywhere, or a chain might never leave a text

# The entropies of a text's tokens, bits, to the weights of cutting before each, all above 0. That
# of a token may depend on its own entropy and those before it.
Cuts = Callable[[Sequence[float]], Sequence[float]]


def anywhere(entropies: Sequence[float]) -> list[float]:
    """Cuts anywhere alike, as Karan and Du."""
    return [1.0] * len(entropies)


def at_jumps(entropies: Sequence[float]) -> list[float]:
    """Cuts where the entropy jumps, in proportion to how far (after Zhou, Mehrotra and Liu 2026,
    "Cutting at Decision Points", arXiv 2605.30327; the first token's jump is from 0)."""
    pairs = zip(entropies, [0.0, *entropies], strict=False)
    return [_FLOOR + max(entropy - before, 0.0) for entropy, before in pairs]


@struct.dataclass
class _Drawn:
    """Of one row."""

    logprob: jax.Array  # float32, nats: ln q of its last token


def _learn(drawn: DrawnToken, ctx: Context) -> _Drawn:
    log_q = jax.nn.log_softmax(drawn.logits / ctx.proposal.temperature)
    return _Drawn(logprob=log_q[drawn.token])


_MECHANISM = Mechanism(_NAME, init=lambda: _Drawn(logprob=jnp.float32(0.0)), learn=_learn)


def power_sampler(alpha: float) -> Sampler:
    """The proposal of a chain whose target is p^alpha: draws from the whole vocabulary at
    temperature 1 / alpha (`base.temperature`, which the chain reads), that note their ln q.

    Raises:
        UserError: an alpha that is not between 0.05 and 1000.
    """
    if not 0.05 <= alpha <= 1000:
        raise UserError(f"alpha = {alpha}: must be between 0.05 and 1000")
    sampler = load_sampler("temperature").with_mechanism(_MECHANISM)
    return sampler.with_values({"base.temperature": 1 / alpha, "metrics.noise_floor": False})


@dataclass(eq=False)
class Chain:
    """A chain of texts for one request.

    `row` is its text so far. `forwards` counts the tokens drawn for all of its texts, not what a
    fork may have to read again; of `proposed` texts so many were `accepted`.
    """

    request: Request
    row: Row
    forwards: int = 0
    proposed: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(row_key(self.request.seed, self.request.row_id))
        self.alpha = 1 / self.request.sampler.values["base.temperature"]
        self.limit = 0  # tokens, up to the end of the block
        self.steps = 0  # that the block has left
        self.kept = 0  # tokens that the text being drawn has from `row`


def log_ratio(
    tokens: Sequence[TokenRecord], others: Sequence[TokenRecord], cut: int, alpha: float, cuts: Cuts
) -> float:
    """The logarithm of r of a chain's `tokens` and those proposed instead, the same before `cut`;
    see the head of this module."""

    def side(text: Sequence[TokenRecord]) -> float:
        drawn = (alpha * t.logprob - proposal_logprob(t) for t in text[cut:])
        return math.fsum(drawn) - math.log(math.fsum(cuts([t.entropy for t in text])))

    return side(others) - side(tokens)


def proposal_logprob(token: TokenRecord) -> float:
    """ln q of a token that a `power_sampler` drew, nats. UserError if its state is not recorded."""
    if token.state is None:
        raise UserError("power sampling needs an engine with recording=Recording(state=True)")
    return float(token.state.own[_NAME].logprob)


def sample_power(
    engine: Engine, requests: Iterable[Request], *, block: int, steps: int, cuts: Cuts = anywhere
) -> Iterator[Chain]:
    """Runs a chain for each request, side by side, and yields each once it has ended.

    Proposals are forks, which read nothing again that a slot has cached. With more chains than
    slots none is idle. A chain's random numbers depend on its request's seed and id alone.

    Args:
        engine: must record states, `Recording(state=True)`.
        requests: their samplers are `power_sampler`s, of any alphas.
        block: tokens by which a text grows, up to the request's budget; the last may be shorter.
        steps: proposals after each block, those after which a text has ended included.

    Raises:
        UserError: as `Engine.run`; a request with another sampler; no states are recorded.
    """
    check_range("block", block, 1)
    check_range("steps", steps, 0)

    def begin() -> Iterator[Request]:
        for request in requests:
            if _NAME not in (m.name for m in request.sampler.mechanisms):
                raise UserError(f"row '{request.row_id}': its sampler must be a power_sampler")
            chain = Chain(request, Row(request))
            chain.limit, chain.steps = min(block, request.max_new_tokens), steps
            yield replace(request, max_new_tokens=chain.limit, tag=chain)

    for event in engine.run(begin()):
        if event.row.finish_reason is None:
            continue
        chain: Chain = event.row.request.tag
        if _take(chain, event.row, cuts) and _extend(engine, chain, block, steps, cuts):
            continue
        chain.row.request = chain.request
        yield chain


def _take(chain: Chain, row: Row, cuts: Cuts) -> bool:
    """Takes a text that was drawn to its end, or refuses it. Whether the chain goes on."""
    chain.forwards += len(row.tokens) - chain.kept
    if row.finish_reason == "error" or not row.tokens:
        chain.row = row
        return False
    grown = chain.kept == len(chain.row.tokens)
    if not grown:
        ratio = log_ratio(chain.row.tokens, row.tokens, chain.kept, chain.alpha, cuts)
        chain.proposed += 1
        if math.log1p(-chain.random.random()) >= ratio:
            return True
        chain.accepted += 1
    chain.row = row
    return True


def _extend(engine: Engine, chain: Chain, block: int, steps: int, cuts: Cuts) -> bool:
    """Has the chain's next text drawn: by a step, or by another block. Whether there is one."""
    row, first = chain.row, len(chain.request.prompt)
    while not chain.steps:
        if chain.limit == chain.request.max_new_tokens:
            return False
        chain.limit = min(chain.limit + block, chain.request.max_new_tokens)
        chain.steps = steps
        if row.finish_reason == "length":
            chain.kept = len(row.tokens)
            engine.fork(row, 1, max_new_tokens=chain.limit)
            return True
    chain.steps -= 1
    weights = np.asarray(cuts([token.entropy for token in row.tokens]), np.float64)
    chain.kept = int(chain.random.choice(len(weights), p=weights / weights.sum()))
    engine.fork(row, 1, position=first + chain.kept, max_new_tokens=chain.limit)
    return True
