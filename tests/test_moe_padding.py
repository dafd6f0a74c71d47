"""Padding of a step is no expert's: no row of it is multiplied, what it holds reaches nobody, and
its sums are 0; on one device, with experts and their widths split, exchanged, and shared by ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import batch, hf_dict, oracle, random_tables, rules_of

from jserve.batch import CallContext
from jserve.models import moe
from jserve.models.blueprint import Blueprint
from jserve.models.model import _Part
from jserve.models.registry import FAMILIES, parse_config
from jserve.types import ModelConfig
from pallas_kernels.gmm import grouped_matmul
from sharding import experts
from sharding.ranks import AXIS
from sharding.rules import Rules

TOKENS, TOP_K, EXPERTS, HIDDEN = 16, 2, 4, 32
SPARSE = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": EXPERTS}),
    "qwen2_moe": ("Qwen2MoeConfig", SPARSE),
    "qwen3_moe": ("Qwen3MoeConfig", SPARSE),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **{"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "v_head_dim": 8},
            **{"qk_rope_head_dim": 4, "head_dim": 4, "n_routed_experts": EXPERTS, "n_group": 2},
            **{"num_experts_per_tok": TOP_K, "topk_group": 1, "first_k_dense_replace": 0},
        },
    ),
}


@functools.cache
def config_of(model: str) -> ModelConfig:
    """Without a shared expert, which every token meets."""
    config_class, overrides = MODELS[model]
    config = parse_config(hf_dict(oracle(config_class, **overrides)))
    assert config.moe is not None
    alone = dataclasses.replace(config.moe, shared_width=0, shared_gate=False)
    return dataclasses.replace(config, moe=alone)


def layer_of(model: str, rules: Rules) -> tuple[Callable[..., Any], list[jax.Array], list[Any]]:
    """The sparse layer as (parameters, x, context) → (sums, what it sowed), and random parameters
    with their specs."""
    config = config_of(model)
    feed = FAMILIES[config.architecture].sparse.keywords["feed"]
    part = _Part.split(feed(Blueprint(config, rules, "float32", None), "mlp", "layer"))
    rng = np.random.default_rng(3)
    params = [
        jax.device_put(rng.standard_normal(s.shape).astype(np.float32), rules.sharding(s.axes))
        for s in part.specs
    ]
    return part.run_block, params, [rules.spec(s.axes) for s in part.specs]


def counted_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that belong to a group, of each device's every grouped matmul, in models built from here
    on."""
    rows: list[int] = []

    def counted(x: jax.Array, weights: jax.Array, sizes: jax.Array, **how: Any) -> jax.Array:
        jax.debug.callback(lambda sizes: rows.append(int(np.sum(np.asarray(sizes)))), sizes)
        return grouped_matmul(x, weights, sizes, **how)

    monkeypatch.setattr(moe, "grouped_matmul", counted)
    return rows


EVERYDAY = [("gpt_oss", way) for way in ("alone", "sum", "exchange")] + [("mixtral", "alone")]
#: --tp-size, --ep-size
WAYS = {"alone": (1, 1), "sum": (2, 2), "exchange": (2, 2)}


@pytest.mark.parametrize(
    ("model", "way"),
    [
        pytest.param(model, way, marks=() if (model, way) in EVERYDAY else pytest.mark.full)
        for model in MODELS
        for way in WAYS
    ],
)
def test_padding_costs_no_row_and_sums_to_nothing_whatever_it_holds(
    model: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied = counted_rows(monkeypatch)
    monkeypatch.setattr(experts, "exchange_pays", lambda *_: way == "exchange")
    rules = rules_of(*WAYS[way])
    layer, params, _ = layer_of(model, rules)
    call, whole = jax.jit(layer), rules.sharding()
    for rows in ([(0, [5] * 6), (2, [8])], [(0, [5] * 16)], [(0, [3])]):
        context, ids = batch(rows, random_tables(2), decode=False, bucket=(TOKENS, 4))
        real = sum(len(ids) for _, ids in rows)
        x = np.random.default_rng(real).standard_normal((len(ids), HIDDEN)).astype(np.float32)
        clean, dirty = np.array(x), np.array(x)
        clean[real:], dirty[real:] = 0, np.nan
        multiplied.clear()
        found, seen = call(params, *jax.device_put((dirty, context), whole))
        jax.effects_barrier()
        tp = WAYS[way][0]  # each has a slice of every expert that its neighbours have
        assert sum(multiplied) == 2 * tp * real * TOP_K, f"{multiplied=}"
        found = np.asarray(found)
        assert not found[real:].any(), "NaN is true"
        (chosen,) = map(np.asarray, jax.tree.leaves(seen))
        assert (chosen[:real] < EXPERTS).all() and (chosen[real:] == EXPERTS).all()
        everybody = dataclasses.replace(context, real=jnp.ones(TOKENS, bool))
        expected, _ = call(params, *jax.device_put((clean, everybody), whole))
        np.testing.assert_allclose(found[:real], expected[:real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "tp", "ep"),
    [("gpt_oss", 4, 1), pytest.param("mixtral", 1, 2, marks=pytest.mark.full)],
)
def test_padding_of_every_rank_costs_no_row(
    model: str, tp: int, ep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, whose padding lies at the end of each one's part."""
    multiplied, rules = counted_rows(monkeypatch), rules_of(tp, ep, 2)
    layer, params, specs = layer_of(model, rules)
    (context, _), counts = batch([(0, [5])], random_tables(1), decode=False), np.array([3, 0])
    real = np.arange(TOKENS) < counts[:, None]
    clean = np.random.default_rng(1).standard_normal((2, TOKENS, HIDDEN)).astype(np.float32)
    dirty = np.where(real[..., None], clean, np.float32(np.nan))

    def on_each(params: Any, x: jax.Array, context: CallContext) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], layer(params, x[0], context))

    assert rules.ranks is not None
    by_rank = PartitionSpec(AXIS)
    call = jax.jit(rules.ranks.each(on_each, (specs, by_rank, PartitionSpec()), by_rank))

    def run(x: np.ndarray, real: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        told = dataclasses.replace(context, real=jnp.asarray(real.reshape(-1)))
        placed = jax.device_put(x, NamedSharding(rules.mesh, by_rank))
        found, seen = call(params, placed, jax.device_put(told, rules.sharding()))
        jax.effects_barrier()
        (chosen,) = jax.tree.leaves(seen)
        return np.asarray(found), np.asarray(chosen)

    found, chosen = run(dirty, real)
    assert sum(multiplied) == 2 * tp * counts.sum() * TOP_K, f"{multiplied=}"
    assert not found[~real].any(), "NaN is true"
    assert (chosen[real] < EXPERTS).all() and (chosen[~real] == EXPERTS).all()
    expected, _ = run(clean, np.ones_like(real))
    np.testing.assert_allclose(found[real], expected[real], rtol=1e-4, atol=1e-4)
