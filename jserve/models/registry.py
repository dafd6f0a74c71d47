"""Which architectures are served, and how each is read and built: one table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jserve.errors import ConfigError
from jserve.models import deepseek, gemma3, gpt_oss, hf_llama, hf_moe, llama
from jserve.models.architectures import find_architecture
from jserve.models.blueprint import BlockFactory, Blueprint, Decoder
from jserve.models.hf_config import check_token_ids, common_config
from jserve.models.hf_values import section, wrong
from jserve.models.model import Model
from jserve.models.moe import ExpertPieces, MoENames, per_expert, sparse_mlp
from jserve.models.split import check_split
from jserve.types import ModelConfig
from jserve.weights.checkpoint import Checkpoint, naming
from sharding.rules import Rules


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One architecture: `adapt` fills in what common_config leaves, `defaults` stand in for keys
    that configs omit. `sparse` builds the layers with experts, where others have none.
    Null stands for the default too, but in the keys of `nullable`, where it says that there is
    none. `quantizations` are the packed forms that its checkpoints are read from.
    """

    adapt: Callable[[ModelConfig, Mapping[str, Any]], ModelConfig]
    block: BlockFactory = llama.LlamaBlock
    sparse: BlockFactory | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    nullable: tuple[str, ...] = ()
    norm_offset: float = 0.0
    prefix: str = ""
    quantizations: tuple[str, ...] = ()


_GEMMA3 = Family(
    gemma3.adapt_gemma3,
    block=gemma3.Gemma3Block,
    defaults=gemma3.DEFAULTS,
    norm_offset=gemma3.NORM_OFFSET,
)
_DEEPSEEK: dict[str, Any] = {
    "block": deepseek.DeepseekBlock,
    "sparse": functools.partial(
        deepseek.DeepseekBlock, feed=functools.partial(sparse_mlp, names=deepseek.NAMES)
    ),
}


def _moe(
    adapt: Callable[[ModelConfig, Mapping[str, Any]], ModelConfig],
    names: MoENames,
    defaults: Mapping[str, Any],
    pieces: ExpertPieces = per_expert,
    quantizations: tuple[str, ...] = (),
) -> Family:
    """Llama's block, with experts in the sparse layers."""
    sparse = functools.partial(
        llama.LlamaBlock, feed=functools.partial(sparse_mlp, names=names, pieces=pieces)
    )
    return Family(adapt, sparse=sparse, defaults=defaults, quantizations=quantizations)


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(hf_llama.adapt_llama),
    "MistralForCausalLM": Family(
        hf_llama.adapt_mistral, defaults=hf_llama.MISTRAL_DEFAULTS, nullable=("sliding_window",)
    ),
    "Qwen2ForCausalLM": Family(hf_llama.adapt_qwen2),
    "Qwen3ForCausalLM": Family(hf_llama.adapt_qwen3),
    "MixtralForCausalLM": dataclasses.replace(
        _moe(hf_moe.adapt_mixtral, hf_moe.MIXTRAL, hf_moe.MIXTRAL_DEFAULTS),
        nullable=("num_key_value_heads",),
    ),
    "Qwen2MoeForCausalLM": _moe(hf_moe.adapt_qwen2_moe, MoENames(), hf_moe.QWEN2_MOE_DEFAULTS),
    "Qwen3MoeForCausalLM": _moe(hf_moe.adapt_qwen3_moe, MoENames(), hf_moe.QWEN3_MOE_DEFAULTS),
    "GptOssForCausalLM": _moe(
        gpt_oss.adapt_gpt_oss, gpt_oss.NAMES, gpt_oss.DEFAULTS, gpt_oss.whole_experts, ("mxfp4",)
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": dataclasses.replace(_GEMMA3, prefix="language_model."),
    "DeepseekV2ForCausalLM": Family(
        deepseek.adapt_deepseek_v2, defaults=deepseek.V2_DEFAULTS, **_DEEPSEEK
    ),
    "DeepseekV3ForCausalLM": Family(
        deepseek.adapt_deepseek_v3, defaults=deepseek.V3_DEFAULTS, **_DEEPSEEK
    ),
}


def model_config_of(checkpoint: Checkpoint) -> ModelConfig:
    """parse_config of a checkpoint's files; errors name the file."""
    with naming(checkpoint.path / "generation_config.json"):
        check_token_ids(checkpoint.generation_config)
    with naming(checkpoint.config_file):
        return parse_config(checkpoint.hf_config, checkpoint.generation_config)


def parse_config(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """ModelConfig of a Hugging Face config dict, with its generation_config where there is one.

    The architecture is the first known of `architectures`, or follows from `model_type`. Raises
    ConfigError that lists the known ones, or names the setting that is missing or unsupported.
    """
    architecture = find_architecture(hf)
    family = FAMILIES[architecture]
    # A multi-modal config keeps the language model's own settings one level down.
    nested = section(hf, "text_config")
    merged = {**_present(hf), **_present(nested)}
    none = {key for key in family.nullable if key in hf or key in nested}
    defaults = {key: value for key, value in family.defaults.items() if key not in none}
    merged = {**defaults, **merged}
    packing = section(merged, "quantization_config") or section(merged, "compression_config")
    _check_packing(architecture, packing)
    config = family.adapt(common_config(architecture, merged, generation or {}), merged)
    if config.head_dim % 2:
        raise wrong("head_dim", "even", config.head_dim)
    return config


def build_model(
    config: ModelConfig,
    rules: Rules,
    *,
    dtype: str,
    attention_backend: str | None,
    page_size: int,
    hybrid: bool = False,
) -> Model:
    """The model with its parameters described and none allocated; with `hybrid`, its layers with a
    window are a cache group. Raises ConfigError when it does not fit the mesh.
    """
    family, mesh = FAMILIES[config.architecture], rules.mesh.shape
    ep = rules.size("expert")
    check_split(config, rules.mesh.size // ep, ep, mesh["data"])
    make = Blueprint(config, rules, dtype, attention_backend, family.norm_offset)
    cache = make.cache
    windows = [window for window in config.windows if window is not None] if hybrid else []
    if windows:
        group = dataclasses.replace(cache, num_layers=len(windows), window=max(windows))
        cache = dataclasses.replace(
            cache, num_layers=config.num_layers - len(windows), groups=(group,)
        )
    decoder = Decoder(make, family.block, family.prefix, family.sparse)
    return Model(config, decoder, cache, page_size=page_size)


def _check_packing(architecture: str, packing: Mapping[str, Any]) -> None:
    """Raises ConfigError unless the family's weights are read from that form."""
    served = FAMILIES[architecture].quantizations
    if packing and packing.get("quant_method") not in served:
        known = f"only {' and '.join(served)}" if served else "nor any other quantization"
        raise ConfigError(
            f"quantization_config: quant_method {packing.get('quant_method')!r} is not supported "
            f"for {architecture}, {known}"
        )


def _present(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}
