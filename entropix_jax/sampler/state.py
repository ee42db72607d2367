"""What the sampler is told of each row, what it makes of a distribution, and what it remembers from
step to step."""

import jax
import jax.numpy as jnp
from flax import struct

from entropix_jax.metrics import Metrics
from entropix_jax.sampler.arms import Proposal
from entropix_jax.sampler.params import MAX_ATTEMPTS


@struct.dataclass
class Observation:
    """What one distribution says; every field [B]."""

    metrics: Metrics
    regime: jax.Array  # int32, index into REGIMES
    looping: jax.Array  # bool, the loop guard made the regime LEHV
    confidence: jax.Array  # float32, of the documents' formula; it is reported, nothing more


@struct.dataclass
class LastToken:
    """What each row's last token came from: enough to take it back, and draw its position again."""

    logits: jax.Array  # float32 [B, V], as the model gave them
    observation: Observation
    proposal: Proposal
    mirostat: jax.Array  # float32 [B], as it was before the token
    was_drawn: jax.Array  # bool [B]; False: the prompt's, injected, or a branch's
    attempts: jax.Array  # int32 [B], tokens taken back at its position
    bans: jax.Array  # int32 [B, MAX_ATTEMPTS], those tokens; -1: none


@struct.dataclass
class Tally:
    """Counters and running values of each row."""

    queued: jax.Array  # int32 [B], forced tokens, which stand in the history past the row's length
    queue_action: jax.Array  # int32 [B], what they are forced for
    cooldown: jax.Array  # int32 [B], tokens until a thought may be injected again
    injections: jax.Array  # int32 [B], thoughts begun
    branchings: jax.Array  # int32 [B], steps that branched
    retractions: jax.Array  # int32 [B], tokens taken back
    entropy_mean: jax.Array  # float32 [B], of the committed tokens' entropies, bits
    entropy_squares: jax.Array  # float32 [B], their summed squared deviation from it (Welford)
    mirostat: jax.Array  # float32 [B], mu - 2 tau, bits


@struct.dataclass
class SamplerState:
    """What the sampler remembers of each row from step to step."""

    tally: Tally
    last: LastToken


@struct.dataclass
class Rows:
    """What the sampler is told of each row."""

    keys: jax.Array  # uint32 [B, 2], see `sampler.keys`
    history: jax.Array  # int32 [B, S], the tokens so far, prompt included, then forced ones
    length: jax.Array  # int32 [B], how many so far: also the position of the token to be chosen
    generated: jax.Array  # int32 [B], how many of them were generated
    remaining: jax.Array  # int32 [B], how many may still be committed, at least 1
    asks: jax.Array  # bool [B], a thought's text is asked for, not taken from the parameters


def init_sampler_state(batch: int, vocab_size: int) -> SamplerState:
    """The state of rows that have committed nothing yet."""
    zeros, zeros_f = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.float32)
    state = SamplerState(
        tally=Tally(
            queued=zeros,
            queue_action=zeros,
            cooldown=zeros,
            injections=zeros,
            branchings=zeros,
            retractions=zeros,
            entropy_mean=zeros_f,
            entropy_squares=zeros_f,
            mirostat=zeros_f,
        ),
        last=LastToken(
            logits=jnp.zeros((batch, vocab_size), jnp.float32),
            observation=blank_observation((batch,)),
            proposal=Proposal(
                action=zeros,
                temperature=zeros_f,
                top_k=zeros,
                top_p=zeros_f,
                min_p=zeros_f,
                draws=zeros,
                rule=zeros,
            ),
            mirostat=zeros_f,
            was_drawn=jnp.zeros(batch, bool),
            attempts=zeros,
            bans=jnp.full((batch, MAX_ATTEMPTS), -1, jnp.int32),
        ),
    )
    # Copies: a state is donated, each leaf once.
    copies: SamplerState = jax.tree.map(jnp.array, state)
    return copies


def blank_observation(shape: tuple[int, ...]) -> Observation:
    """Room for observations of this shape."""
    zeros = jnp.zeros(shape, jnp.float32)
    return Observation(
        metrics=Metrics(**dict.fromkeys(Metrics.__dataclass_fields__, zeros)),
        regime=jnp.zeros(shape, jnp.int32),
        looping=jnp.zeros(shape, bool),
        confidence=zeros,
    )
