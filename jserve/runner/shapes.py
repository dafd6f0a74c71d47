"""What every program of one model on one mesh is compiled for: parameters, pool, slot state.

ShapeDtypeStructs with shardings, nothing allocated; the model is evaluated abstractly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jserve.batch import CallContext, SlotParams, SlotState
from jserve.cache.pool import KVPool, pool_spec
from jserve.types import MAX_LOGIT_BIAS, MAX_LOGPROB_IDS, MAX_STOP_TOKEN_IDS, KVShape
from jserve.types.kv_layout import table_pages
from jserve.weights.spec import WeightSpec
from pallas_kernels.attention import AttentionMeta
from sharding.rules import Rules


class Model(Protocol):
    """What a program needs of a model; both methods are pure and called while tracing."""

    @property
    def specs(self) -> tuple[WeightSpec, ...]: ...
    @property
    def cache(self) -> KVShape: ...
    @property
    def tallies(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def head_params(self) -> tuple[str, ...]: ...
    @property
    def vocab_size(self) -> int: ...

    def forward(
        self,
        params: Mapping[str, jax.Array],
        kv: KVPool,
        context: CallContext,
        token_ids: jax.Array,
    ) -> tuple[jax.Array, KVPool]: ...

    def logits(self, params: Mapping[str, jax.Array], hidden: jax.Array) -> jax.Array: ...


class Shapes:
    """`hidden` is one row as the model returns it, `pages` what a slot's table holds, `vocab` the
    number of tokens; the logits have more columns where the vocabulary is split.

    `num_pages` of the pool, and `group_pages` of its groups' pools, count the trash page.
    """

    def __init__(
        self,
        model: Model,
        rules: Rules,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        context_length: int,
        kv_dtype: str,
        group_pages: tuple[int, ...] = (),
    ) -> None:
        self.model, self.rules, self.page_size = model, rules, page_size
        self.replicated = rules.sharding()
        self.num_ranks = 1 if rules.ranks is None else rules.ranks.count
        self.params = {
            s.path: jax.ShapeDtypeStruct(
                s.shape, jnp.dtype(s.dtype), sharding=rules.sharding(s.axes)
            )
            for s in model.specs
        }
        self.head_params = tuple(self.params[name] for name in model.head_params)
        self.groups, self.group_pages = model.cache.groups, group_pages
        pool = pool_spec(model.cache, num_pages, page_size, kv_dtype, rules, group_pages)
        self.kv = pool._replace(tally=tuple(self.int32(*shape) for shape in model.tallies))
        self.pages = table_pages(context_length, page_size)
        self.vocab = model.vocab_size
        self.hidden, columns = self._of_model(model)
        self.state = self._state(num_slots + 1, columns)

    def int32(self, *shape: int) -> Any:
        return self.array(shape, jnp.int32)

    def array(self, shape: tuple[int, ...], dtype: Any, axes: Sequence[str | None] = ()) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.rules.sharding(axes))

    def hidden_rows(self, rows: int) -> Any:
        return self.array((rows, self.hidden.shape[1]), self.hidden.dtype)

    def _of_model(self, model: Model) -> tuple[jax.ShapeDtypeStruct, int]:
        """One hidden row, and the number of the logits' columns."""
        one = self.int32(1)
        table, bounds = self.int32(1, self.pages), self.int32(2)
        meta = AttentionMeta(bounds, one, table, one, one, one, bounds, max_q_len=1)
        real = self.array((self.num_ranks,), jnp.bool_)
        context = CallContext(meta, real, (meta,) * len(self.groups))
        ranks = self.rules.ranks
        run = (lambda function: function) if ranks is None else ranks.alone
        hidden, _ = jax.eval_shape(run(model.forward), self.params, self.kv, context, one)
        heads = {name: self.params[name] for name in model.head_params}
        logits = jax.eval_shape(run(model.logits), heads, hidden)
        assert logits.dtype == jnp.float32, f"{logits.dtype=}"
        return hidden, logits.shape[1]

    def _state(self, slots: int, columns: int) -> SlotState:
        return SlotState(  # type: ignore[arg-type]
            last_token=self.int32(slots),
            page_table=self.int32(slots, self.pages),
            counts=self.array((slots, columns), jnp.uint16, (None, "vocab")),
            params=SlotParams(
                seed=self.array((slots, 2), jnp.uint32),
                floats=self.array((slots, 6), jnp.float32),
                ints=self.int32(slots, 2),
                stop_ids=self.int32(slots, MAX_STOP_TOKEN_IDS),
                bias_ids=self.int32(slots, MAX_LOGIT_BIAS),
                bias_values=self.array((slots, MAX_LOGIT_BIAS), jnp.float32),
                logprob_ids=self.int32(slots, MAX_LOGPROB_IDS),
            ),
            group_tables=(self.int32(slots, self.pages),) * len(self.groups),
        )


def shardings(spec: Any) -> Any:
    """The same tree with each leaf's sharding."""
    return jax.tree.map(lambda leaf: leaf.sharding, spec)
