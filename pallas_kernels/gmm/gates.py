"""What gated layers make of the two halves of a grouped matmul's columns, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp


def _swiglu_oai(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gpt-oss: both are bounded, and up is shifted by one."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)


#: What MoEConfig.activation names: of gate and up.
GATES: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "swiglu_oai": _swiglu_oai,
}


def gated(wide: jax.Array, gate: str | None) -> jax.Array:
    """[M, O / 2] of [M, O], whose first half are gates; `wide` itself without a `gate`."""
    return wide if gate is None else GATES[gate](*jnp.split(wide, 2, axis=1))


def then_gated(
    matmul: Callable[..., jax.Array],
    *operands: jax.Array,
    out_dtype: jnp.dtype,
    gate: str | None = None,
) -> jax.Array:
    """`matmul`, which knows no gate, and then `gate`."""
    return gated(matmul(*operands, out_dtype=out_dtype), gate)
