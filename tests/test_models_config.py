"""parse_config: both spellings of rope settings, windows, end tokens, and one clear error for what
is not served.
"""

from __future__ import annotations

import pytest
import transformers

from jserve.errors import ConfigError
from jserve.models.architectures import ARCHITECTURES
from jserve.models.registry import FAMILIES, parse_config
from jserve.models.rope_scaling import frequencies_of
from jserve.types import RopeConfig

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def test_both_spellings_of_rope_settings_read_the_same():
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}}
    expected = RopeConfig(5e5, "linear", (("factor", 4.0),))
    assert parse_config({**BASE, **old}).rope == parse_config({**BASE, **new}).rope == expected


def test_both_spellings_of_gemma_ropes_read_the_same():
    gemma = {**BASE, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 8}
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": linear}
    new = {
        "rope_parameters": {
            "full_attention": {**linear, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        }
    }
    one, other = parse_config({**gemma, **old}), parse_config({**gemma, **new})
    assert one == other
    assert one.rope == RopeConfig(2e6, "linear", (("factor", 8.0),))
    assert one.rope_local == RopeConfig(3e4)


def test_defaults_fill_what_a_released_multi_modal_gemma_leaves_out():
    hf = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    config = parse_config(hf)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.tie_embeddings and config.activation == "gelu_tanh"
    assert config.eos_token_ids == (1, 106) and config.dtype == "bfloat16"
    assert config.attention_scale == 256**-0.5 and config.embed_scale == 2560**0.5


def test_a_config_without_architectures_is_known_by_its_model_type():
    assert ARCHITECTURES.keys() == FAMILIES.keys()
    for name, model_type in ARCHITECTURES.items():
        hf = {**BASE, "architectures": None, "model_type": model_type}
        assert parse_config(hf).architecture == name


def test_an_unknown_architecture_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"FooForCausalLM is not supported; known: .*Qwen3For"):
        parse_config({**BASE, "architectures": ["FooForCausalLM"]})
    with pytest.raises(ConfigError, match=r"model_type 'foo' is not supported; known: "):
        parse_config({**BASE, "architectures": [], "model_type": "foo"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors' is"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"architectures": [None]}, "architectures must be a list"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be a positive integer, is '4'"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": [4]}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_key_value_heads": -1}, "num_key_value_heads"),
        ({"head_dim": 1.5}, "head_dim"),
        ({"max_position_embeddings": "2k"}, "max_position_embeddings"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"rope_theta": [1]}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, is .linear."),
        ({"text_config": 5}, "text_config must be an object"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be token ids"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types is of 1 layers, num_hidden_layers is 4",
        ),
        *(
            (
                {
                    "architectures": [f"{family}ForCausalLM"],
                    "sliding_window": 9,
                    "layer_types": ["full_attention", "sliding_attention", kind, "full_attention"],
                },
                rf"layer_types\[2\] must be full_attention or sliding_attention, is {kind!r}",
            )
            for family in ("GptOss", "Qwen2", "Qwen3", "Qwen2Moe", "Gemma3")
            for kind in ("chunked_attention", None)
        ),
    ],
)
def test_what_is_missing_or_unsupported_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({**BASE, **change})


def test_end_tokens_are_those_of_either_file():
    config = parse_config({**BASE, "eos_token_id": 7}, {"eos_token_id": [7, 9], "bos_token_id": 3})
    assert config.eos_token_ids == (7, 9) and config.bos_token_id == 3


def test_windows_follow_each_familys_rule():
    mistral = {**BASE, "architectures": ["MistralForCausalLM"]}
    qwen = {
        **BASE,
        "architectures": ["Qwen2ForCausalLM"],
        "sliding_window": 9,
        "max_window_layers": 3,
    }
    assert parse_config({**mistral, "sliding_window": 9}).windows == (9,) * 4
    assert parse_config({**mistral, "sliding_window": None}).windows == (None,) * 4
    assert parse_config({**qwen, "use_sliding_window": False}).windows == (None,) * 4
    assert parse_config({**qwen, "use_sliding_window": True}).windows == (None, None, None, 9)


@pytest.mark.parametrize("family", ["Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("stated", [{}, {"sliding_window": None}, {"sliding_window": 9}])
@pytest.mark.parametrize("used", [{}, {"use_sliding_window": True, "max_window_layers": 2}])
def test_windows_that_a_config_leaves_out_are_transformers_own(family, stated, used):
    if used and "sliding_window" in stated and stated["sliding_window"] is None:
        used = {}  # transformers itself has no such model
    settings = {**BASE, "num_hidden_layers": 4, **stated, **used}
    settings.pop("architectures", None)
    theirs = getattr(transformers, f"{family}Config")(**settings)
    window = theirs.sliding_window or None
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 4
    expected = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert parse_config({**settings, "architectures": [f"{family}ForCausalLM"]}).windows == expected


def test_a_zero_of_yarn_is_its_default():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    plain, zeros = (
        parse_config({**BASE, "rope_scaling": {**scaling, **more}}).rope
        for more in ({}, {"beta_fast": 0, "beta_slow": 0})
    )
    found, expected = frequencies_of(zeros, 16), frequencies_of(plain, 16)
    assert (found[0] == expected[0]).all() and found[1] == expected[1]


def test_yarn_lengthens_the_context_and_scales_attention():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    config = parse_config({**BASE, "rope_scaling": yarn})
    assert config.max_position == 8192
    _, factor = frequencies_of(config.rope, 16)
    assert factor == pytest.approx(0.1 * 1.3862943611 + 1.0)
    given = {**yarn, "attention_factor": 1.5}
    assert frequencies_of(parse_config({**BASE, "rope_scaling": given}).rope, 16)[1] == 1.5
