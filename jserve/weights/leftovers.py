"""Tensors of a checkpoint that no parameter is made of: which of them say that the others are no
plain weights. Knows names only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from jserve.errors import WeightError

logger = logging.getLogger("jserve.weights")

#: What quantized formats store beside a weight (compressed-tensors, fp8, GPTQ, AWQ, bitsandbytes).
_PACKING = re.compile(
    r".*[._](weight_scale|weight_scale_inv|input_scale|scale_inv|weight_packed|weight_shape"
    r"|weight_zero_point|qweight|qzeros|scales|g_idx|absmax|quant_map|SCB|quant_state\..*)"
)
_SHOWN = 3


def check_left(left: Sequence[str], used: Collection[str], file_of: Callable[[str], Path]) -> None:
    """Logs what is left. Raises WeightError for a scale of a used weight, or its bias."""
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
    more = ", …" if len(left) > _SHOWN else ""
    logger.info("%d tensors are of no use here: %s%s", len(left), ", ".join(left[:_SHOWN]), more)
