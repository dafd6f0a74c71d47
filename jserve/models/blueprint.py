"""Builds a decoder's modules, each parameter described once: shape, axes, checkpoint tensors.

Works at start only and allocates nothing; what the modules compute is layers' business. `path` is a
module's key in the flat parameters, `name` what the checkpoint calls it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx

from jserve.errors import ConfigError
from jserve.layers.attention import Attention
from jserve.layers.embedding import Embedding
from jserve.layers.gathered import AddedOnce, Gathered
from jserve.layers.linear import Linear
from jserve.layers.mlp import GatedMLP
from jserve.layers.norm import RMSNorm
from jserve.models.head_layout import HeadLayout
from jserve.types import KVShape, ModelConfig
from jserve.types.kv_layout import KV_LAYOUTS
from jserve.weights.spec import Piece, WeightSpec
from pallas_kernels import qkv_write
from pallas_kernels.attention import attend
from sharding.rules import Rules

Place = Callable[[np.ndarray, np.ndarray], None]

#: A shard's part of a split vocabulary is a multiple: whole blocks of sampling.py.
VOCAB_BLOCK = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Blueprint:
    """What all modules of one model agree on. `norm_offset` is that of all its norms (RMSNorm)."""

    config: ModelConfig
    rules: Rules
    dtype: str
    backend: str | None
    norm_offset: float = 0.0

    @property
    def heads(self) -> HeadLayout:
        """Raises ConfigError as HeadLayout.of."""
        layout = KV_LAYOUTS[self.rules.platform]
        return HeadLayout.of(self.config, self.rules.size("kv_heads"), layout)

    @property
    def cache(self) -> KVShape:
        """What all layers keep of a token."""
        config, latent = self.config, self.config.latent
        if latent is not None:
            return KVShape(config.num_layers, 1, latent.cached_dim, value_dim=latent.kv_rank)
        return KVShape(config.num_layers, self.heads.num_kv_heads, config.head_dim)

    def norm(self, path: str, name: str, size: int) -> RMSNorm:
        weight = self.vector(f"{path}.weight", f"{name}.weight", size, 1.0 - self.norm_offset)
        return RMSNorm(weight, self.config.rms_norm_eps, self.norm_offset)

    def embedding(self, path: str, name: str, scale: float = 1.0) -> Embedding:
        size, width = self.config.vocab_size, self.config.hidden_size
        shards = self.rules.size("vocab")
        block = 1 if shards == 1 else shards * VOCAB_BLOCK
        padded = (-(-size // block) * block, width)
        piece = Piece(f"{name}.weight", (size, width), _place_rows)
        weight = self.parameter(f"{path}.weight", padded, ("vocab", None), [piece])
        return Embedding(weight, self.rules, scale)

    def attention(self, path: str, name: str, window: int | None) -> Attention:
        """`window` is the layer's own, static."""
        config, heads = self.config, self.heads
        parts = {
            f"{name}.{which}_proj": (count * heads.head_dim, functools.partial(heads.place, which))
            for which, count in (
                ("q", config.num_heads),
                ("k", config.num_kv_heads),
                ("v", config.num_kv_heads),
            )
        }
        size = (config.hidden_size, heads.fused_width)
        qkv = self._fused(f"{path}.qkv", parts, size, "kv_heads", config.qkv_bias, None)
        size = (heads.num_slots * heads.head_dim, config.hidden_size)
        part = (config.num_heads * heads.head_dim, heads.place_output)
        output = self._linear(
            f"{path}.output", f"{name}.o_proj", size, "heads", bias=config.output_bias, part=part
        )
        norms = {
            which: self.norm(f"{path}.{which}", f"{name}.{which}", config.head_dim)
            for which in ("q_norm", "k_norm")
            if config.qk_norm
        }
        scale = config.attention_scale
        # Its kernel takes halves of a head as they lie, in blocks of a power of two.
        fused = self.rules.platform == "gpu" and heads.head_dim & (heads.head_dim - 1) == 0
        norm = {"eps": config.rms_norm_eps, "offset": self.norm_offset}
        op = functools.partial(
            functools.partial(qkv_write.attend_projection, **norm) if fused else attend,
            scale=config.head_dim**-0.5 if scale is None else scale,
            window=window,
            soft_cap=config.attention_soft_cap,
            implementation=self.backend,
            platform=self.rules.platform,
        )
        return Attention(
            qkv,
            output,
            norms.get("q_norm"),
            norms.get("k_norm"),
            self._sinks(path, name) if config.attention_sinks else None,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            op=op,
            fused=fused,
            rules=self.rules,
        )

    def _sinks(self, path: str, name: str) -> nnx.Param:
        """Raises ConfigError on TPU, whose kernel takes none."""
        if self.rules.platform == "tpu":
            architecture = self.config.architecture
            raise ConfigError(
                f"{architecture} has attention sinks, which the TPU kernel cannot compute; "
                "GPU and CPU serve it"
            )
        piece = Piece(f"{name}.sinks", (self.config.num_heads,), self.heads.place_each)
        shape = (self.heads.num_slots,)
        return self.parameter(f"{path}.sinks", shape, ("kv_heads",), [piece])

    def mlp(self, path: str, name: str, width: int | None = None) -> GatedMLP:
        """`width` None: the model's. It divides over the mesh: split.py has seen to that. To be
        shared by ranks, alone or as a part.
        """
        config, shards = self.config, self.rules.size("mlp")
        width, hidden, bias = width or config.intermediate_size, config.hidden_size, config.mlp_bias
        assert width % shards == 0, f"{width=} {shards=}"
        parts = {
            f"{name}.{half}_proj": (width, functools.partial(place_half, index, shards))
            for index, half in enumerate(("gate", "up"))
        }
        gate_up = self._fused(f"{path}.gate_up", parts, (hidden, 2 * width), "mlp", bias, 0.0)
        down = self._linear(f"{path}.down", f"{name}.down_proj", (width, hidden), "mlp", bias=bias)
        down.bias = self.added_once(down.bias)
        return GatedMLP(gate_up, down, config.activation, 2 * width // shards)

    def _fused(
        self,
        path: str,
        parts: dict[str, tuple[int, Place]],
        size: tuple[int, int],
        axis: str,
        bias: bool,
        bias_value: float | None,
    ) -> Linear:
        """[I, O] split over outputs, of `parts`: checkpoint name → (outputs, place)."""

        def parameter(kind: str, lead: tuple[int, ...], value: float | None = None) -> nnx.Param:
            pieces = [
                Piece(f"{name}.{kind}", (width, *lead), place)
                for name, (width, place) in parts.items()
            ]
            shape, axes = (*lead, size[1]), (*(None for _ in lead), axis)
            return self.parameter(f"{path}.{kind}", shape, axes, pieces, value)

        weight = parameter("weight", size[:1])
        return Linear(weight, parameter("bias", (), bias_value) if bias else None, axis, self.rules)

    def _linear(
        self,
        path: str,
        name: str,
        size: tuple[int, int],
        axis: str,
        *,
        bias: bool,
        part: tuple[int, Place] | None = None,
    ) -> Linear:
        """[I, O] split over inputs; the checkpoint has it as [O, I], or with `part` as [O,
        part[0]], which part[1] places.
        """
        inputs, place = part or (size[0], place_transposed)
        piece = Piece(f"{name}.weight", (size[1], inputs), place)
        weight = self.parameter(f"{path}.weight", size, (axis, None), [piece])
        added = self.vector(f"{path}.bias", f"{name}.bias", size[1], 0.0) if bias else None
        return Linear(weight, added, None, self.rules)

    def shared_by_ranks(self, layer: nnx.Module) -> nnx.Module:
        """A layer whose axes are split over data-parallel ranks too, where there are any."""
        ranks = self.rules.ranks
        return layer if ranks is None else Gathered(layer, ranks)

    def added_once(self, bias: nnx.Param | None) -> Any:
        """What such a layer adds behind its last contraction."""
        ranks = self.rules.ranks
        return bias if bias is None or ranks is None else AddedOnce(bias, ranks)

    def vector(self, path: str, name: str, size: int, value: float) -> nnx.Param:
        piece = Piece(name, (size,), place_as_is)
        return self.parameter(path, (size,), (None,), [piece], value)

    def parameter(
        self,
        path: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        pieces: Iterable[Piece],
        value: float | None = None,
        dtype: str | None = None,
    ) -> nnx.Param:
        """Without an array: arrays live in one flat dict and meet their module inside a trace.
        `value` is that of dummy weights, `dtype` None the model's.
        """
        dtype = dtype or self.dtype
        spec = WeightSpec(path, shape, dtype, axes, tuple(pieces), init_value=value)
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), spec=spec)


#: Builds one decoder block of (blueprint, path, name, window): an nnx.Module called as
#: block(x, kv_layer, angles, context) → (x, kv_layer).
BlockFactory = Callable[[Blueprint, str, str, int | None], nnx.Module]
#: Builds a block's feed-forward layer of (blueprint, path, name of the decoder layer): an
#: nnx.Module called as mlp(x, context) → x.
Feed = Callable[[Blueprint, str, str], nnx.Module]


def dense_mlp(make: Blueprint, path: str, name: str) -> nnx.Module:
    return make.shared_by_ranks(make.mlp(path, f"{name}.mlp"))


class Decoder(nnx.Module):
    """All modules of a decoder-only model. `prefix` stands before the checkpoint's names, `sparse`
    builds the blocks with experts.
    """

    def __init__(
        self,
        make: Blueprint,
        block: BlockFactory,
        prefix: str = "",
        sparse: BlockFactory | None = None,
    ) -> None:
        config, name = make.config, f"{prefix}model"
        moe = config.moe
        kinds = moe.sparse_layers if moe is not None else (False,) * config.num_layers
        blocks = [sparse if has_experts and sparse else block for has_experts in kinds]
        self.embed = make.embedding("embed", f"{name}.embed_tokens", config.embed_scale)
        self.layers = nnx.List(
            kind(make, f"layers.{layer}", f"{name}.layers.{layer}", window)
            for layer, (kind, window) in enumerate(zip(blocks, config.windows, strict=True))
        )
        self.norm = make.norm("norm", f"{name}.norm", config.hidden_size)
        tied = config.tie_embeddings
        self.head = self.embed if tied else make.embedding("head", f"{prefix}lm_head")


def _place_rows(target: np.ndarray, tensor: np.ndarray) -> None:
    target[: len(tensor)] = tensor
    target[len(tensor) :] = 0


def place_half(half: int, shards: int, target: np.ndarray, tensor: np.ndarray) -> None:
    """Write [F, ...] (out first, as the checkpoint has it) into its columns of [..., 2F]."""
    assert target.flags.c_contiguous, "a reshaped view is written"
    blocks = target.reshape(*target.shape[:-1], shards, 2, -1)
    blocks[..., half, :] = tensor.T.reshape(*target.shape[:-1], shards, -1)


def place_transposed(target: np.ndarray, tensor: np.ndarray) -> None:
    target[...] = tensor.T


def place_as_is(target: np.ndarray, tensor: np.ndarray) -> None:
    target[...] = tensor
