"""Experts on several devices: rows reach their experts and come back by either way, whichever the
router's variant, and an engine gives the same answers as on one device.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from test_deepseek import sparse_oracle
from test_gpt_oss import tiny
from tiny_models import oracle, rules_of

from jserve.config import Config, DeviceFacts, resolve
from jserve.engine.engine import Engine
from jserve.errors import ConfigError
from jserve.layers.moe import route
from jserve.models.registry import build_model, parse_config
from jserve.tokenizer.sources import byte_source
from jserve.types import MoEConfig
from sharding import experts
from sharding.experts import apply_experts, exchange_pays

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 3, 6, 16
NOBODYS = 5  # of the tokens, the last ones: with four shares, all of one


def an_own_factor(
    x: jax.Array, weights: jax.Array, ids: jax.Array, factors: jax.Array, slices: jax.Array
) -> jax.Array:
    """Expert e multiplies by its factors; each device along tensor has a slice of the sum."""
    expert = jnp.minimum(ids, len(factors) - 1)
    each = x[:, None] * factors[expert] * slices[expert].sum(2)[..., None]
    real = (ids < len(factors))[..., None]
    return jnp.sum(jnp.where(real, each * weights[..., None], 0.0), axis=1)


@pytest.mark.parametrize(
    ("tp", "ep", "crowded"),
    [(1, 1, False), (1, 2, False), (1, 4, True), (2, 2, False), (2, 4, True)],
)
@pytest.mark.parametrize("way", ["reduce", "exchange"])
def test_each_token_gets_its_experts_sum(
    way: str, tp: int, ep: int, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, exchanges = np.random.default_rng(1), []
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).astype(np.int32)
    if crowded:  # all rows are for one device, the others have none
        ids = np.tile(np.array([5, 4, 5], np.int32), (TOKENS, 1))
    ids[-NOBODYS:] = EXPERTS
    x, weights = rng.normal(size=(TOKENS, HIDDEN)), rng.random((TOKENS, TOP_K))
    factors, slices = rng.normal(size=(EXPERTS, HIDDEN)), rng.normal(size=(EXPERTS, 4))
    someones = np.append(np.ones(EXPERTS), 0.0)[ids] * weights
    some = np.minimum(ids, EXPERTS - 1)
    expected = np.einsum(
        "tk,tkc->tc", someones, x[:, None] * factors[some] * slices.sum(1)[some][..., None]
    )
    monkeypatch.setattr(experts, "exchange_pays", lambda *_: way == "exchange")
    exchange = experts._exchange
    monkeypatch.setattr(
        experts, "_exchange", lambda *a, **k: exchanges.append(1) or exchange(*a, **k)
    )
    axes = [("expert", None), ("expert", "expert_mlp")]
    arrays = (x.astype(np.float32), weights.astype(np.float32), ids)
    params = [factors.astype(np.float32), slices.astype(np.float32)]
    call = jax.jit(lambda *a: apply_experts(an_own_factor, *a, axes, rules_of(tp, ep)))
    np.testing.assert_allclose(call(*arrays, params), expected, rtol=1e-5, atol=1e-5)
    assert bool(exchanges) == (way == "exchange")


def test_on_accelerators_only_the_rows_that_are_wanted_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange = experts._exchange
    monkeypatch.setattr(experts, "exchange_pays", lambda *_: True)
    monkeypatch.setattr(experts, "_exchange", lambda *a, platform: exchange(*a, platform="gpu"))
    axes = [("expert", None), ("expert", "expert_mlp")]
    call = jax.jit(lambda *a: apply_experts(an_own_factor, *a, axes, rules_of(2, 2)))
    x, weights = jnp.zeros((TOKENS, HIDDEN)), jnp.zeros((TOKENS, TOP_K))
    params = [jnp.zeros((EXPERTS, HIDDEN)), jnp.zeros((EXPERTS, 4))]
    traced = call.trace(x, weights, weights.astype(jnp.int32), params)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ragged_all_to_all(") == 3, "rows and their experts there, sums back"
    assert text.count("stablehlo.all_gather") == 1, "how many rows go from where to where"


def test_tokens_are_exchanged_only_where_that_moves_less() -> None:
    assert not exchange_pays((8192, 4096), 2, 2, 1), "one device has all experts"
    assert not exchange_pays((8192, 2048), 2, 8, 8), "eight of each eight experts: a sum is less"
    assert exchange_pays((8192, 4096), 2, 2, 8)
    assert not exchange_pays((64, 4096), 2, 2, 8), "a step too small for three collectives"
    assert not exchange_pays((8193, 4096), 2, 2, 8), "shares must be even"


ROUTERS = {
    "softmax": {},
    "softmax, renormalized and scaled": {"renormalize": True, "scale": 2.5},
    "softmax over the chosen": {"scoring": "softmax_topk"},
    "sigmoid with a bias for the choice": {"scoring": "sigmoid", "score_bias": True},
    "groups by their best": {"num_groups": 4, "top_groups": 2},
    "groups by their best two": {
        **{"scoring": "sigmoid", "score_bias": True, "num_groups": 4, "top_groups": 2},
        **{"group_by": "top2_sum", "renormalize": True},
    },
}


@pytest.mark.parametrize("variant", ROUTERS)
def test_routers_choose_as_their_formula_says(variant: str) -> None:
    config = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, width=4, **ROUTERS[variant])
    rng = np.random.default_rng(2)
    logits, bias = rng.normal(size=(9, EXPERTS)), rng.normal(size=EXPERTS)
    found = route(
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(bias, jnp.float32) if config.score_bias else None,
        config=config,
    )
    for row, weights, ids in zip(logits, *map(np.asarray, found), strict=True):
        wanted = one_token(row, bias, config)
        assert ids.tolist() == list(wanted), f"{ids=} {wanted=}"
        np.testing.assert_allclose(weights, list(wanted.values()), rtol=1e-5)


def one_token(logits: np.ndarray, bias: np.ndarray, config: MoEConfig) -> dict[int, float]:
    """Expert → weight, the best first."""
    exp = np.exp(logits)
    scores = 1 / (1 + 1 / exp) if config.scoring == "sigmoid" else exp / exp.sum()
    choice = scores + bias * config.score_bias
    each = config.num_experts // config.num_groups
    counted = {"max": 1, "top2_sum": 2}[config.group_by]
    groups = choice.reshape(config.num_groups, each)
    worth = [sum(sorted(group)[-counted:]) for group in groups]
    best = sorted(range(config.num_groups), key=lambda group: -worth[group])[: config.top_groups]
    allowed = [e for e in range(config.num_experts) if e // each in best]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: config.top_k]
    total = sum(scores[e] for e in chosen)
    divided = config.renormalize or config.scoring == "softmax_topk"
    return {e: scores[e] / (total if divided else 1.0) * config.scale for e in chosen}


CPU = DeviceFacts("cpu", "cpu", 8, 1 << 34)
SPARSE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}


def test_sizes_that_cannot_work_are_refused_with_those_that_would() -> None:
    sparse = parse_config(SPARSE)

    def resolved(model: object, **flags: int) -> object:
        return resolve(Config.from_flags(model_path="m", **flags), model, CPU)

    assert resolved(sparse, tp_size=2, ep_size=4).ep_size == 4
    with pytest.raises(ConfigError, match="2 times --ep-size 8 is over the 8.*--ep-size 4 is the"):
        resolved(sparse, tp_size=2, ep_size=8)
    options = {"dtype": "float32", "attention_backend": None, "page_size": 4}
    with pytest.raises(
        ConfigError, match="8 experts, which --ep-size 3 .*: --ep-size 1, 2, 4, 8 with"
    ):
        build_model(sparse, rules_of(1, 3), **options)
    odd = parse_config({**SPARSE, "moe_intermediate_size": 18})
    with pytest.raises(ConfigError, match="18 columns of an expert.*--tp-size 1, 2, 3, 6$"):
        build_model(odd, rules_of(4), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is over num_experts 8"),
        ({"num_experts": "8"}, "num_experts must be a positive integer"),
        ({"moe_intermediate_size": 0.5}, "moe_intermediate_size must be"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
    ],
)
def test_a_config_with_broken_experts_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**SPARSE, **change})


MESHES = [(1, 2), (1, 4), (2, 2), (2, 4), (4, 2)]
ENGINE = {"max_running_requests": 2, "chunked_prefill_size": 16, "page_size": 4, "random_seed": 0}
ENGINE |= {"recompile_guard": "error", "compilation_cache_dir": "off"}
REGEX = "[B-Y]{3}-[0-9]{3}"
DRAWN = {"temperature": 0.8, "top_k": 30, "sampling_seed": 7, "frequency_penalty": 0.9}


def answers(path: Path, **flags: int) -> list[list[int]]:
    """Greedy ones to prompts in chunks, together, then to one whose prefix is cached, then by a
    grammar, then drawn by a seed under penalties."""
    with Engine(str(path), inline=True, **ENGINE, **flags) as engine:
        params = {"max_new_tokens": 10, "temperature": 0, "ignore_eos": True}
        prompts = [[(7 * i + 3 * j) % 90 + 2 for j in range(20 + i)] for i in range(3)]
        together = engine.generate(input_ids=prompts, sampling_params=params)
        outputs = [reply["output_ids"] for reply in together]
        again = engine.generate(input_ids=[*prompts[0], *outputs[0]], sampling_params=params)
        assert again["meta_info"]["cached_tokens"] >= 16
        others = [
            engine.generate(input_ids=prompts[1], sampling_params={**params, **other})
            for other in ({"ignore_eos": False, "regex": REGEX}, DRAWN)
        ]
        assert re.fullmatch(REGEX, others[0]["text"]), others[0]["text"]
        info = engine.get_server_info()
        assert info["num_prefill_chunks_total"] >= 6 and info["recompiles_total"] == 0
        return [*outputs, again["output_ids"], *(other["output_ids"] for other in others)]


#: Experts of each differ.
FAMILIES: dict[str, Callable[[], torch.nn.Module]] = {
    "qwen3_moe": lambda: oracle("Qwen3MoeConfig", **SPARSE, norm_topk_prob=True),
    "qwen2_moe": lambda: oracle(
        "Qwen2MoeConfig", **SPARSE, shared_expert_intermediate_size=24, decoder_sparse_step=2
    ),
    "mixtral": lambda: oracle(
        "MixtralConfig", num_attention_heads=8, num_key_value_heads=4, num_local_experts=4
    ),
    "deepseek_v2": lambda: sparse_oracle("v2 in groups"),
    "deepseek_v3": lambda: sparse_oracle("v3"),
    "gpt_oss": tiny,
}


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """A folder that transformers wrote, and one device's answers."""

    @functools.cache
    def made(family: str) -> tuple[Path, list[list[int]]]:
        path = tmp_path_factory.mktemp(family)
        FAMILIES[family]().save_pretrained(path)
        byte_source(SPARSE["vocab_size"], (1,)).save(path)
        return path, answers(path)

    return made


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "tp", "ep"),
    [
        (family, *mesh)
        for family in FAMILIES
        for mesh in (MESHES if family == "qwen3_moe" else [(2, 2)])
    ],
)
def test_an_engine_answers_as_on_one_device(
    alone: Callable[[str], tuple[Path, list[list[int]]]], family: str, tp: int, ep: int
) -> None:
    path, expected = alone(family)
    assert answers(path, tp_size=tp, ep_size=ep) == expected
    assert len({tuple(ids) for ids in expected}) == len(expected)
