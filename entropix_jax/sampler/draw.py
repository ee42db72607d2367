"""The truncated draw that all arms share: exact for every setting, without sorting the vocabulary.

A truncation rule orders the tokens and keeps a prefix (`sampler.truncation`). Min-p, top-k and
top-p each keep a prefix, and so do all three together. A prefix is determined by its mass, and a
draw is the token at which the mass, cumulated over the first `HEAD` tokens in that order and then
over the others by id, crosses a uniform share of it. The prefix nearly always lies within the head,
which `top` finds cheaply. Otherwise bisection over the whole vocabulary finds it: which path a row
takes depends on the row, never on the batch. A CPU takes such rows one by one. On a device each
branch that is not the same for all rows, and on a GPU each loop, would be a wait for the host:
there all rows are bisected at once, and those that needed it keep the result.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from entropix_jax.platforms import for_platform
from entropix_jax.sampler.state import where_rows
from entropix_jax.sampler.top import flipped, sortable, top
from entropix_jax.sampler.truncation import ROWS, Cut, row_by_row

HEAD = 64  # on a CPU, top_k(64) of 128,256 takes 0.2 ms and a full sort 26 ms
# That a pass settles where the loop over passes is unrolled, by 7 sums. XLA puts up to 8 sums of a
# vocabulary into one kernel.
_BITS = 3
_BLOCK = 256  # tokens of a block in which draws beyond the head are looked up


@struct.dataclass
class Drawn:
    """The outcome of a truncated draw."""

    ids: jax.Array  # int32 [B, n], one token for each uniform number
    kept: jax.Array  # int32 [B], how many tokens the rule left
    last: jax.Array  # int32 [B], the last of them, in the rule's order


@struct.dataclass
class _Head:
    """A row's first tokens, in order, and their masses relative to the first's. With a leading axis
    on every field, those of each row."""

    ids: jax.Array  # int32 [C]
    mass: jax.Array  # float32 [C]
    cumulated: jax.Array  # float32 [C]


@struct.dataclass
class _Prefix:
    """So many of each row's first tokens: their mass and number, and which one is the last: the
    `index`-th, by id, of those with order value `value`."""

    mass: jax.Array  # float32 [B]
    length: jax.Array  # int32 [B]
    value: jax.Array  # int32 [B]
    index: jax.Array  # int32 [B]


def truncated_draw(cut: Cut, logits: jax.Array, uniforms: jax.Array) -> Drawn:
    """Draws tokens from what a rule leaves of `softmax(logits / temperature)`, never nothing.

    In this order: min-p keeps `p >= min_p * p_max`; top-k the k first; top-p the shortest prefix of
    the rest, renormalised, that reaches the mass p.

    Args:
        cut: fields [B, ...], see `sampler.truncation`.
        logits: float32 [B, V]; -inf is a token that is never drawn; at least one is finite.
        uniforms: float32 [B, n] in [0, 1), one for each token to draw.
    """
    batch, vocab = logits.shape
    chex.assert_shape(uniforms, (batch, None))
    chex.assert_tree_shape_prefix(cut, (batch,))

    # The head: the first tokens of the rule's order, and their masses.
    size = min(HEAD, vocab)
    values, ids = top(cut.order, size)
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

    def reach_beyond(complete: jax.Array, drawn: Drawn, *inputs: Any) -> Drawn:
        from_rows: Drawn = lax.cond(
            jnp.all(complete),
            lambda: drawn,
            lambda: where_rows(complete, drawn, _draw_from_all(~complete, *inputs)),
        )
        return from_rows

    def one_by_one(complete: jax.Array, drawn: Drawn, *inputs: Any) -> Drawn:
        from_rows: Drawn = lax.cond(
            jnp.all(complete),
            lambda: drawn,
            lambda: row_by_row(reach_beyond, complete, drawn, *inputs),
        )
        return from_rows

    return for_platform(
        *(complete, drawn, logits, head, cut, uniforms),
        cpu=one_by_one,
        otherwise=reach_beyond,
    )


def cumulate(mass: jax.Array) -> jax.Array:
    """The running sums of `mass[..., n]`, n small: n sums are one kernel where a scan is dozens."""
    upto = jnp.tri(mass.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(upto, mass[..., None, :], jnp.float32(0.0)), axis=-1)


def count_settled(
    logits: jax.Array, count: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
) -> jax.Array:
    """The number, int32, that `count` makes of one row's logits [V], the likeliest first: of as few
    of them as it says settle it, a bool. For a rule, which runs over an axis `ROWS`."""

    def look(size: int) -> tuple[jax.Array, jax.Array]:
        if size < logits.shape[0] or size <= HEAD:
            return count(top(logits, size)[0])
        # As integers all of them are sorted ten times as fast on a CPU.
        ordered = lax.sort(sortable(-logits), is_stable=False)
        return count(-lax.bitcast_convert_type(flipped(ordered), jnp.float32))

    first, *wider = sorted({min(size, logits.shape[0]) for size in (HEAD, 16 * HEAD, 2**31)})
    number, is_settled = look(first)
    for size in wider:

        def look_further(number: jax.Array, is_settled: jax.Array, size: int = size) -> Any:
            further = look(size)
            return (
                jnp.where(is_settled, number, further[0]),
                is_settled | further[1],
            )

        # Of the rows at hand, so that it stays a branch where there are several.
        unsettled = lax.pmax(~is_settled, ROWS)
        number, is_settled = lax.cond(
            unsettled, look_further, lambda *so_far: so_far, number, is_settled
        )
    return number


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
    needs: jax.Array,
    logits: jax.Array,
    head: _Head,
    cut: Cut,
    uniforms: jax.Array,
) -> Drawn:
    """The draw where min-p and top-k leave more than the head, in the rows of `needs`, bool [B];
    what is returned of the others means nothing. `logits[B, V]`, `uniforms[B, n]`."""
    first = jnp.take_along_axis(logits, head.ids[:, :1], axis=1)
    mass = jnp.exp((logits - first) / cut.temperature[:, None])
    likely = (mass >= cut.min_p[:, None]) & (cut.order > -jnp.inf)
    mass = jnp.where(likely, mass, 0.0)
    order = sortable(cut.order)
    number = jnp.sum(likely, axis=-1, dtype=jnp.int32)
    outer = _Prefix(
        mass=jnp.sum(mass, axis=-1),
        length=number,
        value=jnp.min(jnp.where(likely, order, jnp.iinfo(jnp.int32).max), axis=-1),
        index=number,  # past the last of any tie
    )

    def shorten(
        acts: jax.Array,
        prefix: _Prefix,
        weights: jax.Array,
        target: jax.Array,
        reach: bool,
    ) -> _Prefix:
        """In the rows of `acts` the prefix that ends at a crossing, if it is shorter."""

        def cross() -> _Prefix:
            crossing = _crossing(order, weights, target, reach=reach)
            other = _prefix(order, mass, *crossing)
            return where_rows(acts & (other.length < prefix.length), other, prefix)

        shortened: _Prefix = lax.cond(jnp.any(acts), cross, lambda: prefix)
        return shortened

    by_number = needs & (cut.top_k < number)
    outer = shorten(by_number, outer, likely, cut.top_k.astype(jnp.float32) - 0.5, reach=False)
    top_mass = head.cumulated[:, -1]
    closes_in_head = (cut.top_p < 1) & (cut.top_p * outer.mass <= top_mass)
    size = jnp.full_like(number, head.ids.shape[1])
    drawn = jax.vmap(_draw_from_head)(head, size, outer.mass, cut.top_p, uniforms)

    def deep() -> Drawn:
        acts = needs & ~closes_in_head
        by_mass = acts & (cut.top_p < 1)
        prefix = shorten(by_mass, outer, mass, cut.top_p * outer.mass, reach=True)
        ties = jnp.sum(order == prefix.value[:, None], axis=-1, dtype=jnp.int32)
        last = _tied_id(order, prefix.value, jnp.minimum(prefix.index, ties - 1))
        value = prefix.value[:, None]
        ids = jnp.arange(mass.shape[1], dtype=jnp.int32)[None, :]
        within = (order > value) | ((order == value) & (ids <= last[:, None]))
        row = jnp.arange(mass.shape[0], dtype=jnp.int32)[:, None]
        rest = jnp.where(within, mass, 0.0).at[row, head.ids].set(0.0)
        found = jax.vmap(_tokens_at)(head, rest, uniforms * prefix.mass[:, None])
        beyond = Drawn(ids=found, kept=prefix.length, last=last)
        return where_rows(closes_in_head, drawn, beyond)

    from_all: Drawn = lax.cond(jnp.all(closes_in_head | ~needs), lambda: drawn, deep)
    return from_all


def _largest(
    holds: Callable[[jax.Array], jax.Array], low: jax.Array, high: jax.Array, bits: int
) -> jax.Array:
    """The largest number from `low` up and below `high`, int32 [...], where `holds` does: it does
    up to there. It is not asked for at `low`, and counts there as True.

    `bits` is 32, or so many that `high` is at most `2 ** bits` and `low` at least 0.
    """

    def in_loop(low: jax.Array, high: jax.Array) -> jax.Array:
        def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds  # it holds at `low`, and at `high` it does not
            middle = (low >> 1) + (high >> 1) + (low & high & 1)  # the mean, without overflow
            held = holds(middle)
            return jnp.where(held, middle, low), jnp.where(held, high, middle)

        found: jax.Array = lax.fori_loop(0, 32, halve, (low, high))[0]
        return found

    def unrolled(low: jax.Array, high: jax.Array) -> jax.Array:
        # The digits of the number, the first one first.
        found = jnp.full_like(low, -(2**31) if bits == 32 else 0)
        for shift in reversed(range(0, bits, _BITS)):
            digits = range(1, 1 << min(_BITS, bits - shift))
            held = [holds(found + np.uint32(digit << shift).astype(np.int32)) for digit in digits]
            found += sum(one.astype(jnp.int32) for one in held) << shift
        return jnp.clip(found, low, high - 1)

    return for_platform(low, high, gpu=unrolled, otherwise=in_loop)


def _crossing(
    order: jax.Array, weights: jax.Array, target: jax.Array, *, reach: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Where the weights, cumulated in that order, first exceed `target`, or first `reach` it.

    Tokens of one order value have one weight. Returns the order value of that token, and how many
    tokens with the same value stand before it.

    Args:
        order, weights: int32 and float32 or bool [..., V].
        target: float32 [...].
    """
    weights = weights.astype(jnp.float32)

    def crosses(value: jax.Array) -> jax.Array:
        total = jnp.sum(jnp.where(order >= value[..., None], weights, 0.0), axis=-1)
        return total >= target if reach else total > target

    # Rounding may leave the whole mass at the target: then it is the last token with weight.
    lowest = jnp.min(jnp.where(weights > 0, order, jnp.iinfo(jnp.int32).max), axis=-1)
    low = jnp.broadcast_to(lowest, target.shape)
    high = jnp.broadcast_to(jnp.max(order, axis=-1) + 1, target.shape)
    value = _largest(crosses, low, high, bits=32)
    above = jnp.sum(jnp.where(order > value[..., None], weights, 0.0), axis=-1)
    tied = (order == value[..., None]) & (weights > 0)
    weight = jnp.max(jnp.where(tied, weights, 0.0), axis=-1)
    steps = (target - above) / weight
    index = (jnp.ceil(steps) - 1.0 if reach else jnp.floor(steps)).astype(jnp.int32)
    return value, jnp.clip(index, 0, jnp.sum(tied, axis=-1, dtype=jnp.int32) - 1)


def _prefix(order: jax.Array, mass: jax.Array, value: jax.Array, index: jax.Array) -> _Prefix:
    """The prefixes that end with the `index`-th token of order value `value`."""
    above = order > value[:, None]
    tied_mass = jnp.max(jnp.where(order == value[:, None], mass, 0.0), axis=-1)
    tied = index + 1
    return _Prefix(
        mass=jnp.sum(jnp.where(above, mass, 0.0), axis=-1) + tied.astype(jnp.float32) * tied_mass,
        length=jnp.sum(above, axis=-1, dtype=jnp.int32) + tied,
        value=value,
        index=index,
    )


def _tokens_at(head: _Head, rest: jax.Array, targets: jax.Array) -> jax.Array:
    """One row's tokens at which the cumulated mass exceeds `targets[n]`: int32 [n].

    The masses cumulate over the head in its order, then over the `rest`, float32 [V], 0 for a token
    of the head or one that is not left, by id. The order within the rest changes no probability.
    """
    picks = jnp.sum(head.cumulated[None, :] <= targets[:, None], axis=-1, dtype=jnp.int32)
    near = jnp.take(head.ids, jnp.minimum(picks, head.ids.shape[0] - 1))

    # First the block of ids in which a target lies, then the id within it.
    number = -(-rest.shape[0] // _BLOCK)
    blocks = jnp.pad(rest, (0, number * _BLOCK - rest.shape[0])).reshape(number, _BLOCK)
    sums = jnp.cumsum(jnp.sum(blocks, axis=-1))
    target = targets - head.cumulated[-1]
    block = _first_above(sums, target)
    before = jnp.where(block > 0, sums[jnp.maximum(block - 1, 0)], 0.0)
    within = cumulate(jnp.take(blocks, block, axis=0))
    far = block * _BLOCK + jax.vmap(_first_above)(within, (target - before)[:, None])[:, 0]
    # Where rounding leaves nothing beyond the head, it is the head's last token.
    return jnp.where((picks < head.ids.shape[0]) | (sums[-1] <= 0), near, far)


def _first_above(sums: jax.Array, targets: jax.Array) -> jax.Array:
    """The index of the first of the running `sums[m]` above each of `targets[n]`, int32 [n]; if
    rounding leaves none, of the first that is as large as the last one."""
    above = jnp.sum(sums[None, :] <= targets[:, None], axis=-1, dtype=jnp.int32)
    return jnp.minimum(above, jnp.sum(sums < sums[-1], dtype=jnp.int32))


def _tied_id(order: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """The id of the `index[...]`-th token, by id, among those of `order[..., V]` whose value is
    `value[...]`."""
    vocab = order.shape[-1]
    ids = lax.broadcasted_iota(jnp.int32, order.shape, order.ndim - 1)
    tied = order == value[..., None]

    def few_below(bound: jax.Array) -> jax.Array:
        below = tied & (ids < bound[..., None])
        return jnp.sum(below, axis=-1, dtype=jnp.int32) <= index

    end = jnp.full_like(value, vocab)
    return _largest(few_below, jnp.zeros_like(value), end, bits=vocab.bit_length())
