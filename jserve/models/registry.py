"""Which architectures are served, and how each is read and built: one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jserve.errors import ConfigError
from jserve.models import gemma3, hf_llama, llama
from jserve.models.blueprint import BlockFactory, Blueprint, Decoder
from jserve.models.hf_config import common_config
from jserve.models.model import Model
from jserve.types import KVShape, ModelConfig
from sharding.rules import Rules


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One architecture: `adapt` fills in what common_config leaves, `defaults` stand in for keys
    that configs omit.
    """

    model_type: str
    adapt: Callable[[ModelConfig, Mapping[str, Any]], ModelConfig]
    block: BlockFactory = llama.LlamaBlock
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    norm_offset: float = 0.0
    prefix: str = ""


_GEMMA3 = Family(
    "gemma3_text",
    gemma3.adapt_gemma3,
    block=gemma3.Gemma3Block,
    defaults=gemma3.DEFAULTS,
    norm_offset=gemma3.NORM_OFFSET,
)

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", hf_llama.adapt_llama),
    "MistralForCausalLM": Family("mistral", hf_llama.adapt_mistral),
    "Qwen2ForCausalLM": Family("qwen2", hf_llama.adapt_qwen2),
    "Qwen3ForCausalLM": Family("qwen3", hf_llama.adapt_qwen3),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": dataclasses.replace(
        _GEMMA3, model_type="gemma3", prefix="language_model."
    ),
}


def parse_config(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """ModelConfig of a Hugging Face config dict, with its generation_config where there is one.

    The architecture is the first known of `architectures`, or follows from `model_type`. Raises
    ConfigError that lists the known ones, or names the setting that is missing or unsupported.
    """
    architecture = _architecture(hf)
    family = FAMILIES[architecture]
    # A multi-modal config keeps the language model's own settings one level down.
    merged = {**family.defaults, **_present(hf), **_present(hf.get("text_config") or {})}
    config = family.adapt(common_config(architecture, merged, generation or {}), merged)
    assert len(config.windows) == config.num_layers, f"{config.windows=} {config.num_layers=}"
    return config


def build_model(
    config: ModelConfig,
    rules: Rules,
    *,
    dtype: str,
    attention_backend: str | None,
    page_size: int,
) -> Model:
    """The model with its parameters described and none allocated. Raises ConfigError when it does
    not fit the mesh.
    """
    family = FAMILIES[config.architecture]
    make = Blueprint(config, rules, dtype, attention_backend, family.norm_offset)
    cache = KVShape(config.num_layers, make.heads.num_kv_heads, config.head_dim)
    decoder = Decoder(make, family.block, family.prefix)
    return Model(config, decoder, cache, page_size=page_size)


def _architecture(hf: Mapping[str, Any]) -> str:
    named = hf.get("architectures") or ()
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    for name in named:
        if name in FAMILIES:
            return name
    if not named and hf.get("model_type") in by_type:
        return by_type[hf["model_type"]]
    asked = ", ".join(named) or f"model_type {hf.get('model_type')!r}"
    raise ConfigError(f"unknown architecture {asked}; known: {', '.join(FAMILIES)}")


def _present(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Null means absent in a config file."""
    return {key: value for key, value in settings.items() if value is not None}
