"""The truncated draw that all arms share: exact for every setting, without sorting the vocabulary.

A truncation rule orders the tokens and keeps a prefix (`sampler.truncation`). Min-p, top-k and
top-p each keep a prefix, and so do all three together. A prefix is determined by its mass, and a
draw is the token at which the mass, cumulated in that order, crosses a uniform share of it. The
prefix nearly always lies within the first `HEAD` tokens, which `top_k` finds cheaply. Otherwise
bisection over the whole vocabulary finds the same prefix and crossing, for that row alone: which
path a row takes depends on the row, never on the batch.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from entropix_jax.sampler.truncation import Cut

HEAD = 64  # on a CPU, top_k(64) of 128,256 takes 0.2 ms and a full sort 26 ms


@struct.dataclass
class Drawn:
    """The outcome of a truncated draw."""

    ids: jax.Array  # int32 [B, n], one token for each uniform number
    kept: jax.Array  # int32 [B], how many tokens the rule left
    last: jax.Array  # int32 [B], the last of them, in the rule's order


@struct.dataclass
class _Head:
    """One row's first tokens, in order, and their masses relative to the first's."""

    ids: jax.Array  # int32 [C]
    mass: jax.Array  # float32 [C]
    cumulated: jax.Array  # float32 [C]


@struct.dataclass
class _Prefix:
    """So many of the first tokens: their mass and number, and which one is the last: the
    `index`-th, by id, of those with order value `value`."""

    mass: jax.Array  # float32
    length: jax.Array  # int32
    value: jax.Array  # int32
    index: jax.Array  # int32


def truncated_draw(cut: Cut, logits: jax.Array, uniforms: jax.Array, draws: jax.Array) -> Drawn:
    """Draws tokens from what a rule leaves of `softmax(logits / temperature)`, never nothing.

    In this order: min-p keeps `p >= min_p * p_max`; top-k the k first; top-p the shortest prefix of
    the rest, renormalised, that reaches the mass p.

    Args:
        cut: fields [B, ...], see `sampler.truncation`.
        logits: float32 [B, V]; -inf is a token that is never drawn; at least one is finite.
        uniforms: float32 [B, n] in [0, 1), one for each token that may be drawn.
        draws: int32 [B]; only a row's first so many tokens count, the others mean nothing.
    """
    batch, vocab = logits.shape
    chex.assert_shape(uniforms, (batch, None))
    chex.assert_tree_shape_prefix((cut, draws), (batch,))

    # The head: the first tokens of the rule's order, and their masses.
    size = min(HEAD, vocab)
    # Without the barrier XLA rewrites a top_k whose result is sliced into a full sort: 20 ms, not
    # 0.2.
    values, ids = lax.optimization_barrier(lax.top_k(cut.order, size))
    first = jnp.take_along_axis(logits, ids, axis=-1)
    mass = jnp.exp((first - first[:, :1]) / cut.temperature[:, None])
    head = _Head(ids=ids, mass=mass, cumulated=cumulate(mass))
    likely = (mass >= cut.min_p[:, None]) & (values > -jnp.inf)
    number = jnp.sum(likely, axis=-1, dtype=jnp.int32)

    # Draws from the head; from the whole vocabulary in the rows whose tokens reach beyond it.
    limit = jnp.minimum(number, cut.top_k)
    total = jnp.take_along_axis(head.cumulated, limit[:, None] - 1, axis=-1)[:, 0]
    drawn = jax.vmap(_draw_from_head)(head, limit, total, cut.top_p, uniforms)
    if vocab == size:
        return drawn
    complete = (number < size) | (cut.top_k <= size)

    def row(args: tuple[jax.Array, Drawn, tuple[Any, ...]]) -> Drawn:
        complete, drawn, inputs = args
        from_row: Drawn = lax.cond(complete, lambda *_: drawn, _draw_from_all, *inputs)
        return from_row

    rows = (complete, drawn, (logits, head, cut, uniforms, draws))
    from_rows: Drawn = lax.cond(jnp.all(complete), lambda: drawn, lambda: lax.map(row, rows))
    return from_rows


def cumulate(mass: jax.Array) -> jax.Array:
    """The running sums of `mass[..., n]`, n small: n sums are one kernel where a scan is dozens."""
    upto = jnp.tri(mass.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(upto, mass[..., None, :], jnp.float32(0.0)), axis=-1)


def count_settled(
    logits: jax.Array, count: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
) -> jax.Array:
    """The number, int32, that `count` makes of one row's logits [V], the likeliest first: of as few
    of them as it says settle it, a bool."""

    def look(size: int) -> tuple[jax.Array, jax.Array]:
        if size < logits.shape[0] or size <= HEAD:
            return count(lax.optimization_barrier(lax.top_k(logits, size)[0]))
        # As integers all of them are sorted ten times as fast on a CPU.
        ordered = lax.sort(_flipped(lax.bitcast_convert_type(-logits, jnp.int32)), is_stable=False)
        return count(-lax.bitcast_convert_type(_flipped(ordered), jnp.float32))

    first, *wider = sorted({min(size, logits.shape[0]) for size in (HEAD, 16 * HEAD, 2**31)})
    counted = look(first)
    for size in wider:
        counted = lax.cond(counted[1], lambda *so_far: so_far, lambda *_, n=size: look(n), *counted)
    return counted[0]


def _draw_from_head(
    head: _Head, limit: jax.Array, total: jax.Array, top_p: jax.Array, uniforms: jax.Array
) -> Drawn:
    """One row's draw where the nucleus lies in the head: min-p and top-k left a mass of `total`, of
    which the first `limit` tokens lie here."""
    reached = 1 + jnp.sum(head.cumulated < top_p * total, dtype=jnp.int32)
    kept = jnp.where(top_p >= 1, limit, jnp.minimum(reached, limit))
    targets = uniforms * head.cumulated[kept - 1]
    picks = jnp.sum(head.cumulated[None, :] <= targets[:, None], axis=-1, dtype=jnp.int32)
    last = jnp.take(head.ids, kept - 1)
    return Drawn(ids=jnp.take(head.ids, jnp.minimum(picks, kept - 1)), kept=kept, last=last)


def _draw_from_all(
    logits: jax.Array, head: _Head, cut: Cut, uniforms: jax.Array, draws: jax.Array
) -> Drawn:
    """One row's draw where min-p and top-k leave more than the head: `logits[V]`, `uniforms[n]`."""
    mass = jnp.exp((logits - logits[head.ids[0]]) / cut.temperature)
    likely = (mass >= cut.min_p) & (cut.order > -jnp.inf)
    mass = jnp.where(likely, mass, 0.0)
    order = _sortable(cut.order)
    number = jnp.sum(likely, dtype=jnp.int32)
    everything = _Prefix(
        mass=jnp.sum(mass),
        length=number,
        value=jnp.min(jnp.where(likely, order, jnp.iinfo(jnp.int32).max)),
        index=number,  # past the last of any tie
    )
    outer = lax.cond(
        cut.top_k < number,
        lambda: _prefix(
            order, mass, *_crossing(order, likely, cut.top_k.astype(jnp.float32) - 0.5)
        ),
        lambda: everything,
    )
    top_mass = head.cumulated[-1]

    def pick(prefix: _Prefix, uniform: jax.Array, wanted: jax.Array) -> jax.Array:
        target = jnp.where(wanted, uniform * prefix.mass, 0.0)
        token: jax.Array = lax.cond(
            target < top_mass,
            lambda: head.ids[jnp.sum(head.cumulated <= target)],
            lambda: _token_at(order, mass, target, prefix),
        )
        return token

    def deep() -> Drawn:
        nucleus = lax.cond(
            cut.top_p < 1,
            lambda: _prefix(
                order, mass, *_crossing(order, mass, cut.top_p * outer.mass, reach=True)
            ),
            lambda: outer,
        )
        prefix = jax.tree.map(
            lambda a, b: jnp.where(nucleus.length < outer.length, a, b), nucleus, outer
        )
        wanted = jnp.arange(uniforms.shape[0], dtype=jnp.int32) < draws
        ids = lax.map(lambda args: pick(prefix, *args), (uniforms, wanted))
        ties = jnp.sum(order == prefix.value, dtype=jnp.int32)
        last = _tied_id(order, prefix.value, jnp.minimum(prefix.index, ties - 1))
        return Drawn(ids=ids, kept=prefix.length, last=last)

    closes_in_head = (cut.top_p < 1) & (cut.top_p * outer.mass <= top_mass)
    size = jnp.int32(head.ids.shape[0])
    drawn: Drawn = lax.cond(
        closes_in_head,
        lambda: _draw_from_head(head, size, outer.mass, cut.top_p, uniforms),
        deep,
    )
    return drawn


def _sortable(values: jax.Array) -> jax.Array:
    """An int32 with the order of the float32: negative ones get their magnitude bits flipped."""
    return _flipped(lax.bitcast_convert_type(values, jnp.int32))


def _flipped(bits: jax.Array) -> jax.Array:
    flipped: jax.Array = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
    return flipped


def _crossing(
    order: jax.Array, weights: jax.Array, target: jax.Array, *, reach: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Where the weights, cumulated in that order, first exceed `target`, or first `reach` it.

    Tokens of one order value have one weight. Returns the order value of that token, and how many
    tokens with the same value stand before it.
    """
    weights = weights.astype(jnp.float32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the mass from `low` up crosses the target, from `high` up it does not
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # the mean, without overflow
        total = jnp.sum(jnp.where(order >= middle, weights, 0.0))
        crosses = total >= target if reach else total > target
        return jnp.where(crosses, middle, low), jnp.where(crosses, high, middle)

    # Rounding may leave the whole mass at the target: then it is the last token with weight.
    lowest = jnp.min(jnp.where(weights > 0, order, jnp.iinfo(jnp.int32).max))
    value, _ = lax.fori_loop(0, 32, halve, (lowest, jnp.max(order) + 1))
    above = jnp.sum(jnp.where(order > value, weights, 0.0))
    tied = (order == value) & (weights > 0)
    weight = jnp.max(jnp.where(tied, weights, 0.0))
    steps = (target - above) / weight
    index = (jnp.ceil(steps) - 1.0 if reach else jnp.floor(steps)).astype(jnp.int32)
    return value, jnp.clip(index, 0, jnp.sum(tied, dtype=jnp.int32) - 1)


def _prefix(order: jax.Array, mass: jax.Array, value: jax.Array, index: jax.Array) -> _Prefix:
    """The prefix that ends with the `index`-th token of order value `value`."""
    above = order > value
    tied_mass = jnp.max(jnp.where(order == value, mass, 0.0))
    tied = index + 1
    return _Prefix(
        mass=jnp.sum(jnp.where(above, mass, 0.0)) + tied.astype(jnp.float32) * tied_mass,
        length=jnp.sum(above, dtype=jnp.int32) + tied,
        value=value,
        index=index,
    )


def _token_at(order: jax.Array, mass: jax.Array, target: jax.Array, prefix: _Prefix) -> jax.Array:
    """The token at which the cumulated mass exceeds `target`, never one past the prefix."""
    value, index = _crossing(order, mass, target)
    past = (value < prefix.value) | ((value == prefix.value) & (index > prefix.index))
    value, index = jnp.where(past, prefix.value, value), jnp.where(past, prefix.index, index)
    return _tied_id(order, value, index)


def _tied_id(order: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """The id of the `index`-th token, by id, among those of order value `value`."""
    ids = jnp.arange(order.shape[0], dtype=jnp.int32)
    tied = order == value

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # at most `index` tied ids lie below `low`, more below `high`
        middle = (low + high) >> 1
        few = jnp.sum(tied & (ids < middle), dtype=jnp.int32) <= index
        return jnp.where(few, middle, low), jnp.where(few, high, middle)

    start = jnp.int32(0), jnp.int32(order.shape[0])
    low: jax.Array = lax.fori_loop(0, 32, halve, start)[0]
    return low
