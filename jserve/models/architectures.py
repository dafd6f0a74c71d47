"""The names of the architectures that are served. Imports no jax, so that a process without a
device can refuse the others; what they are is registry.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jserve.errors import ConfigError
from jserve.models.hf_values import text

#: Architecture → model_type, as configs name them.
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}


def find_architecture(hf: Mapping[str, Any]) -> str:
    """The first known of a config's `architectures`; without any, what its `model_type` stands for.

    Raises ConfigError that lists the known ones.
    """
    named = hf.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        rule = "architectures must be a list of names"
        raise ConfigError(f"the model's config: {rule}, is {named!r}")
    for name in named:
        if name in ARCHITECTURES:
            return name
    by_type = {model_type: name for name, model_type in ARCHITECTURES.items()}
    model_type = text(hf, "model_type")
    if not named and model_type in by_type:
        return by_type[model_type]
    asked = ", ".join(named) or f"of model_type {model_type!r}"
    raise ConfigError(
        f"the architecture {asked} is not supported; known: {', '.join(ARCHITECTURES)}"
    )
