"""Tensors of a checkpoint that no parameter is made of: which of them say that the others are no
plain weights, or that the model computes something else. Knows names only.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from jserve.errors import WeightError

logger = logging.getLogger("jserve.weights")

#: What quantized formats store beside a weight (compressed-tensors, fp8, GPTQ, AWQ, bitsandbytes).
_PACKING = re.compile(
    r".*[._](weight_scale|weight_scale_inv|input_scale|scale_inv|weight_packed|weight_shape"
    r"|weight_zero_point|qweight|qzeros|scales|g_idx|absmax|quant_map|SCB|quant_state\..*)"
)
_LAYER = re.compile(r"(.*\bmodel\.layers\.\d+)\.(.+)")
#: Buffers of older exporters, and what only a quantized cache needs.
_IDLE = re.compile(
    r".*\.(inv_freq|cos_cached|sin_cached|masked_bias|attn\.bias|rotary_emb\..*|[kvq]_scale)"
)
_SHOWN = 3


def check_left(left: Sequence[str], used: Collection[str], file_of: Callable[[str], Path]) -> None:
    """Logs what is left. Raises WeightError for a scale of a used weight, or its bias; warns of
    others without which the model computes something else, at any log level."""
    for name in left:
        weight = name.rpartition(".")[0] + ".weight"
        if weight not in used:
            continue
        if _PACKING.fullmatch(name):
            why = f"{weight} is quantized, but the config has no quantization_config that says how"
            raise WeightError(f"{file_of(name)}: tensor {name} tells that {why}")
        if name.endswith(".bias"):
            why = f"the config says that {weight} has none (attention_bias, mlp_bias)"
            raise WeightError(f"{file_of(name)}: tensor {name} would be ignored: {why}")
    logger.info("%d tensors are of no use here: %s", len(left), _some(left))
    if missed := _missed(left, used):
        warnings.warn(
            f"{file_of(missed[0])}: {len(missed)} tensors are not read, without which the model "
            f"computes something else: {_some(missed)}",
            stacklevel=2,
        )


def _missed(left: Sequence[str], used: Collection[str]) -> list[str]:
    """Adapters, and what lies in a layer that is used, or in one that is made as they are: those
    that predict further tokens have more."""
    kept = [name for name in left if not _IDLE.fullmatch(name)]
    layers, held = _by_layer(used).keys(), _by_layer([*used, *kept])
    kinds = {frozenset(held[layer]) for layer in layers}
    layers |= {layer for layer, names in held.items() if frozenset(names) in kinds}
    return [
        name
        for name in kept
        if "lora_" in name or ((found := _LAYER.fullmatch(name)) and found[1] in layers)
    ]


def _by_layer(names: Iterable[str]) -> dict[str, set[str]]:
    """What each layer holds, by names within it."""
    layers: dict[str, set[str]] = {}
    for name in names:
        if found := _LAYER.fullmatch(name):
            layers.setdefault(found[1], set()).add(found[2])
    return layers


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
