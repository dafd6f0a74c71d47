"""The load of experts: what the device counts, when it is read, and what is told of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fake_model import FakeModel
from prometheus_client.parser import text_string_to_metric_families
from test_expert_parallel import SPARSE, one_token
from test_moe_padding import counted_rows
from tiny_models import hf_dict, oracle, rules_of

from jserve.config import Config
from jserve.engine.engine import Engine
from jserve.engine.merging import merged_facts, merged_values
from jserve.layers.expert_tally import add_chosen
from jserve.models.registry import build_model, parse_config
from jserve.runner.expert_load import INTERVAL, RECENT, CountedRunner, ExpertLoad
from jserve.runner.shapes import Shapes
from jserve.server.app import create_app
from jserve.tokenizer.sources import byte_source
from sharding import experts

CHUNK, NEW_TOKENS = 4, 10


def test_tokens_that_are_nobodys_have_chosen_no_expert() -> None:
    ids = np.random.default_rng(0).integers(0, 6, (2, 16, 3)).astype(np.int32)
    ids[:, 4:] = 6
    before = np.arange(12, dtype=np.int32).reshape(2, 6)
    found = add_chosen(jnp.asarray(before), [*jnp.asarray(ids)])
    expected = [np.bincount(of_layer[:4].reshape(-1), minlength=6) for of_layer in ids]
    np.testing.assert_array_equal(found, before + expected)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_devices_count_may_wrap_and_begin_anew() -> None:
    load, top = ExpertLoad((3,), 2), np.iinfo(np.int32).max
    for first in (top, -top, 5):  # 3 more than the largest is minus the largest
        load.take(np.array([[first, 7]], np.int32))
    assert load.tokens.tolist() == [[2**32 + 5, 7]]
    load.restart()
    load.take(np.array([[4, 0]], np.int32))
    assert load.tokens.tolist() == [[2**32 + 9, 7]]


def test_counts_of_ranks_add_up_and_their_balance_is_the_mean() -> None:
    load = ExpertLoad((3,), 2)
    for n in (1, 2):  # of two ranks in one program
        load.take(np.array([[[n, 0]], [[3 * n, 5]]], np.int32))
    assert load.tokens.tolist() == [[8, 5]]
    told = [{"expert_tokens": load.tokens.tolist()}, {"expert_tokens": [[1, 1]]}, {}]
    assert merged_facts(told)["expert_tokens"] == [[9, 6]]
    idle = ExpertLoad((3,), 2).series()
    merged = merged_values([load.series(), idle, {"num_running_reqs": 1.0}])
    assert merged["expert_tokens_total/0"] == 8
    assert merged["expert_balancedness/3"] == (6.5 / 8 + 1) / 2


def test_balancedness_is_that_of_the_last_minute_or_two() -> None:
    clock = Clock()
    load = ExpertLoad((1, 4), 4, clock)
    assert load.series()["expert_balancedness/4"] == 1.0, "nobody has more than others"
    load.take(np.array([[8, 0, 0, 0], [2, 2, 2, 2]], np.int32))
    shown = load.series()
    assert shown["expert_tokens_total/0"] == 10 and shown["expert_tokens_total/3"] == 2
    assert (shown["expert_balancedness/1"], shown["expert_balancedness/4"]) == (0.25, 1.0)
    for n in range(3):
        clock.now += RECENT
        load.take(np.array([[8 + n, n, n, n], [2, 2, 2, 2]], np.int32))
    assert load.series()["expert_balancedness/1"] == 1.0, "the skew is long ago"
    assert load.series()["expert_tokens_total/0"] == 12, "but counted"


class Counts:
    """A device's array of one layer and two experts, which knows how often it was copied."""

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.copies = tokens, 0

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self.copies += 1
        return np.array([self.tokens], np.int32)


class Stub:
    """A runner whose step n leaves the counts [n, 0]; a flight is its own."""

    tokens, recompiles, compiled = {"bucket_real_tokens_total/decode": 3}, 0, (5, 9)

    def __init__(self) -> None:
        self.steps = self.resets = 0
        self.hidden, self.tally = self, ()

    def launch(self, plan: Any) -> Stub:
        flight = Stub()
        self.steps += 1
        flight.tally = (Counts(self.steps, 0),)
        return flight

    def finish(self, flight: Stub, mask: Any = None) -> None:
        assert mask == "mask"

    def read(self) -> str:
        return "outcome"

    def reset(self) -> None:
        self.steps, self.resets = 0, self.resets + 1


def test_counts_are_copied_now_and_then_and_behind_the_last_step() -> None:
    clock, told, inner = Clock(), {}, Stub()
    load = ExpertLoad((1,), 2, clock)
    runner = CountedRunner(inner, load, told)  # type: ignore[arg-type]
    assert told["expert_tokens"] == [[0, 0]]
    flights, queue = [], []
    for _ in range(100):  # one launch in flight, a hundredth of a second each
        flight = runner.launch(None)  # type: ignore[arg-type]
        queue.append(flight)
        if len(queue) > 1:
            assert queue.pop(0).read() == "outcome"
        runner.finish(flight, "mask")  # type: ignore[arg-type]
        flights.append(flight)
        clock.now += 0.01
    copies = sum(flight.tally.copies for flight in flights)
    assert 3 <= copies <= 1 / INTERVAL + 1, f"{copies=} in a second"
    assert told["expert_tokens"][0][0] < 100
    queue.pop().read()
    assert told["expert_tokens"] == [[100, 0]] and flights[-1].tally.copies == 1
    runner.reset()
    runner.launch(None).read()  # type: ignore[arg-type]
    assert told["expert_tokens"] == [[101, 0]] and inner.resets == 1
    assert runner.tokens["bucket_real_tokens_total/decode"] == 3
    assert runner.tokens["expert_tokens_total/0"] == 101 and runner.compiled == (5, 9)


def test_models_without_experts_count_nothing() -> None:
    config = parse_config({**SPARSE, "architectures": ["Qwen3ForCausalLM"]})
    options = {"dtype": "float32", "attention_backend": None, "page_size": 4}
    sizes = {"num_slots": 2, "num_pages": 8, "page_size": 4, "context_length": 16}
    for model in (build_model(config, rules_of(), **options), FakeModel()):
        shapes = Shapes(model, rules_of(), kv_dtype="float32", **sizes)
        assert shapes.kv.tally == ()
    no_layers = parse_config({**SPARSE, "mlp_only_layers": [0, 1]})
    assert build_model(no_layers, rules_of(), **options).tallies == ()


LATENT = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
GROUPS = {"n_group": 4, "topk_group": 2}
FAMILIES = {
    "one sparse layer": ("Qwen3MoeConfig", {**SPARSE, "mlp_only_layers": [0]}),
    "qwen3_moe": ("Qwen3MoeConfig", SPARSE),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **{
                key: value
                for key, value in SPARSE.items()
                if key not in ("head_dim", "num_experts")
            },
            **{**LATENT, **GROUPS, "v_head_dim": 6, "num_key_value_heads": 8, "head_dim": 4},
            **{"n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 1},
        },
    ),
}


def recount(theirs: torch.nn.Module, texts: list[list[int]]) -> np.ndarray:
    """[L, E]: whom the router's formula chooses, token by token, from the logits that transformers
    has for whole texts."""
    config = parse_config(hf_dict(theirs)).moe
    assert config is not None
    counts = np.zeros((len(config.layers), config.num_experts), int)
    for row, layer in enumerate(config.layers):
        gate = theirs.model.layers[layer].mlp.gate
        bias = np.zeros(config.num_experts)
        if config.score_bias:
            bias = gate.e_score_correction_bias.detach().numpy().astype(float)
        seen: list[np.ndarray] = []
        hook = gate.register_forward_pre_hook(
            lambda gate, given, seen=seen: seen.append(
                (given[0].reshape(-1, gate.weight.shape[1]) @ gate.weight.T).numpy()
            )
        )
        with torch.no_grad():
            for text in texts:
                theirs(torch.tensor([text]))
        hook.remove()
        for logits in np.concatenate(seen).astype(float):
            counts[row, list(one_token(logits, bias, config))] += 1
    return counts


def shown(text: str, name: str, label: str) -> dict[int, float]:
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    return {int(sample.labels[label]): sample.value for sample in families[f"jserve:{name}"]}


def scrape(engine: Engine, config: Config, path: str = "/metrics") -> str:
    async def get() -> str:
        transport = httpx.ASGITransport(app=create_app(engine, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://jserve") as client:
            return (await client.get(path)).text

    return asyncio.run(get())


#: Options that say where experts live, and whether tokens are exchanged.
RANKS = {"dp_size": 2, "enable_dp_attention": True, "max_running_requests": 2}
CASES = [
    ("one sparse layer", {"ep_size": 2}, False),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ("qwen3_moe", {}, False),
            ("qwen3_moe", {"ep_size": 2}, False),
            ("qwen3_moe", {"tp_size": 2, "ep_size": 2}, True),
            ("qwen3_moe", {"tp_size": 4, **RANKS}, False),
            ("deepseek_v3", {}, False),
            ("deepseek_v3", {"tp_size": 2, "ep_size": 2}, False),
        )
    ),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("family", "flags", "exchanged"), CASES)
def test_an_engine_tells_how_many_tokens_each_expert_got(
    tmp_path: Path,
    family: str,
    flags: dict[str, Any],
    exchanged: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of prompts in chunks, beside padding, and of a second turn only what was computed. No other
    rows are multiplied: gate and up, and down, of each slice of an expert."""
    multiplied = counted_rows(monkeypatch)
    if exchanged:
        monkeypatch.setattr(experts, "exchange_pays", lambda shape, *_: shape[0] % 2 == 0)
    config_class, overrides = FAMILIES[family]
    theirs = oracle(config_class, **overrides)
    theirs.save_pretrained(tmp_path)
    byte_source(SPARSE["vocab_size"], (1,)).save(tmp_path)
    common = {"page_size": 4, "chunked_prefill_size": CHUNK, "max_running_requests": 1}
    common |= {"recompile_guard": "error", "enable_metrics": True, "log_level": "error"}
    common |= {"compilation_cache_dir": "off", "model_path": str(tmp_path)}
    config = Config.from_flags(**{**common, **flags})
    with Engine.from_config(config, inline=True) as engine:
        params = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        prompts = [[(7 * i + 3 * j) % 90 + 2 for j in range(n)] for i, n in enumerate((37, 5, 22))]
        replies = engine.generate(input_ids=prompts, sampling_params=params)
        texts = [p + r["output_ids"][:-1] for p, r in zip(prompts, replies, strict=True)]
        expected = recount(theirs, texts)
        info = engine.get_server_info()
        assert info["expert_tokens"] == expected.tolist()
        assert info["bucket_padded_tokens_total/mixed"] > info["bucket_real_tokens_total/mixed"]
        assert info["num_prefill_chunks_total"] >= 4
        again = engine.generate(input_ids=texts[0], sampling_params=params)
        cached = again["meta_info"]["cached_tokens"]
        assert cached >= CHUNK
        whole = texts[0] + again["output_ids"][:-1]
        expected += recount(theirs, [whole]) - recount(theirs, [whole[:cached]])
        info = engine.get_server_info()
        assert info["expert_tokens"] == expected.tolist() and info["recompiles_total"] == 0
        jax.effects_barrier()
        assert sum(multiplied) == 2 * flags.get("tp_size", 1) * expected.sum()
        told = json.loads(scrape(engine, config, "/server_info"))
        assert told["expert_tokens"] == expected.tolist()
        text = scrape(engine, config)
        assert shown(text, "expert_tokens", "expert") == dict(enumerate(expected.sum(axis=0)))
        balance = expected.mean(axis=1) / expected.max(axis=1)
        layers = parse_config(hf_dict(theirs)).moe.layers
        found = shown(text, "expert_balancedness", "layer")
        assert found == pytest.approx(dict(zip(layers, balance, strict=True)))
        assert 0.1 < min(balance) < 1.0, "experts differ"
