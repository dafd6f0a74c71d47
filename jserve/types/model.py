"""Hyper-parameters of a model and the shape of what it keeps for a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jserve.types.latent import LatentConfig
from jserve.types.moe import MoEConfig


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one kind of layer. `scaling` is None, "linear", "llama3" or "yarn";
    `params` are the checkpoint's own numbers for it (factor, low_freq_factor,
    original_max_position_embeddings …)."""

    theta: float
    scaling: str | None = None
    params: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """Hyper-parameters of a decoder-only model, read once from its checkpoint by
    models/registry.py.

    `num_kv_heads` and `num_heads` are the checkpoint's; the sharded layout (KV heads replicated,
    query heads padded) is derived by `models` from the mesh. `windows[i]` is layer i's sliding
    window in tokens, None for full attention.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    rope_local: RopeConfig | None = None  # Gemma 3's sliding layers
    windows: tuple[int | None, ...] = ()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"  # silu | gelu_tanh
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    attention_sinks: bool = False  # a learned logit per query head that takes weight from the keys
    final_soft_cap: float | None = None
    embed_scale: float = 1.0
    dtype: str = "float32"  # the checkpoint's own
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    model_type: str = ""
    moe: MoEConfig | None = None  # None: every layer is dense
    latent: LatentConfig | None = None  # None: each KV head has keys and values of its own


@dataclasses.dataclass(frozen=True, slots=True)
class KVShape:
    """What a model keeps for one token: K and V of `num_kv_heads` heads in each layer.

    `num_kv_heads` is the number stored over the whole mesh, replicas for tensor parallelism
    included. `groups` are the layers that are not among `num_layers`: they have pools and page
    tables of their own, because they need a token only while it is within their `window`.
    With `value_dim` there is one K, whole on every device, and its first columns are the value.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # of a group
    groups: tuple[KVShape, ...] = ()
    value_dim: int | None = None

    def places(self, windows: Sequence[int | None]) -> tuple[tuple[int, int], ...]:
        """Of each layer the pool that it lies in, 0 or a group's number from 1, and its place
        there. A window below the widest is no reason for a group of its own."""
        groups = [int(window is not None and bool(self.groups)) for window in windows]
        return tuple((group, groups[:i].count(group)) for i, group in enumerate(groups))
