"""One step of the sampler: from logits and attention statistics to each row's next token.

log-probabilities -> metrics -> regime -> arm -> proposal -> action -> filters -> draw -> token
"""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.names import SERVED
from entropix_jax.sampler.context import Context, Proposal, as_configured, where_rows
from entropix_jax.sampler.draw import draw_tokens
from entropix_jax.sampler.filters import penalise, truncate
from entropix_jax.sampler.history import with_token
from entropix_jax.sampler.keys import STREAM_CANDIDATE, STREAM_DRAW, STREAM_ROLLOUT, uniforms
from entropix_jax.sampler.mechanisms import MECHANISMS
from entropix_jax.sampler.mechanisms.adaptive import confidence
from entropix_jax.sampler.mechanisms.backspace import BACKSPACE, in_doubt
from entropix_jax.sampler.mechanisms.branch import MAX_WIDTH
from entropix_jax.sampler.mechanisms.branch import follow as follow_branch
from entropix_jax.sampler.metrics import apply_noise_floor, measure, measure_confidence
from entropix_jax.sampler.regimes import classify, count_rounds, current_thresholds, update_drift
from entropix_jax.sampler.settings import MAX_DRAWS, SamplerSettings
from entropix_jax.sampler.state import (
    MAX_REACH,
    DrawnToken,
    Observation,
    Rows,
    SamplerState,
    Step,
    Tally,
    Trail,
    init_sampler_state,
)
from entropix_jax.stats import AttnStats


@struct.dataclass
class Choice:
    """The token of each row and all that led to it; every field [B]."""

    token: jax.Array  # int32
    logprob: jax.Array  # float32, nats, under the unmodified logits
    observation: Observation
    proposal: Proposal  # a forced token has the action that it is forced for
    finite: jax.Array  # bool; False: some logit is NaN or infinite and the token is meaningless


def choose(
    logits: jax.Array,
    stats: AttnStats,
    settings: SamplerSettings,
    state: SamplerState,
    rows: Rows,
) -> tuple[Choice, Step, SamplerState]:
    """Chooses each row's next token.

    Args:
        logits: float32 [B, V], as the model gave them.
        stats: the attention of each row's last position.
        settings: each leaf with a leading row axis.
        state: as the step before left it.
        rows: the text up to the token to be chosen, and what the row may still do.

    Returns:
        The choices, the step as the actions left it, and the state after it. The token of a row
        that goes back, forks or waits means nothing, and so does that of a choice that is not
        `finite`.
    """
    batch, _ = logits.shape
    chex.assert_shape(rows.history, (batch, None))
    chex.assert_tree_shape_prefix((stats.entropy, settings, state, rows), (batch,))

    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    step = _begin_step(logits, stats, settings, state, rows)

    # Actions: each mechanism changes the step in the rows that act. A row whose token is forced or
    # drawn again does not, and a branch just grows.
    action, is_branch = step.proposal.action, rows.branch >= 0
    free = rows.running & finite & (step.tally.queued == 0) & ~step.trail.again & ~is_branch
    for index, mechanism in enumerate(settings.mechanisms):
        if mechanism.apply is not None and mechanism.replaces is None:
            step = mechanism.apply(free & (action == index), step, settings)

    # The token: drawn, unless one is forced, perhaps in the drawn one's place.
    drawn = _draw_best(step)
    step = _replace(drawn.token, rows.running & finite & ~is_branch, step, settings)
    forced = step.tally.queued > 0
    ahead = jnp.take_along_axis(step.rows.history, step.rows.length[:, None], axis=1)[:, 0]
    token = jnp.where(forced, ahead, drawn.token)
    logprob = jnp.take_along_axis(step.context.log_probs, token[:, None], axis=1)[:, 0]

    # The state after it.
    moves = rows.running & ~step.rewinds & ~step.waits
    was_drawn = moves & ~forced & ~step.forks & ~is_branch
    advanced = advance(step.tally, settings, step.observation, rows.generated)
    contexts = replace(step.context, own=advanced.own, proposal=step.proposal)
    for mechanism in settings.mechanisms:
        if mechanism.learn is not None and mechanism.name in settings.used:
            name, own = mechanism.name, advanced.own
            learnt = jax.vmap(mechanism.learn)(drawn, contexts)
            learnt = where_rows(was_drawn, learnt, own[name])
            advanced = replace(advanced, own={**own, name: learnt})
    tally = where_rows(moves, advanced, step.tally)
    choice = Choice(
        token=token,
        logprob=logprob,
        observation=step.observation,
        proposal=step.proposal,
        finite=finite,
    )
    chex.assert_tree_shape_prefix(choice, (batch,))
    trail = _remember(step, moves, was_drawn, logprob)
    return choice, step, SamplerState(tally=tally, trail=trail)


def propose(arm: jax.Array, ctx: Context) -> Proposal:
    """Returns the proposal of one row's arm, an index into its mechanisms."""
    mechanisms = enumerate(ctx.settings.mechanisms)
    proposes = {i: m.propose for i, m in mechanisms if m.propose is not None}
    which = jnp.argmax(jnp.array([*proposes]) == arm)
    # Closures: a mapped switch selects every leaf of an operand.
    proposal: Proposal = lax.switch(which, [lambda own=own: own(ctx) for own in proposes.values()])
    return proposal


def advance(
    tally: Tally, settings: SamplerSettings, observation: Observation, generated: jax.Array
) -> Tally:
    """The tally after one more committed token; `generated` is int32 [B], the tokens generated
    before it."""
    own = {
        m.name: m.advance(settings, tally, observation)
        for m in settings.mechanisms
        if m.advance is not None
    }
    mean, squares = _add_entropy(tally, observation.metrics.entropy, generated)
    return replace(
        tally,
        queued=jnp.maximum(tally.queued - 1, 0),
        entropy_mean=mean,
        entropy_squares=squares,
        drift=jax.vmap(update_drift)(observation.metrics, settings, tally.drift),
        own={**tally.own, **own},
    )


def settled(settings: SamplerSettings, state: SamplerState, rows: Rows) -> jax.Array:
    """The position that the next steps cannot go back beyond: int32 [B], at most the length. An arm
    that is not of this package may propose any action."""
    ours = {m for m in MECHANISMS if m != BACKSPACE}
    able = [i for i, m in enumerate(settings.mechanisms) if m not in ours]
    has_arm = jnp.any(jnp.isin(settings.arms, jnp.array(able, jnp.int32)), axis=-1)
    distance = jnp.arange(1, MAX_REACH + 1, dtype=jnp.int32)
    farthest = jnp.max(jnp.where(in_doubt(settings, state, rows), distance, 0), axis=-1)
    held = jnp.where(has_arm, farthest, 0)
    for mechanism in settings.mechanisms:
        if mechanism.holds is not None and mechanism.name in settings.used:
            held = jnp.maximum(held, mechanism.holds(settings, state, rows))
    return rows.length - held


def _add_entropy(
    tally: Tally, entropy: jax.Array, generated: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean and summed squared deviation of a row's entropies with one more, each float32 [B]."""
    deviation = entropy - tally.entropy_mean
    mean = tally.entropy_mean + deviation / (generated + 1).astype(jnp.float32)
    return mean, tally.entropy_squares + deviation * (entropy - mean)


def _begin_step(
    logits: jax.Array,
    stats: AttnStats,
    settings: SamplerSettings,
    state: SamplerState,
    rows: Rows,
) -> Step:
    """The step before any action: what the distribution says, and what each row's arm proposes."""
    contexts, observation = _observe(logits, stats, settings, state, rows)
    looping = observation.rounds > 0
    served = jnp.where(looping, SERVED.index("loop"), observation.regime)
    arm = jnp.take_along_axis(settings.arms, served[:, None], axis=1)[:, 0]
    proposal = jax.vmap(propose)(arm, contexts)

    # The sampler's rule replaces the arm's: no other is compiled.
    proposal = replace(proposal, rule=settings.rule)
    # Each further round of a loop is hotter.
    heat = 1.0 + settings.loop.heating * (observation.rounds - 1).astype(jnp.float32)
    heated = jnp.minimum(proposal.temperature * heat, settings.loop.hottest)
    heated = jnp.where(looping, heated, proposal.temperature)
    proposal = replace(proposal, temperature=heated)

    # An arm may propose more than its row may do: then it just draws.
    action = proposal.action
    for name, allowed in contexts.may.items():
        refused = (proposal.action == settings.action(name)) & ~allowed
        action = jnp.where(refused, settings.action("sample"), action)
    # A forced token stands for the action that it is forced for. A branch is followed.
    tally = state.tally
    proposal = replace(proposal, action=jnp.where(tally.queued > 0, tally.queue_action, action))
    proposal = where_rows(rows.branch >= 0, jax.vmap(follow_branch)(contexts), proposal)

    # A position that is drawn again is drawn as it was, as one candidate.
    proposal = where_rows(state.trail.again, state.trail.at(rows.length).proposal, proposal)

    no = jnp.zeros_like(rows.running)
    return Step(
        rows=rows,
        logits=logits,
        context=replace(contexts, proposal=proposal),
        observation=observation,
        proposal=proposal,
        tally=tally,
        trail=state.trail,
        reach=rows.length - settled(settings, state, rows),
        rewinds=no,
        forks=no,
        candidates=jnp.zeros((*no.shape, MAX_WIDTH), jnp.int32),
        width=jnp.zeros_like(rows.length),
        waits=no,
        ends=no,
    )


def _observe(
    logits: jax.Array,
    stats: AttnStats,
    settings: SamplerSettings,
    state: SamplerState,
    rows: Rows,
) -> tuple[Context, Observation]:
    """Returns the context of each row, and its observation."""
    tally, generated = state.tally, rows.generated
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    floored = apply_noise_floor(log_probs, settings.noise_epsilon)
    metrics = measure(floored, stats, settings.layer_weights)
    likeliest = settings.own["confidence"].likeliest
    token_confidence, self_certainty = measure_confidence(log_probs, likeliest)
    _, squares = _add_entropy(tally, metrics.entropy, generated)
    sequence_varentropy = squares / (generated + 1).astype(jnp.float32)

    # Mechanisms learn only from committed tokens, so a branch has the initial state.
    is_branch = rows.branch >= 0
    new = init_sampler_state(is_branch.shape[0], settings.mechanisms).tally.own
    learns = [m.name for m in settings.mechanisms if m.learn is not None]
    learnt = {name: where_rows(is_branch, new[name], tally.own[name]) for name in learns}
    attempt, bans = state.trail.retracted(rows.length)
    contexts = Context(
        log_probs=log_probs,
        metrics=jax.vmap(as_configured)(metrics, settings),
        regime=jax.vmap(classify)(metrics, settings, sequence_varentropy, tally.drift),
        rounds=jax.vmap(count_rounds)(rows.history, rows.length, generated, settings.loop),
        settings=settings,
        thresholds=jax.vmap(current_thresholds)(settings, tally.drift),
        own={**tally.own, **learnt},
        may={
            m.name: m.may(settings, state, rows) for m in settings.mechanisms if m.may is not None
        },
        history=rows.history,
        length=rows.length,
        generated=generated,
        key=rows.keys,
        attempt=attempt,
        bans=bans,
        branch=rows.branch,
    )
    observation = Observation(
        metrics=metrics,
        sequence_varentropy=sequence_varentropy,
        regime=contexts.regime,
        rounds=contexts.rounds,
        confidence=jax.vmap(confidence)(contexts),
        token_confidence=token_confidence,
        self_certainty=self_certainty,
    )
    return contexts, observation


def _replace(drawn: jax.Array, free: jax.Array, step: Step, settings: SamplerSettings) -> Step:
    """The step after all that acts in place of drawn tokens, int32 [B], in the rows of `free`."""
    for index, mechanism in enumerate(settings.mechanisms):
        replaces, apply = mechanism.replaces, mechanism.apply
        if replaces is None or apply is None or mechanism.name not in settings.used:
            continue
        rows = step.rows
        free &= (step.tally.queued == 0) & ~(step.rewinds | step.forks | step.waits)
        position = jnp.where(free, rows.length, rows.history.shape[1])
        history = with_token(rows.history, position, drawn)
        step = replace(step, rows=replace(rows, history=history))
        acts = free & replaces(settings, step, drawn)
        action = step.proposal.action
        if mechanism.propose is not None:
            # Its arm proposed it, but the drawn token does not allow it: the row draws.
            action = jnp.where(free & (action == index), settings.action("sample"), action)
        action = jnp.where(acts, index, action)
        step = replace(step, proposal=replace(step.proposal, action=action))
        step = apply(acts, step, settings)
    return step


def _remember(step: Step, moves: jax.Array, was_drawn: jax.Array, logprob: jax.Array) -> Trail:
    """The trail with the token of each row that moves on; what was retracted at its position stays
    retracted."""
    trail, length = step.trail, step.rows.length
    here, first = trail.at(length), moves & ~trail.again
    trail = trail.put(
        length,
        moves,
        logprob=logprob,
        proposal=step.proposal,
        tally=step.tally,
        attempts=jnp.where(first, 0, here.attempts),
        bans=jnp.where(first[:, None], -1, here.bans),
    )
    # What a row had when it waited for the host stands.
    drawn = jnp.where(was_drawn, jnp.minimum(trail.drawn + 1, MAX_REACH), 0)
    return replace(
        trail,
        drawn=jnp.where(moves | (step.rows.running & step.waits), drawn, trail.drawn),
        again=trail.again & ~moves,
    )


def _draw_best(step: Step) -> DrawnToken:
    """Returns the likeliest, under the unmodified logits, of the proposal's candidates."""
    proposal, branch = step.proposal, step.rows.branch
    contexts = replace(step.context, proposal=proposal)

    # Branches share their row's key, so each takes the number at its own index.
    stream = jnp.where(proposal.draws > 1, STREAM_CANDIDATE, STREAM_DRAW)
    stream = jnp.where(branch >= 0, STREAM_ROLLOUT, stream)
    numbers = uniforms(contexts.key, contexts.length, contexts.attempt, stream, MAX_DRAWS)
    of_branch = jnp.take_along_axis(numbers, jnp.maximum(branch, 0)[:, None], axis=1)
    numbers = jnp.where((branch >= 0)[:, None], of_branch, numbers)

    logits = jax.vmap(penalise)(step.logits, contexts)
    left, given = jax.vmap(truncate)(logits, contexts)
    candidates = jax.vmap(draw_tokens)(left, numbers)
    drawn = jnp.arange(MAX_DRAWS, dtype=jnp.int32)[None, :] < proposal.draws[:, None]
    scores = jnp.take_along_axis(contexts.log_probs, candidates, axis=1)
    best = jnp.argmax(jnp.where(drawn, scores, -jnp.inf), axis=-1)
    token = jnp.take_along_axis(candidates, best[:, None], axis=1)[:, 0]
    return DrawnToken(logits=logits, token=token, given=given)
