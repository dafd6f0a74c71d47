"""Builds the sparse layers of a model: the parameters of router and experts, each described once.

Owns what checkpoints call them, the split over experts and what refuses a mesh; what the modules
compute is layers/moe.py's. Legend as there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from flax import nnx

from jserve.layers.linear import Linear
from jserve.layers.moe import DOWN_AXES, GATE_UP_AXES, GATE_UP_BIAS_AXES, MoE, Router
from jserve.models.blueprint import Blueprint, place_as_is, place_half, place_transposed
from jserve.weights.spec import Piece
from pallas_kernels.gmm import grouped_matmul


@dataclasses.dataclass(frozen=True, slots=True)
class MoENames:
    """What a checkpoint calls the parts of a sparse layer, below the decoder layer's name."""

    block: str = "mlp"
    router: str = "gate"
    score_bias: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    halves: tuple[str, str] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertShape:
    """`shards` is what each expert's width is split into."""

    num_experts: int
    hidden: int  # C
    width: int  # F
    shards: int  # S


#: (part, name of the experts, names, shape) → the checkpoint's tensors that make up one parameter;
#: `part` is gate_up [E, C, 2F], down [E, F, C], gate_up_bias [E, 2F] or down_bias [E, C].
ExpertPieces = Callable[[str, str, MoENames, ExpertShape], list[Piece]]


def per_expert(part: str, name: str, names: MoENames, shape: ExpertShape) -> list[Piece]:
    """Of a checkpoint with tensors for each expert, outputs first."""
    if part == "down":
        size = (shape.hidden, shape.width)
        return [
            Piece(f"{name}.{expert}.{names.down}.weight", size, place_transposed, expert)
            for expert in range(shape.num_experts)
        ]
    assert part == "gate_up", f"{part=} has no tensors of its own for each expert"
    return [
        Piece(
            f"{name}.{expert}.{half}.weight",
            (shape.width, shape.hidden),
            functools.partial(place_half, index, shape.shards),
            expert,
        )
        for expert in range(shape.num_experts)
        for index, half in enumerate(names.halves)
    ]


def sparse_mlp(
    make: Blueprint,
    path: str,
    name: str,
    *,
    names: MoENames = MoENames(),
    pieces: ExpertPieces = per_expert,
) -> nnx.Module:
    """The sparse layer at `path` of the decoder layer that the checkpoint calls `name`: an MoE."""
    config, moe, name = make.config, make.config.moe, f"{name}.{names.block}"
    assert moe is not None, f"{config.architecture} has no experts"
    shards = make.rules.size("expert_mlp")
    shape = ExpertShape(moe.num_experts, config.hidden_size, moe.width, shards)

    def experts(part: str, size: Sequence[int], axes: Sequence[str | None]) -> nnx.Param:
        found = pieces(part, f"{name}.{names.experts}", names, shape)
        whole = (moe.num_experts, *size)
        return make.parameter(f"{path}.{part}", whole, tuple(axes), found)

    hidden, width, biased = config.hidden_size, moe.width, moe.expert_bias
    layer = MoE(
        _router(make, path, name, names),
        experts("gate_up", (hidden, 2 * width), GATE_UP_AXES),
        experts("down", (width, hidden), DOWN_AXES),
        experts("gate_up_bias", (2 * width,), GATE_UP_BIAS_AXES) if biased else None,
        make.added_once(experts("down_bias", (hidden,), (None, None))) if biased else None,
        make.mlp(f"{path}.shared", f"{name}.{names.shared}", moe.shared_width)
        if moe.shared_width
        else None,
        _shared_gate(make, path, f"{name}.{names.shared_gate}") if moe.shared_gate else None,
        activation=moe.activation,
        matmul=functools.partial(grouped_matmul, platform=make.rules.platform),
        rules=make.rules,
    )
    return make.shared_by_ranks(layer)


def _router(make: Blueprint, path: str, name: str, names: MoENames) -> Router:
    moe, hidden = make.config.moe, make.config.hidden_size
    assert moe is not None
    num, router = moe.num_experts, f"{name}.{names.router}"

    def vector(part: str, tensor: str, dtype: str | None) -> nnx.Param:
        found = [Piece(tensor, (num,), place_as_is)]
        return make.parameter(f"{path}.{part}", (num,), (None,), found, 0.0, dtype)

    piece = Piece(f"{router}.weight", (num, hidden), place_transposed)
    weight = make.parameter(f"{path}.router", (hidden, num), (None, None), [piece])
    bias = vector("router_bias", f"{router}.bias", None) if moe.router_bias else None
    score = f"{name}.{names.score_bias}"
    score_bias = vector("score_bias", score, "float32") if moe.score_bias else None
    return Router(weight, bias, score_bias, moe, make.rules)


def _shared_gate(make: Blueprint, path: str, name: str) -> Linear:
    hidden = make.config.hidden_size
    piece = Piece(f"{name}.weight", (1, hidden), place_transposed)
    weight = make.parameter(f"{path}.shared_gate", (hidden, 1), (None, None), [piece])
    return Linear(weight, None, None, make.rules)
