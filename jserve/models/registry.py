"""Which architectures are served, and how each is read and built: one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jserve.errors import ConfigError
from jserve.models import gemma3, hf_llama, llama
from jserve.models.architectures import find_architecture
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

    adapt: Callable[[ModelConfig, Mapping[str, Any]], ModelConfig]
    block: BlockFactory = llama.LlamaBlock
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    norm_offset: float = 0.0
    prefix: str = ""


_GEMMA3 = Family(
    gemma3.adapt_gemma3,
    block=gemma3.Gemma3Block,
    defaults=gemma3.DEFAULTS,
    norm_offset=gemma3.NORM_OFFSET,
)

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(hf_llama.adapt_llama),
    "MistralForCausalLM": Family(hf_llama.adapt_mistral),
    "Qwen2ForCausalLM": Family(hf_llama.adapt_qwen2),
    "Qwen3ForCausalLM": Family(hf_llama.adapt_qwen3),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": dataclasses.replace(_GEMMA3, prefix="language_model."),
}


def parse_config(hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """ModelConfig of a Hugging Face config dict, with its generation_config where there is one.

    The architecture is the first known of `architectures`, or follows from `model_type`. Raises
    ConfigError that lists the known ones, or names the setting that is missing or unsupported.
    """
    architecture = find_architecture(hf)
    family = FAMILIES[architecture]
    # A multi-modal config keeps the language model's own settings one level down.
    merged = {**family.defaults, **_present(hf), **_present(hf.get("text_config"))}
    config = family.adapt(common_config(architecture, merged, generation or {}), merged)
    if len(config.windows) != config.num_layers:
        lengths = f"{len(config.windows)} layers, num_hidden_layers is {config.num_layers}"
        raise ConfigError(f"the model's config: layer_types is of {lengths}")
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
    family = FAMILIES[config.architecture]
    make = Blueprint(config, rules, dtype, attention_backend, family.norm_offset)
    cache = KVShape(config.num_layers, make.heads.num_kv_heads, config.head_dim)
    windows = [window for window in config.windows if window is not None] if hybrid else []
    if windows:
        group = dataclasses.replace(cache, num_layers=len(windows), window=max(windows))
        cache = dataclasses.replace(
            cache, num_layers=config.num_layers - len(windows), groups=(group,)
        )
    decoder = Decoder(make, family.block, family.prefix)
    return Model(config, decoder, cache, page_size=page_size)


def _present(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Null means absent in a config file."""
    if not isinstance(settings, Mapping | None):
        raise ConfigError(f"the model's config: text_config must be an object, is {settings!r}")
    settings = settings or {}
    return {key: value for key, value in settings.items() if value is not None}
