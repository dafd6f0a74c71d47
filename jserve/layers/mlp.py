"""The gated feed-forward layer: down(activation(gate(x)) · up(x)).

Legend: C hidden size, F intermediate size, S shards of the MLP axis. Gate and up are one matrix
[C, 2F] of S column blocks, each [its gate columns, its up columns]: a shard has both halves of its
own F / S, a data-parallel rank those of its devices. `block`: 2F / S.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
from flax import nnx

from jserve.batch import CallContext
from jserve.layers.linear import Linear

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class GatedMLP(nnx.Module):
    def __init__(self, gate_up: Linear, down: Linear, activation: str, block: int) -> None:
        self.gate_up, self.down, self.activation, self.block = gate_up, down, activation, block

    def __call__(self, x: jax.Array, context: CallContext) -> jax.Array:  # [T, C] → [T, C]
        blocks = self.gate_up(x).reshape(len(x), -1, self.block)  # [T, S, 2F/S]
        half = blocks.shape[-1] // 2
        wide = ACTIVATIONS[self.activation](blocks[..., :half]) * blocks[..., half:]
        return self.down(wide.reshape(len(x), -1))
