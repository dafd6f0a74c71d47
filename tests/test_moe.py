"""Mixtures of experts: logits equal transformers' on tiny random models whose experts differ, on
one device and with experts dealt to several.
"""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import Served, assert_close, checkpoint_state, oracle, oracle_logits, random_tables

from jserve.weights.orbax import take_apart
from sharding import experts

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
QWEN = {**HEADS, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
FAMILIES = {
    "mixtral": ("MixtralConfig", {**HEADS, "num_local_experts": 4, "sliding_window": 6}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**QWEN, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**QWEN, "norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 3},
    ),
}


def two_prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(2, 96, n).tolist() for n in (16, 11)]


def logits_of(served: Served) -> np.ndarray:
    """Of two prompts in one ragged step."""
    return served.step([(0, ids) for ids in two_prompts()], random_tables(2), bucket=(32, 4))


def expected(theirs) -> np.ndarray:
    return np.concatenate([oracle_logits(theirs, ids) for ids in two_prompts()])


#: qwen2_moe's are those of tokens that are exchanged, below.
@pytest.mark.parametrize(
    "family", ["mixtral", pytest.param("qwen2_moe", marks=pytest.mark.full), "qwen3_moe"]
)
def test_logits_equal_transformers_for_prompts_and_in_decode(family):
    config_class, overrides = FAMILIES[family]
    theirs = oracle(config_class, **overrides)
    served = Served.of(theirs)
    assert_close(logits_of(served), expected(theirs))
    rows = [(len(ids), [5]) for ids in two_prompts()]
    decoded = served.step(rows, random_tables(2), decode=True, bucket=(4, 4))
    last = [oracle_logits(theirs, [*ids, 5])[-1] for ids in two_prompts()]
    assert_close(decoded, np.stack(last))


MESHES = {
    "tp 2": (2, 1),
    "tp 4": (4, 1),
    "tp 8": (8, 1),
    "ep 2": (1, 2),
    "ep 4": (1, 4),
    "tp 2 × ep 2": (2, 2),
    "tp 2 × ep 4": (2, 4),
}
SHORT = {("qwen3_moe", "tp 2 × ep 2")}
CASES = [
    pytest.param(family, mesh, marks=() if (family, mesh) in SHORT else pytest.mark.full)
    for family in FAMILIES
    for mesh in MESHES
]


@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_experts_dealt_to_devices_give_the_same_logits(family, mesh):
    config_class, overrides = FAMILIES[family]
    theirs = oracle(config_class, **overrides)
    tp, ep = MESHES[mesh]
    assert_close(logits_of(Served.of(theirs, tp, ep=ep)), expected(theirs))


@pytest.mark.parametrize(
    "mesh", ["ep 2", *(pytest.param(m, marks=pytest.mark.full) for m in ("ep 4", "tp 2 × ep 2"))]
)
def test_tokens_that_are_exchanged_give_the_same_logits(mesh, monkeypatch):
    config_class, overrides = FAMILIES["qwen2_moe"]
    theirs = oracle(config_class, **overrides)
    monkeypatch.setattr(experts, "exchange_pays", lambda *_: True)
    tp, ep = MESHES[mesh]
    served = Served.of(theirs, tp, ep=ep)
    assert_close(logits_of(served), expected(theirs))
    text = served.program.lower(*served.arguments([(0, [4] * 4)], random_tables(1))).as_text()
    assert "all_gather" in text, "a share's rows were not sent"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_checkpoint_tensor_has_one_place_and_is_found_there_again(family):
    config_class, overrides = FAMILIES[family]
    theirs = oracle(config_class, **overrides)
    served, state = Served.of(theirs, 2, ep=2), checkpoint_state(theirs)
    found = {}
    for spec in served.model.specs:
        if ".mlp." in spec.path:
            found |= take_apart(spec, np.asarray(served.params[spec.path]))
    assert found.keys() == {name for name in state if "mlp" in name or "moe" in name}
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, state[name].numpy())
