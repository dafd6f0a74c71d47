"""A served model: the whole decoder's parameters as a flat dict, and pure functions over them.

Owns how layers are traced (each kind of block once) and where a layer's part of the KV pool
begins. Knows neither how parameters are loaded nor what a request is. Legend: T tokens, N rows, C
hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jserve.batch import CallContext
from jserve.cache.pool import KVPool
from jserve.layers.expert_tally import add_chosen
from jserve.layers.rope import rotary
from jserve.models.blueprint import Decoder
from jserve.models.rope_scaling import frequencies_of
from jserve.types import KVShape, ModelConfig
from jserve.weights.spec import WeightSpec
from pallas_kernels.attention import KVLayer


class Model:
    """`specs` order is the order of the flat parameter list; `head_params` are the keys that
    `logits` reads; `cache` is what the pool keeps of a token, `tallies` shapes of its tally."""

    def __init__(
        self, config: ModelConfig, decoder: Decoder, cache: KVShape, *, page_size: int
    ) -> None:
        self.config, self.cache, moe = config, cache, config.moe
        self.vocab_size, self._page_size = config.vocab_size, page_size
        self.tallies = () if moe is None else moe.tallies
        self.specs = _Part.split(decoder).specs
        self._num_layers = tuple(shape.num_layers for shape in (cache, *cache.groups))
        self._embed = _Part.split(decoder.embed)
        blocks, windows = [_Part.split(block) for block in decoder.layers], config.windows
        self._norm = _Part.split(decoder.norm)
        self._head = _Part.split(decoder.head)
        self.head_params = tuple(spec.path for spec in self._head.specs)
        # Blocks of one window and equal parameters share a jitted function, lowered once.
        kinds = [(w, *(s.shape for s in b.specs)) for w, b in zip(windows, blocks, strict=True)]
        runs = {kind: jax.jit(b.run_block) for kind, b in zip(kinds, blocks, strict=True)}
        places = cache.places(windows)
        self._layers = tuple(zip(windows, blocks, [runs[k] for k in kinds], places, strict=True))
        local = config.rope_local or config.rope
        self._ropes = {
            window: frequencies_of(config.rope if window is None else local, config.head_dim)
            for window in dict.fromkeys(windows)
        }

    def forward(
        self,
        params: Mapping[str, jax.Array],
        kv: KVPool,
        context: CallContext,
        token_ids: jax.Array,
    ) -> tuple[jax.Array, KVPool]:
        """Hidden states [T, C] after the final norm, and the pool with this step's K and V. Pure;
        to be called inside jit. The pool is updated in place when the caller donates it."""
        assert kv.k.shape[1] == self._page_size, f"{kv.k.shape=} {self._page_size=}"
        pools, chosen = [kv, *kv.groups], []
        contexts = [context, *(dataclasses.replace(context, meta=m) for m in context.group_metas)]
        with jax.named_scope("embed"):
            x = self._embed.merge(self._embed.leaves(params))(token_ids)
        angles = {w: rotary(context.meta.positions, *rope) for w, rope in self._ropes.items()}
        for window, part, run, (group, layer) in self._layers:
            pool = pools[group]
            num_pages = pool.k.shape[0] // self._num_layers[group]
            kv_layer = KVLayer(pool.k, pool.v, jnp.asarray(np.int32(layer * num_pages)))
            out, seen = run(part.leaves(params), x, kv_layer, angles[window], contexts[group])
            (x, kv_layer), chosen = out, [*chosen, *jax.tree.leaves(seen)]
            pools[group] = KVPool(kv_layer.k, kv_layer.v)
        with jax.named_scope("norm"):
            x = self._norm.merge(self._norm.leaves(params))(x)
        tally = tuple(add_chosen(counts, chosen) for counts in kv.tally)
        return x, pools[0]._replace(groups=tuple(pools[1:]), tally=tally)

    def logits(self, params: Mapping[str, jax.Array], hidden: jax.Array) -> jax.Array:
        """float32 logits [N, V'] of hidden states [N, C]; V' as Embedding has it."""
        with jax.named_scope("logits"):
            logits = self._head.merge(self._head.leaves(params)).logits(hidden)
            cap = self.config.final_soft_cap
            return logits if cap is None else jnp.tanh(logits / cap) * cap


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A module split once; it merges the leaves of every module of equal construction. `specs` are
    its parameters in the order of its leaves."""

    graphdef: Any
    treedef: Any
    specs: tuple[WeightSpec, ...]

    @classmethod
    def split(cls, module: nnx.Module) -> _Part:
        graphdef, state = nnx.split(module)
        variables = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
        specs = tuple(variable.get_metadata()["spec"] for variable in variables)
        return cls(graphdef, jax.tree.structure(state), specs)

    def leaves(self, params: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(params[spec.path] for spec in self.specs)

    def merge(self, leaves: Sequence[jax.Array]) -> Any:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def run_block(self, leaves: tuple[jax.Array, ...], *args: Any) -> Any:
        return nnx.capture(self.merge(leaves), nnx.Intermediate)(*args)
