"""Checkpoints and configs that are wrong in some way: each is refused by name, or serves.

No engine runs here; what is fuzzed is read as a start of the engine would read it.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jserve.errors import ConfigError, WeightError
from jserve.models.architectures import ARCHITECTURES, find_architecture
from jserve.models.registry import FAMILIES, model_config_of, parse_config
from jserve.weights.checkpoint import Checkpoint, open_checkpoint
from jserve.weights.hf import open_shards
from jserve.weights.leftovers import check_left

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "dtype": "float32",
}
YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "truncate": True,
}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 16,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
DEEPSEEK = {
    "rope_scaling": YARN,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 16,
    "rope_interleave": True,
}
GEMMA = {
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
    "rope_local_base_freq": 1e4,
    "attn_logit_softcapping": 30.0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OWN: Mapping[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_parameters": LLAMA3},
    "MistralForCausalLM": {"sliding_window": 16},
    "Qwen2ForCausalLM": {**WINDOWS, "rope_scaling": YARN},
    "Qwen3ForCausalLM": WINDOWS,
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {**WINDOWS, **EXPERTS, "qkv_bias": True},
    "Qwen3MoeForCausalLM": {**WINDOWS, **EXPERTS},
    "GptOssForCausalLM": {
        "rope_scaling": YARN,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "swiglu_limit": 7.0,
    },
    "Gemma3ForCausalLM": GEMMA,
    "Gemma3ForConditionalGeneration": GEMMA,
    "DeepseekV2ForCausalLM": {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": {**DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
ABSENT = object()
VALUES = (
    *(ABSENT, None, "x", "", -1, 0, 3, 1.5, 10**12, True, math.inf, math.nan),
    *([], ["a"], [-1], {}, {"a": 1}),
)


def config_of(architecture: str) -> dict[str, Any]:
    config = {**COMMON, **OWN[architecture]}
    named = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture]}
    if architecture == "Gemma3ForConditionalGeneration":
        return {**named, "text_config": config}
    return {**named, **config}


def places(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_any_value_of_any_key_of_a_config_is_served_or_refused_by_name(architecture: str):
    base = config_of(architecture)
    parse_config(base)
    refused = 0
    for path in places(base):
        for value in VALUES:
            config = copy.deepcopy(base)
            inner = config
            for key in path[:-1]:
                inner = inner[key]
            if value is ABSENT:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            try:
                parse_config(config)
            except ConfigError as error:
                refused += 1
                assert str(error), (path, value)
            except Exception as error:  # anything else is the fault that is looked for
                pytest.fail(f"{path} = {value!r}: {error!r}")
    assert refused > 100


@pytest.mark.parametrize("architecture", FAMILIES)
def test_null_stands_for_a_familys_default_as_an_absent_key_does(architecture: str):
    family, base = FAMILIES[architecture], config_of(architecture)
    inner = base.get("text_config", base)
    for key in family.defaults:
        absent = inner | {name: 8 for name in ("num_experts", "num_local_experts") if name in inner}
        absent.pop(key, None)
        read = [
            parse_config({**base, "text_config": one} if "text_config" in base else one)
            for one in (absent, {**absent, key: None})
        ]
        assert (read[0] == read[1]) is (key not in family.nullable), key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["chunked_attention"] * 2},
            "layer_types\\[0\\] must be full_attention or sliding_attention, is 'chunked",
        ),
        ({"layer_types": 3}, "layer_types must be a list"),
        ({"max_window_layers": "x"}, "max_window_layers must be an integer from 0"),
        ({"hidden_act": ["silu"]}, "hidden_act must be a text, is \\['silu'\\]"),
        ({"rope_theta": math.nan}, "rope_theta must be a number over 0, is nan"),
        ({"rope_scaling": {**YARN, "factor": math.inf}}, "factor must be a number over 0, is inf"),
        ({"rope_scaling": {**YARN, "factor": 1e9}}, "original_max_position_embeddings must be at"),
        ({"eos_token_id": [[1]]}, "eos_token_id must be token ids"),
        ({"use_sliding_window": "false"}, "use_sliding_window must be true or false"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most"),
    ],
)
def test_a_wrong_value_is_told_with_its_key_and_what_was_expected(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({**config_of("Qwen2ForCausalLM"), **change})


def test_the_file_of_a_wrong_value_is_named(tmp_path: Path):
    config = {**config_of("LlamaForCausalLM"), "head_dim": [8]}
    with pytest.raises(ConfigError, match=rf"{tmp_path}/config.json: .*head_dim must be"):
        model_config_of(Checkpoint("safetensors", tmp_path, config, {}))
    right, ends = config_of("LlamaForCausalLM"), {"eos_token_id": "x"}
    with pytest.raises(ConfigError, match=r"/generation_config.json: .*eos_token_id must be"):
        model_config_of(Checkpoint("safetensors", tmp_path, right, ends))
    (tmp_path / "config.json").write_text('{"architectures": ["Foo"]}')
    with pytest.raises(ConfigError, match=rf"{tmp_path}/config.json: the architecture Foo is not"):
        open_checkpoint(_Model(str(tmp_path)), find_architecture)


class _Model:
    revision, load_format = None, "auto"

    def __init__(self, path: str) -> None:
        self.model_path = path


@pytest.mark.parametrize("folder", ["", "./", "weights/", "weights/./"])
def test_shards_are_found_as_an_index_names_them(tmp_path: Path, folder: str):
    _write_shards(tmp_path, folder)
    source = open_shards(tmp_path)
    assert [float(source.read(name)[0]) for name in ("a", "b")] == [1.0, 2.0]


@pytest.mark.parametrize("listed", [None, [], ["a"], {}, "x", 3, {"a": 1}, {"a": None}, {"a": ""},
                                    {"a": ["x"]}, {"a": "/etc/passwd"}, {"a": "../x"}])  # fmt: skip
def test_an_index_that_is_none_is_refused_by_file_and_tensor(tmp_path: Path, listed: Any):
    _write_shards(tmp_path, "")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(WeightError, match=rf"{index}: weight_map must (be an object|name a file)"):
        open_shards(tmp_path)


def test_a_folder_or_a_dead_link_in_place_of_a_shard_is_refused(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    file.symlink_to(tmp_path / "gone")
    with pytest.raises(WeightError, match=rf"{file}: No such file"):
        open_shards(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(WeightError, match=rf"{file}: Is a directory"):
        open_shards(tmp_path)


def test_a_shard_behind_a_link_is_read(tmp_path: Path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "blob")
    os.symlink(tmp_path / "blob", tmp_path / "model.safetensors")
    assert open_shards(tmp_path).read("a").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("info", [
    {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
    {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]},
    {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]},
    {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
])  # fmt: skip
def test_sizes_that_are_none_break_a_header(tmp_path: Path, info: dict[str, Any]):
    header = json.dumps({"a": info}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightError, match="tensor a |header is broken"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["model.layers.0.self_attn.q_norm.weight"], "1 tensors .*: .*q_norm.weight$"),
        (["base.layers.9.q_proj.lora_A.weight"], "1 tensors .*lora_A.weight$"),
        ([f"model.layers.0.x{i}" for i in range(5)], "5 tensors .*: .*x0, .*x1, .*x2, …$"),
    ],
)
def test_tensors_without_which_the_result_is_another_are_warned_of(names: list[str], told: str):
    with pytest.warns(UserWarning, match=told):
        check_left(names, ["model.layers.0.self_attn.q_proj.weight"], Path)


def test_layers_beyond_those_that_the_config_counts_are_warned_of(recwarn):
    kinds = ("self_attn.q_proj.weight", "mlp.up_proj.weight")
    made = [f"model.layers.{layer}.{kind}" for layer in range(4) for kind in kinds]
    predictor = [*made[6:], "model.layers.3.eh_proj.weight"]
    check_left(predictor, made[:6], Path)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="2 tensors are not read, .*: model.layers.2.self_attn"):
        check_left([*made[4:6], *predictor, "model.layers.2.rotary_emb.inv_freq"], made[:4], Path)


def test_tensors_of_layers_that_are_not_used_and_old_buffers_are_passed_over(recwarn):
    names = ("model.layers.1.mtp.weight", "vision.layers.0.a", "lm_head.weight", "foo")
    buffers = ("rotary_emb.inv_freq", "attn.masked_bias", "self_attn.k_scale")
    left = [*names, *(f"model.layers.0.{name}" for name in buffers)]
    check_left(left, ["model.layers.0.self_attn.q_proj.weight"], Path)
    assert not recwarn.list


def _write_shards(folder: Path, inner: str) -> None:
    listed = {}
    (folder / inner).mkdir(exist_ok=True)
    for value, name in enumerate("ab", start=1):
        file = f"{inner}model-{value:05d}-of-00002.safetensors"
        save_file({name: np.full(2, value, np.float32)}, folder / file)
        listed[name] = file
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
