"""Start-up with the real parts: a tiny random model, from its shape file to its answers."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jserve.engine.engine import Engine
from jserve.errors import ConfigError
from jserve.tokenizer.sources import byte_source
from jserve.tokenizer.vocabulary import vocabulary_of, with_ends

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
FLAGS = {
    "load_format": "dummy",
    "max_running_requests": 2,
    "chunked_prefill_size": 16,
    "page_size": 4,
    "recompile_guard": "error",
    "compilation_cache_dir": "off",
    "random_seed": 0,
}
EVENTS = {"publisher": "zmq"}


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "shape.json"
    path.write_text(json.dumps(SHAPE))
    return str(path)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Of a folder as fine-tunes are published: config.json has the base model's end, the tokenizer
    the chat's.
    """
    folder = tmp_path_factory.mktemp("published")
    byte_source(SHAPE["vocab_size"]).save(folder)
    named = json.loads((folder / "tokenizer_config.json").read_text())
    files = {
        "config.json": {**SHAPE, "eos_token_id": 2},
        "generation_config.json": {"eos_token_id": [2, 258, 999], "top_k": 0, "top_p": 0.9},
        "tokenizer_config.json": {**named, "eos_token": "<257>"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    cache: dict[str, Any] = {
        "radix_eviction_policy": "slru",
        "radix_eviction_policy_config": '{"protected_threshold": 3}',
        "kv_events_config": json.dumps({**EVENTS, "endpoint": f"ipc://{folder}.events"}),
    }
    with Engine(str(folder), inline=True, **FLAGS, **cache) as engine:
        yield engine


def test_a_built_engine_answers_caches_and_compiles_nothing_while_serving(engine: Engine) -> None:
    info = engine.get_server_info()
    assert (info["eviction"], info["protected_threshold"]) == ("slru", 3)
    assert EVENTS.items() <= info["kv_events"].items()
    assert info["context_length"] == 64 and info["num_slots"] == 2
    assert info["max_total_num_tokens"] >= 2 * 64 and info["weight_bytes"] > 0
    assert engine.model_config.num_layers == 2
    assert engine.sampling_defaults == {"top_k": -1, "top_p": 0.9}
    prompts = [list(range(5 + i, 25 + i)) for i in range(5)]
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    alone = [engine.generate(input_ids=ids, sampling_params=params) for ids in prompts]
    assert engine.flush_cache()
    batch = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    assert [b["output_ids"] for b in batch] == [b["output_ids"] for b in alone]
    again = engine.generate(input_ids=prompts[0], sampling_params=params)
    assert again["output_ids"] == alone[0]["output_ids"]
    assert again["meta_info"]["cached_tokens"] == 16
    assert [b["meta_info"]["output_token_logprobs_length"] for b in batch] == [8] * 5
    assert engine.get_server_info()["recompiles_total"] == 0


def test_the_end_that_only_the_tokenizer_names_ends_a_generation(engine: Engine) -> None:
    assert engine.model_config.eos_token_ids == (2, 257, 258)  # 999 is no token
    vocabulary = vocabulary_of(engine.tokenizer, engine.model_config)
    assert vocabulary.eos_ids == (2, 257, 258) and vocabulary.tokens[257] == b""
    for wanted in (2, 257, 258):
        params = {"temperature": 0, "max_new_tokens": 9, "logit_bias": {wanted: 1000}}
        answer = engine.generate("hi", params)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": wanted}
        assert answer["output_ids"] == [wanted] and answer["text"] == ""
    bias = {257: 1000, 65: 500}
    answer = engine.generate("hi", {**params, "logit_bias": bias, "min_new_tokens": 3})
    assert answer["output_ids"] == [65, 65, 65, 257]


def test_more_ends_than_a_slot_has_room_for_are_refused(engine: Engine) -> None:
    crowded = dataclasses.replace(engine.model_config, eos_token_ids=tuple(range(7)))
    with pytest.raises(ConfigError, match="9 tokens that end a generation.*at most 8"):
        with_ends(crowded, engine.tokenizer)


def test_what_cannot_be_built_is_one_config_error(shape: str) -> None:
    with pytest.raises(ConfigError, match="--tp-size 64"):
        Engine(shape, inline=True, tp_size=64, **FLAGS)
    with pytest.raises(ConfigError, match="--context-length 4096"):
        Engine(shape, inline=True, context_length=4096, **FLAGS)
    broken = Path(shape).with_name("broken.json")
    broken.write_text(json.dumps({**SHAPE, "architectures": ["NoSuchModel"]}))
    with pytest.raises(ConfigError, match="NoSuchModel"):
        Engine(str(broken), inline=True, **FLAGS)


def test_windowed_layers_of_a_built_engine_have_a_small_pool_of_their_own(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    gemma = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    windows = {"layer_types": kinds, "num_hidden_layers": 3, "sliding_window": 8}
    path = tmp_path / "gemma.json"
    path.write_text(json.dumps({**SHAPE, **gemma, **windows, "max_position_embeddings": 256}))
    with Engine(
        str(path), inline=True, max_total_tokens=800, swa_full_tokens_ratio=0.25, **FLAGS
    ) as engine:
        info = engine.get_server_info()
        assert info["hybrid_swa"] and info["max_total_num_tokens"] == 800
        whole = info["max_total_num_tokens_swa"]
        assert whole == 200
        params = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
        prompts = [list(range(5 + i, 105 + i)) for i in range(3)]
        alone = [engine.generate(input_ids=ids, sampling_params=params) for ids in prompts]
        batch = engine.generate(input_ids=prompts, sampling_params=params)
        assert [b["output_ids"] for b in batch] == [b["output_ids"] for b in alone]
        turn = [*prompts[0], *alone[0]["output_ids"], 7]
        again = engine.generate(input_ids=turn, sampling_params={"max_new_tokens": 4})
        assert again["meta_info"]["cached_tokens"] >= 152
        info = engine.get_server_info()
        assert info["swa_available_tokens"] + info["swa_evictable_tokens"] == whole
        assert info["recompiles_total"] == 0


def test_a_size_of_a_window_pool_that_is_not_there_is_refused(shape: str) -> None:
    for flags in ({}, {"disable_hybrid_swa_memory": True}):
        with pytest.raises(ConfigError, match="--swa-full-tokens-ratio"):
            Engine(shape, inline=True, swa_full_tokens_ratio=0.5, **flags, **FLAGS)


def test_what_an_engine_had_on_its_devices_is_free_as_soon_as_it_is_shut_down(shape: str) -> None:
    def num_bytes() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    gc.collect()
    gc.disable()  # it may take its time
    try:
        before = num_bytes()
        engine = Engine(shape, inline=True, **FLAGS)
        params = {"max_new_tokens": 50, "ignore_eos": True}
        stream = engine.generate(input_ids=[5, 6, 7], sampling_params=params, stream=True)
        next(stream)  # steps are in flight
        assert num_bytes() - before > engine.server_info["weight_bytes"] > 0
        engine.shutdown()
        assert num_bytes() == before
    finally:
        gc.enable()
