"""Where experts live, and how tokens get to theirs: a preset, and two ways there and back.

    reduce    each device computes what its experts make of all tokens; one all-reduce sums that
    exchange  each place along the expert axis answers for a share of the tokens: their rows go to
              the devices of their experts and come back, and the shares are gathered

Knows neither how experts were chosen nor what they compute. Legend: T tokens, C hidden size, k
experts of a token, H experts of a device, S devices along the expert axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sharding.rules import TP, Mapped, Rules

_EXPERT, _TENSOR = "expert", "tensor"

#: Expert parallelism: each device has its experts, or its slice of them where they are split over
#: tensor too; what is not an expert's is split over all devices.
EP: Mapping[str, Mapped] = {
    **dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), (_TENSOR, _EXPERT)),
    **{axis: TP[axis] for axis in ("expert", "expert_mlp")},
}

_SHARE = PartitionSpec(_EXPERT, None)

#: Bytes that an exchange must spare each device: it takes three collectives where the sum takes
#: one, and each costs as long as some MiB do.
LEAST_SPARED = 8 << 20

#: (tokens [T, C], float32 weights [T, k], int32 experts [T, k], parameters of the device's experts
#: …) → [T, C]: each token's sum over its experts of weight · what the device's part of the expert
#: makes of it. Experts are numbered from the device's first; H is somebody else's or nobody's.
Compute = Callable[..., jax.Array]


def apply_experts(
    compute: Compute,
    x: jax.Array,  # [T, C] replicated
    weights: jax.Array,  # float32[T, k]
    ids: jax.Array,  # int32[T, k]; the number behind the last expert's is nobody's
    params: Sequence[jax.Array],
    axes: Sequence[tuple[str | None, ...]],
    rules: Rules,
) -> jax.Array:
    """[T, C], replicated: `compute` summed over all devices. `axes` are the logical ones of
    `params`, of which the first is "expert".
    """
    along = rules.mapping["expert"]
    if along == _EXPERT and exchange_pays(
        x.shape, x.dtype.itemsize, ids.shape[1], rules.size("expert")
    ):
        way, tokens = functools.partial(_exchange, platform=rules.platform), _SHARE
    else:
        way, tokens = functools.partial(_reduce, along=along), PartitionSpec(None, None)
    # Else the compiler takes shares of what comes before them too, and gathers those again.
    x = rules.constrain(x, (None, None))
    specs = (tokens, tokens, tokens, *(rules.spec(names) for names in axes))
    y = rules.on_devices(functools.partial(way, compute), specs, tokens)(x, weights, ids, *params)
    return rules.constrain(y, (None, None))


def exchange_pays(shape: tuple[int, ...], itemsize: int, top_k: int, shards: int) -> bool:
    """Whether tokens of `shape` [T, C] are exchanged: by what a device sends and receives less.

    A sum takes 2 T C elements. An exchange takes T C to gather the shares, and twice what of the
    T / S · k rows of a share is for other devices.
    """
    num_tokens, width = shape
    if shards == 1 or num_tokens % shards:
        return False
    moved = 1 + 2 * top_k * (shards - 1) / shards**2
    return (2 - moved) * num_tokens * width * itemsize >= LEAST_SPARED


def _reduce(
    compute: Compute,
    x: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    *params: jax.Array,
    along: Mapped,
) -> jax.Array:
    """All tokens in, all tokens out; experts lie along mesh axes, of which the sum leaves out that
    of data-parallel ranks: sharding/ranks.py's scatter takes it."""
    held = params[0].shape[0]
    local = ids - lax.axis_index(along) * held
    mine = (local >= 0) & (local < held)
    y = compute(x, jnp.where(mine, weights, 0.0), jnp.where(mine, local, held), *params)
    return _sum(y, _TENSOR, _EXPERT)


def _exchange(
    compute: Compute,
    x: jax.Array,  # [T / S, C]
    weights: jax.Array,
    ids: jax.Array,
    *params: jax.Array,
    platform: str,
) -> jax.Array:
    """A share of the tokens in, the same out."""
    held, shards, me = params[0].shape[0], lax.axis_size(_EXPERT), lax.axis_index(_EXPERT)
    owners = (ids // held).reshape(-1)  # S: nobody, to whom nothing is sent
    order = jnp.argsort(owners, stable=True)
    to = jnp.sum(owners[:, None] == jnp.arange(shards)[None, :], axis=0, dtype=jnp.int32)
    sizes = lax.all_gather(to, _EXPERT)  # [from, to]
    send = functools.partial(_send, platform=platform)
    there = functools.partial(send, sizes=sizes, capacity=shards * ids.size)
    rows = there(x[order // ids.shape[1]])
    local = there(ids.reshape(-1, 1)[order] - (owners * held)[order][:, None])
    real = jnp.arange(len(rows))[:, None] < jnp.sum(sizes[:, me])
    out = compute(rows, real.astype(jnp.float32), jnp.where(real, local, held), *params)
    back = send(out, sizes=sizes.T, capacity=ids.size)
    places = (
        jnp.zeros(ids.size, jnp.int32)
        .at[order]
        .set(jnp.arange(ids.size, dtype=jnp.int32), unique_indices=True)
    )
    return _sum(weighted_sum(back, places.reshape(ids.shape), weights), _TENSOR)


def _sum(y: jax.Array, *axes: str) -> jax.Array:
    """Over devices. Not along an axis of one: on CPU that is a sum that XLA leaves in."""
    split = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
    return lax.psum(y, split) if split else y


def weighted_sum(rows: jax.Array, places: jax.Array, weights: jax.Array) -> jax.Array:
    """[T, C]: of each token's k rows, which are at its `places`; in float32 and always in the same
    order, so that it is the same in every step."""
    wide = jnp.zeros((len(places), rows.shape[1]), jnp.float32)
    for column in range(places.shape[1]):
        wide += rows[places[:, column]].astype(jnp.float32) * weights[:, column, None]
    return wide.astype(rows.dtype)


def _send(rows: jax.Array, *, sizes: jax.Array, capacity: int, platform: str) -> jax.Array:
    """[capacity, C]: what this device receives, by sender; zeros behind.

    `rows` are sorted by receiver, `sizes` int32[from, to] counts them.
    """
    me = lax.axis_index(_EXPERT)
    starts = jnp.cumsum(sizes, axis=1) - sizes  # of what goes from .. to .., among the sender's
    if platform != "cpu":
        landing = jnp.cumsum(sizes, axis=0) - sizes  # … among the receiver's
        out = jnp.zeros((capacity, rows.shape[1]), rows.dtype)
        where = (starts[me], sizes[me], landing[me], sizes[:, me])
        return lax.ragged_all_to_all(rows, out, *where, axis_name=_EXPERT)
    # XLA has no ragged exchange for CPUs: everybody's rows are gathered, and mine taken.
    everybody = lax.all_gather(rows, _EXPERT)  # [from, M, C]
    ends = jnp.cumsum(sizes[:, me])
    index = jnp.arange(capacity, dtype=jnp.int32)
    behind = jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    sender = jnp.minimum(behind, len(ends) - 1)
    row = index - (ends - sizes[:, me])[sender] + starts[sender, me]
    mine = everybody[sender, jnp.clip(row, 0, len(rows) - 1)]
    return jnp.where((index < ends[-1])[:, None], mine, jnp.zeros((), rows.dtype))
