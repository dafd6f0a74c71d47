"""DeepSeek-V2 and V3 against transformers: ragged batches, chunks, decode over a pool of latents,
on one device and split over several.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from collectives import collectives
from tiny_models import (
    PAGE,
    Served,
    assert_close,
    checkpoint_state,
    oracle,
    oracle_logits,
    params_of,
    random_tables,
    rules_of,
)

from jserve.cache.pool import pool_spec
from jserve.config import Config, DeviceFacts, resolve
from jserve.engine.engine import Engine
from jserve.errors import ConfigError
from jserve.models.registry import build_model, parse_config
from jserve.types import KVShape, MoEConfig
from jserve.weights.orbax import take_apart
from sharding.rules import Rules

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
DENSE = {
    "v2": ("DeepseekV2Config", {"first_k_dense_replace": 2}),
    "v2 without query rank": (
        "DeepseekV2Config",
        {"q_lora_rank": None, "first_k_dense_replace": 2, "rope_parameters": YARN},
    ),
    "v3": ("DeepseekV3Config", {"first_k_dense_replace": 2, "rope_parameters": YARN}),
    "v3 with biases, halves rotated": (
        "DeepseekV3Config",
        {
            "first_k_dense_replace": 2,
            "rope_interleave": False,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
        },
    ),
}


def run(theirs, ours: Served) -> None:
    """Logits of one ragged batch, of a decode row beside a chunk of the other row's prompt, and of
    decode rows equal transformers'.
    """
    rng = np.random.default_rng(1)
    first, second = (rng.integers(2, 96, n).tolist() for n in (25, 17))
    tables = random_tables(2)
    expected, other = oracle_logits(theirs, first), oracle_logits(theirs, second)
    logits = ours.step([(0, first[:20]), (0, second[:13])], tables, bucket=(36, 4))
    assert_close(logits[:20], expected[:20])
    assert_close(logits[20:], other[:13])
    logits = ours.step([(20, first[20:21]), (13, second[13:15])], tables, bucket=(36, 4))
    assert_close(logits[:1], expected[20:21])
    assert_close(logits[1:], other[13:15])
    for index in range(2):
        rows = [(21 + index, [first[21 + index]]), (15 + index, [second[15 + index]])]
        logits = ours.step(rows, tables, decode=True, bucket=(4, 4))
        assert_close(logits, np.stack([expected[21 + index], other[15 + index]]))


MOE = {
    **LATENT,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
GROUPS = {"n_group": 4, "topk_group": 2}
SPARSE = {
    "v2 greedy": ("DeepseekV2Config", {"topk_method": "greedy"}),
    "v2 in groups": ("DeepseekV2Config", {"topk_method": "group_limited_greedy", **GROUPS}),
    "v3": ("DeepseekV3Config", {**GROUPS, "rope_parameters": YARN}),
    "v3 of one group, not renormalized": (
        "DeepseekV3Config",
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "q_lora_rank": None},
    ),
}


def usual(cases: dict, *names: str) -> list:
    """All cases, of which the default run has only those of `names`."""
    return [n if n in names else pytest.param(n, marks=pytest.mark.full) for n in cases]


def sparse_oracle(name: str):
    """With random correction biases: they are no parameters, and 0 unless trained."""
    config_class, overrides = SPARSE[name]
    theirs = oracle(config_class, **{**MOE, **overrides})
    biases = [b for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias")]
    assert len(biases) == (1 if "v3" in name else 0)
    for bias in biases:
        bias.copy_(torch.randn_like(bias) * 0.3)
    return theirs


@pytest.mark.parametrize("name", usual(SPARSE, "v3"))
def test_sparse_layers_equal_transformers_in_chunks_and_in_decode(name: str) -> None:
    theirs = sparse_oracle(name)
    ours = Served.of(theirs)
    assert ours.model.config.moe is not None
    assert ours.model.config.moe.sparse_layers == (False, True)
    run(theirs, ours)


@pytest.mark.full
@pytest.mark.parametrize("name", DENSE)
def test_dense_layers_equal_transformers_in_chunks_and_in_decode(name: str) -> None:
    config_class, overrides = DENSE[name]
    theirs = oracle(config_class, **{**LATENT, **overrides})
    ours = Served.of(theirs)
    assert ours.kv.v is None and ours.kv.k.shape[2:] == (1, 20)
    run(theirs, ours)


def test_heads_are_split_with_zero_heads_appended_and_the_latent_is_whole_on_every_device() -> None:
    config_class, overrides = DENSE["v3"]
    theirs = oracle(config_class, **{**LATENT, **overrides})
    ours = Served.of(theirs, 3)  # 4 heads, 2 on each
    keys = ours.params["layers.0.attention.keys"]
    assert keys.shape == (6, 8, 16)
    assert {s.data.shape for s in keys.addressable_shards} == {(2, 8, 16)}
    assert {s.data.shape for s in ours.kv.k.addressable_shards} == {ours.kv.k.shape}
    ids = np.random.default_rng(2).integers(2, 96, 11).tolist()
    rows, tables = [(0, ids[:7]), (0, ids[:11])], random_tables(2)
    ours.program = ours.program.lower(*ours.arguments(rows, tables)).compile()
    logits, expected = ours.step(rows, tables), oracle_logits(theirs, ids)
    assert_close(logits, np.concatenate([expected[:7], expected]))
    copies = [np.asarray(s.data) for s in ours.kv.k.addressable_shards]
    assert all((copy == copies[0]).all() for copy in copies), "devices keep the same latents"
    rows_of_hidden = ("all-reduce", 18 * 32 * 4)  # of the embedding, and of each layer's two halves
    assert collectives(ours.program) == {rows_of_hidden: 1 + 2 * 2}


MESHES = {"tp 2": (2, 1), "tp 4": (4, 1), "ep 4": (1, 4), "tp 2 × ep 2": (2, 2)}


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ("v2 in groups", "v3"))
def test_heads_and_experts_dealt_to_devices_give_the_same_logits(name: str, mesh: str) -> None:
    theirs = sparse_oracle(name)
    tp, ep = MESHES[mesh]
    run(theirs, Served.of(theirs, tp, ep=ep))


def test_every_tensor_has_a_place_and_is_told_from_the_parameters() -> None:
    """Also the one that keys and values are parts of."""
    theirs = sparse_oracle("v3")
    config = parse_config({**theirs.config.to_dict(), "architectures": ["DeepseekV3ForCausalLM"]})
    rules = rules_of(2)
    model = build_model(config, rules, dtype="float32", attention_backend=None, page_size=PAGE)
    state = checkpoint_state(theirs)
    params = params_of(model, state, rules)
    found: dict[str, np.ndarray] = {}
    for spec in model.specs:
        found |= take_apart(spec, np.asarray(params[spec.path]), found)
    assert set(found) == set(state)
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, state[name].numpy(), name)
    uses = [piece.name for spec in model.specs for piece in spec.pieces]
    assert {name for name in uses if uses.count(name) > 1} == {
        f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in range(2)
    }


def test_a_pool_of_latents_is_one_array_whole_on_every_device() -> None:
    pool = pool_spec(KVShape(3, 1, 20, value_dim=16), 6, PAGE, "bfloat16", rules_of(2))
    assert pool.v is None and pool.k.shape == (18, PAGE, 1, 20)
    assert pool.k.sharding.is_fully_replicated


def test_a_cpu_deals_tokens_by_the_size_of_a_latent() -> None:
    """V3's shape: 61 layers of 576 numbers in float32."""
    config = parse_config(json.loads((CONFIGS / "deepseek-v3.json").read_text()))
    flags = {"model_path": "m", "dtype": "float32", "context_length": 16384}
    device = DeviceFacts("cpu", "cpu", 8, 1 << 34)
    tokens = resolve(Config.from_flags(**flags), config, device).max_total_tokens
    assert tokens is not None and 0 <= (2 << 30) - tokens * 61 * 576 * 4 < 16 * 61 * 576 * 4
    tokens = resolve(Config.from_flags(**flags, tp_size=4), config, device).max_total_tokens
    assert tokens is not None and 0 <= (2 << 30) - 4 * tokens * 61 * 576 * 4 < 4 * 16 * 61 * 576 * 4


RELEASED = {
    # layers, sparse ones, parameters, attention's scale · sqrt(192)
    "deepseek-v2-lite": (27, 26, 15.7e9, (0.1 * 0.707 * math.log(40) + 1) ** 2),
    "deepseek-v3": (61, 58, 671e9, (0.1 * math.log(40) + 1) ** 2),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes_are_read_whole(name: str) -> None:
    layers, sparse, size, growth = RELEASED[name]
    config = parse_config(json.loads((CONFIGS / f"{name}.json").read_text()))
    assert config.moe is not None and config.attention_scale is not None
    assert (len(config.moe.sparse_layers), sum(config.moe.sparse_layers)) == (layers, sparse)
    assert config.attention_scale * 192**0.5 == pytest.approx(growth)
    model = build_model(config, rules_of(), dtype="bfloat16", attention_backend=None, page_size=16)
    assert sum(math.prod(s.shape) for s in model.specs) == pytest.approx(size, rel=0.003)
    assert model.cache == KVShape(layers, 1, 576, value_dim=512)


def test_experts_are_chosen_as_each_family_says() -> None:
    lite = json.loads((CONFIGS / "deepseek-v2-lite.json").read_text())
    base = MoEConfig(num_experts=64, top_k=6, width=1408, shared_width=2816, group_by="max")
    base = dataclasses.replace(base, sparse_layers=(False,) + (True,) * 26)
    assert parse_config(lite).moe == base
    # As DeepSeek-V2 of 236 billion parameters.
    limited = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    expected = dataclasses.replace(base, num_groups=8, top_groups=3, scale=16.0)
    assert parse_config({**lite, **limited, "routed_scaling_factor": 16.0}).moe == expected
    normalized = {"norm_topk_prob": True, "routed_scaling_factor": 16.0, "moe_layer_freq": 2}
    layers = (False, False) + (True, False) * 12 + (True,)
    expected = dataclasses.replace(base, renormalize=True, sparse_layers=layers)
    assert parse_config({**lite, **normalized}).moe == expected
    assert parse_config({**lite, "n_routed_experts": None}).moe is None
    v3 = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    assert parse_config(v3).moe == MoEConfig(
        num_experts=256,
        top_k=8,
        width=2048,
        scoring="sigmoid",
        renormalize=True,
        scale=2.5,
        score_bias=True,
        num_groups=8,
        top_groups=4,
        group_by="top2_sum",
        shared_width=2048,
        sparse_layers=(False,) * 3 + (True,) * 58,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported here, only noaux_tc"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank must be a positive integer"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, is 7"),
        ({"n_group": 7}, "8 of 256 experts cannot be chosen in 4 of 7 groups"),
        ({"topk_group": 9}, "in 9 of 8 groups"),
        ({"num_experts_per_tok": 200}, "200 of 256 experts"),
        ({"n_group": 256, "topk_group": 8}, "groups of one expert"),
        ({"first_k_dense_replace": "3"}, "first_k_dense_replace"),
        ({"routed_scaling_factor": [2]}, "routed_scaling_factor must be a number"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_settings_that_are_not_served_are_named(change: dict, message: str) -> None:
    hf = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    with pytest.raises(ConfigError, match=message):
        parse_config({**hf, **change})


def test_a_tpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(json.loads((CONFIGS / "deepseek-v2-lite.json").read_text()))
    rules = rules_of()
    monkeypatch.setattr(Rules, "platform", "tpu")
    with pytest.raises(ConfigError, match="DeepseekV2ForCausalLM caches latents.* TPU"):
        build_model(config, rules, dtype="bfloat16", attention_backend=None, page_size=16)


@pytest.mark.full
@pytest.mark.parametrize("name", ("v2 in groups", "v3"))
def test_an_engine_serves_a_saved_checkpoint_in_chunks_and_from_a_warm_cache(
    name: str, tmp_path: Path
) -> None:
    theirs = sparse_oracle(name)
    theirs.save_pretrained(tmp_path)
    rng = np.random.default_rng(5)
    shared = rng.integers(2, 96, 21).tolist()
    prompts = [shared + rng.integers(2, 96, n).tolist() for n in (4, 9)]
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    flags = {
        "max_running_requests": 2,
        "chunked_prefill_size": 8,
        "page_size": PAGE,
        "recompile_guard": "error",
        "compilation_cache_dir": "off",
        "tokenizer_path": "smollm2-135m",
    }
    with Engine(str(tmp_path), inline=True, **flags) as engine:
        for cached in (0, 24):
            answers = [engine.generate(input_ids=p, sampling_params=params) for p in prompts]
            assert answers[0]["meta_info"]["cached_tokens"] == cached
            assert answers[1]["meta_info"]["cached_tokens"] >= 20, "the shared prefix"
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer["output_ids"] == greedy(theirs, prompt, 8)


def greedy(model, prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(oracle_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]
