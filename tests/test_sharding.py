"""Tensor parallelism on fake CPU devices: the same logits, and no collective that a layer does not
need.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import numpy as np
import pytest
from tiny_models import (
    Served,
    assert_close,
    hf_dict,
    oracle,
    params_of,
    random_tables,
    rules_of,
)

from jserve.errors import ConfigError
from jserve.models.registry import build_model, parse_config
from jserve.models.split import check_split
from jserve.types import MoEConfig
from jserve.weights.orbax import take_apart
from sharding.mesh import make_mesh

QWEN = {"num_attention_heads": 8, "vocab_size": 97}
SMOLLM = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 72,
    "tie_word_embeddings": True,
}
SEVEN = {"num_attention_heads": 7, "hidden_size": 56, "vocab_size": 97}
CASES = {
    "qwen3 8/4 tp 2": (2, "Qwen3Config", {**QWEN, "num_key_value_heads": 4}),
    "qwen3 8/4 tp 4": (4, "Qwen3Config", {**QWEN, "num_key_value_heads": 4}),
    "qwen3 8/4 tp 8 replicates kv heads": (8, "Qwen3Config", {**QWEN, "num_key_value_heads": 4}),
    "qwen3 8/8 tp 8": (8, "Qwen3Config", {**QWEN, "num_key_value_heads": 8}),
    "qwen2 8/2 tp 4 replicates biases": (4, "Qwen2Config", {**QWEN, "num_key_value_heads": 2}),
    "llama 9/3 tp 3": (3, "LlamaConfig", SMOLLM),
    "llama 9/3 tp 2 pads heads and biases": (2, "LlamaConfig", {**SMOLLM, "attention_bias": True}),
    "qwen3 9/3 tp 8 pads and replicates": (8, "Qwen3Config", {**SMOLLM, "vocab_size": 97}),
    "qwen2 7/1 tp 4 pads groups": (4, "Qwen2Config", {**SEVEN, "num_key_value_heads": 1}),
    "gemma3 4/1 tp 2": (2, "Gemma3TextConfig", {"num_key_value_heads": 1, "sliding_window": 6}),
}


#: Of CASES, those that others come near to.
SELDOM = (
    *("qwen3 8/4 tp 4", "qwen3 8/8 tp 8", "llama 9/3 tp 3", "qwen2 8/2 tp 4 replicates biases"),
    *("qwen3 9/3 tp 8 pads and replicates", "gemma3 4/1 tp 2"),
)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.full if c in SELDOM else ()) for c in CASES]
)
def test_sharded_logits_equal_those_of_one_device_with_two_all_reduces_a_layer(case):
    tp, config_class, overrides = CASES[case]
    theirs = oracle(config_class, **overrides)
    rng = np.random.default_rng(4)
    first, second = (rng.integers(2, 90, n).tolist() for n in (12, 7))
    tables = random_tables(2)
    steps = [
        ([(0, first[:10]), (0, second[:5])], False),
        ([(10, first[10:11]), (5, second[5:6])], True),
    ]
    alone, sharded = Served.of(theirs), Served.of(theirs, tp)
    for rows, decode in steps:
        assert_close(sharded.step(rows, tables, decode), alone.step(rows, tables, decode))

    compiled = sharded.program.lower(*sharded.arguments(*steps[1][:1], tables, True)).compile()
    num_layers = sharded.model.config.num_layers
    # Beside the layers' two: the embedding's rows are summed. The logits stay where they are.
    assert collectives(compiled.as_text()) == {"all-reduce": 2 * num_layers + 1}


def test_parameters_and_pool_are_split_and_only_kv_heads_replicated():
    theirs = oracle("Qwen3Config", **QWEN, num_key_value_heads=4)
    served = Served.of(theirs, 8)
    assert served.model.cache.num_kv_heads == 8
    assert {shard.data.shape[2] for shard in served.kv.k.addressable_shards} == {1}
    split = {
        key: value.addressable_shards[0].data.size / value.size
        for key, value in served.params.items()
        if value.ndim == 2
    }
    assert set(split.values()) == {1 / 8}, f"{split=}"
    assert served.model.specs[0].shape[0] == 8 * 128, "97 rows padded to a block a device"


@pytest.mark.parametrize("case", [case for case in CASES if "pads" in case])
def test_padded_parameters_come_apart_into_their_tensors(case):
    tp, config_class, overrides = CASES[case]
    theirs, rules = oracle(config_class, **overrides), rules_of(tp)
    config = parse_config(hf_dict(theirs))
    model = build_model(config, rules, dtype="float32", attention_backend=None, page_size=4)
    state, found = theirs.state_dict(), {}
    params = params_of(model, state, rules)
    for spec in model.specs:
        found |= take_apart(spec, np.asarray(params[spec.path]))
    assert set(found) | {"lm_head.weight"} == set(state)
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, state[name].numpy(), err_msg=name)


def test_the_pool_is_updated_in_place_when_donated():
    served = Served.of(oracle("Qwen3Config", **QWEN, num_key_value_heads=4), 2, num_pages=1024)
    arguments = served.arguments([(0, [4]), (0, [5])], random_tables(2), True)
    memory = served.program.lower(*arguments).compile().memory_analysis()
    pool = sum(part.nbytes for part in jax.tree.leaves(served.kv)) // 2
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool // 8, f"{memory.temp_size_in_bytes=} {pool=}"


REFUSED = {
    "more devices than heads": (8, {"num_attention_heads": 4}, "4 query heads", "1, 2, 3, 4"),
    "a width": (4, {"intermediate_size": 50, **QWEN}, "intermediate size 50", "1, 2, 5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_size_that_cannot_work_is_refused_with_those_that_would(case):
    tp, overrides, reason, sizes = REFUSED[case]
    config = parse_config(hf_dict(oracle("Qwen3Config", **overrides)))
    with pytest.raises(ConfigError, match=rf"^--tp-size {tp} .*{reason}.*--tp-size {sizes}$"):
        build_model(config, rules_of(tp), dtype="float32", attention_backend=None, page_size=4)
    for size in map(int, sizes.split(", ")):
        build_model(config, rules_of(size), dtype="float32", attention_backend=None, page_size=4)


def test_sizes_of_both_kinds_of_parallelism_are_offered_where_both_are_asked_for():
    moe = MoEConfig(num_experts=8, top_k=2, width=24, shared_width=24, sparse_layers=(False, True))
    config = parse_config(hf_dict(oracle("Qwen3Config", **QWEN)))
    config = dataclasses.replace(config, num_heads=16, moe=moe)
    check_split(config, 4, 2)
    wanted = r"--tp-size 4 with --ep-size 4 .* size 24.*: --tp-size 1, 2, 3 with this --ep-size;"
    with pytest.raises(ConfigError, match=rf"^{wanted} --ep-size 1, 2 with this --tp-size$"):
        check_split(config, 4, 4)


#: (tp, ep, dp), what is changed, what is offered. Of a model with 8 heads and an MLP of 48.
TOGETHER = {
    "no experts": ((2, 2, 1), {}, "--ep-size 1 with this --tp-size; --tp-size 4"),
    "nothing else with this one": ((7, 1, 7), {}, "--tp-size 6 with --dp-size 2; .*-dp-size 6"),
    "other ranks": ((8, 1, 4), {"num_heads": 1}, ".*; --dp-size 8 with this --tp-size"),
    "no ranks at all": ((2, 1, 2), {"intermediate_size": 49}, "nothing with .*attention"),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_sizes_are_offered_together_where_none_alone_would_use_the_devices(case):
    sizes, change, offered = TOGETHER[case]
    config = parse_config(hf_dict(oracle("Qwen3Config", **QWEN)))
    with pytest.raises(ConfigError, match=rf"what does: {offered}$"):
        check_split(dataclasses.replace(config, **change), *sizes)


@pytest.mark.parametrize("sparse", [False, True])
def test_every_size_that_is_offered_works(sparse):
    moe = MoEConfig(num_experts=6, top_k=2, width=20, shared_width=30, sparse_layers=(True, True))
    config = parse_config(hf_dict(oracle("Qwen3Config", **QWEN)))
    config, flags = dataclasses.replace(config, moe=moe if sparse else None), ("tp", "ep", "dp")
    refused = 0
    for sizes in itertools.product(range(1, 9), repeat=3):
        try:
            check_split(config, *sizes)
        except ConfigError as error:
            refused += 1
            _, _, offers = str(error).partition("what does: ")
            for offer in offers.split("; ") if "nothing" not in offers else ():
                found = re.findall(r"--(..)-size ([\d, ]*\d)", offer)
                named = {flag: [int(n) for n in listed.split(", ")] for flag, listed in found}
                asked = dict(zip(flags, sizes, strict=True))
                asked |= {} if "this" in offer else dict.fromkeys(("ep", "dp"), 1)
                lists = [named.get(flag, [asked[flag]]) for flag in flags]
                for one in itertools.product(*lists):
                    check_split(config, *one)
    assert refused > 200


def test_query_heads_that_are_no_multiple_of_kv_heads_are_refused():
    config = parse_config(hf_dict(oracle("Qwen3Config", **QWEN)))
    config = dataclasses.replace(config, num_kv_heads=3)
    with pytest.raises(ConfigError, match="8 query heads are no multiple of 3 KV heads"):
        build_model(config, rules_of(), dtype="float32", attention_backend=None, page_size=4)


def test_a_mesh_that_needs_more_devices_than_there_are_names_both_numbers():
    with pytest.raises(ValueError, match=r"needs 16 devices, 8 found"):
        make_mesh(jax.devices(), data=2, tensor=8)


def test_an_unknown_logical_axis_is_refused():
    with pytest.raises(KeyError, match="unknown logical axis 'head'"):
        rules_of().spec(("head",))


def collectives(text: str) -> dict[str, int]:
    """How often each collective is started in a compiled program."""
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}
