"""The Llama block, which Llama 3.x, SmolLM2, Mistral, Qwen2/2.5 and Qwen3 share.

They differ in biases, query and key norms, and windows, which are fields of ModelConfig
(hf_llama.py reads them). Checkpoint names stand beside the modules that own the tensors.
"""

from __future__ import annotations

import jax
from flax import nnx

from jserve.batch import CallContext
from jserve.layers.rope import Rotary
from jserve.models.blueprint import Blueprint, Feed, dense_mlp
from pallas_kernels.attention import KVLayer


class LlamaBlock(nnx.Module):
    """Pre-norm attention and feed-forward around a residual stream. `name`: model.layers.<i>."""

    def __init__(
        self, make: Blueprint, path: str, name: str, window: int | None, feed: Feed = dense_mlp
    ) -> None:
        size = make.config.hidden_size
        self.attention_norm = make.norm(f"{path}.attention_norm", f"{name}.input_layernorm", size)
        self.attention = make.attention(f"{path}.attention", f"{name}.self_attn", window)
        self.mlp_norm = make.norm(f"{path}.mlp_norm", f"{name}.post_attention_layernorm", size)
        self.mlp = feed(make, f"{path}.mlp", name)

    def __call__(
        self, x: jax.Array, kv_layer: KVLayer, angles: Rotary, context: CallContext
    ) -> tuple[jax.Array, KVLayer]:  # x [T, C]
        with jax.named_scope("attention"):
            out, kv_layer = self.attention(self.attention_norm(x), kv_layer, angles, context)
            x = x + out
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x), context), kv_layer
