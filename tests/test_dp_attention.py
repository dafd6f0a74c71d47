"""Attention dealt out to data-parallel ranks of one program (--enable-dp-attention): tokens are
those of one device, whatever load the ranks have; and what is told, refused and lost.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec
from tiny_models import hf_dict, oracle, rules_of

from jserve.config import Config, DeviceFacts, resolve
from jserve.engine.engine import Engine
from jserve.errors import ConfigError, RequestError
from jserve.models.registry import parse_config
from jserve.plan import Kind
from jserve.runner.stacked import StackedInFlight, StackedRunner
from jserve.tokenizer.sources import byte_source

VOCAB, REGEX = 400, "[b-y]{3}-[0-9]{3}"
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3Config", HEADS),
    "biases everywhere": ("LlamaConfig", {**HEADS, "mlp_bias": True, "attention_bias": True}),
    "windows": (
        "Gemma3TextConfig",
        {
            **{"num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 3},
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "experts, one shared": (
        "Qwen2MoeConfig",
        {**HEADS, **SPARSE, "shared_expert_intermediate_size": 16},
    ),
    "experts with biases": (
        "GptOssConfig",
        {
            **{**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "latents": (
        "DeepseekV3Config",
        {
            **{"num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 16},
            **{"q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
            **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
            **{"head_dim": 4, "routed_scaling_factor": 1.5},
        },
    ),
}
ENGINE = {"page_size": 4, "chunked_prefill_size": 4, "max_total_tokens": 400}
ENGINE |= {"recompile_guard": "error", "compilation_cache_dir": "off", "random_seed": 0}
GREEDY = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "penalties": {
        **GREEDY,
        **{"frequency_penalty": 0.9, "repetition_penalty": 1.2, "logit_bias": {"299": 4, "7": -9}},
    },
    "a seed": {**GREEDY, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "sampling_seed": 7},
    "a grammar": {"temperature": 0, "max_new_tokens": 10, "regex": REGEX},
}
PROMPTS = [np.random.default_rng(n).integers(2, VOCAB, n).tolist() for n in (29, 6, 13, 21, 3)]


def start(path: Path, tp: int = 1, dp: int = 1, **flags: Any) -> Engine:
    """Two slots a rank."""
    flags = {**ENGINE, "max_running_requests": 2 * dp, **flags}
    return Engine(str(path), inline=True, tp_size=tp, dp_size=dp, **flags)


class Saved:
    """Each model's checkpoint, and what one device answers."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made, self._answers = folder, {}, {}

    def oracle(self, model: str) -> tuple[Any, Path]:
        if model not in self._made:
            config_class, overrides = MODELS[model]
            settings = {"vocab_size": VOCAB, "max_position_embeddings": 96, **overrides}
            path = self._folder / str(len(self._made))
            theirs = oracle(config_class, **settings)
            theirs.save_pretrained(path)
            byte_source(VOCAB, (1,)).save(path)
            self._made[model] = theirs, path
        return self._made[model]

    def alone(self, model: str) -> dict[str, Any]:
        if model not in self._answers:
            self._answers[model] = answers(start(self.oracle(model)[1]))
        return self._answers[model]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("models"))


def answers(engine: Engine) -> dict[str, Any]:
    """Token ids and log-probabilities of requests of every kind; what each must show is checked."""
    found: dict[str, Any] = {}
    with engine:
        batch = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        found["batch"] = [reply["output_ids"] for reply in batch]
        longer = [*PROMPTS[0], *found["batch"][0]]
        warm = engine.generate(input_ids=longer, sampling_params=GREEDY)
        assert warm["meta_info"]["cached_tokens"] >= 32, "it reads the first turn's pages"
        found["warm"] = warm["output_ids"]
        # all kinds at once: what one rank's rows need, the others' heads do too
        kinds = engine.generate(input_ids=[PROMPTS[1]] * 3, sampling_params=[*KINDS.values()])
        found |= {kind: reply["output_ids"] for kind, reply in zip(KINDS, kinds, strict=True)}
        assert re.fullmatch(REGEX, kinds[2]["text"]), kinds[2]["text"]
        wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5}
        told = engine.generate(input_ids=PROMPTS[2:4], sampling_params=GREEDY, **wanted)
        numbers = []
        for info in (reply["meta_info"] for reply in told):
            numbers += [*info["input_token_logprobs"][1:], *info["output_token_logprobs"]]
            numbers += [entry for top in info["output_top_logprobs"] for entry in top]
        found["top ids"] = [entry[1] for entry in numbers]
        found["logprobs"] = [entry[0] for entry in numbers]
        info = engine.get_server_info()
        assert info["recompiles_total"] == 0
        real = sum(info[f"bucket_real_tokens_total/{kind}"] for kind in ("decode", "mixed"))
        for layer in info.get("expert_tokens", []):
            assert sum(layer) == 2 * real, "two experts a token"
    return found


def greedy(theirs: Any, prompt: list[int]) -> list[int]:
    with torch.no_grad():
        how = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
        out = theirs.generate(torch.tensor([prompt]), **how)
    return out[0, len(prompt) :].tolist()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kind | None, ...]]:
    """Of each launch, what each rank had to do."""
    seen: list[tuple[Kind | None, ...]] = []
    launch = StackedRunner.launch

    def noted(self: StackedRunner, plans: Any) -> Any:
        seen.append(tuple(None if plan is None else plan.kind for plan in plans))
        return launch(self, plans)

    monkeypatch.setattr(StackedRunner, "launch", noted)
    return seen


def test_ranks_with_unequal_loads_answer_as_the_model_does(
    saved: Saved, steps: list[tuple[Kind | None, ...]]
) -> None:
    theirs, path = saved.oracle("dense")
    with start(path, 2, 2, enable_dp_attention=True) as engine:
        replies = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            assert reply["output_ids"] == greedy(theirs, prompt)
        turn = [*PROMPTS[0], *replies[0]["output_ids"], 5]
        second = engine.generate(input_ids=turn, sampling_params=GREEDY)
        assert second["output_ids"] == greedy(theirs, turn)
        assert second["meta_info"]["cached_tokens"] >= 36
        assert second["meta_info"]["dp_rank"] == replies[0]["meta_info"]["dp_rank"]
        info = engine.get_server_info()
        assert info["recompiles_total"] == 0 and info["num_requests_total"] == 6
        by_rank = {one["dp_rank"]: one["num_requests_total"] for one in info["internal_states"]}
        assert sorted(by_rank) == [0, 1] and sorted(by_rank.values()) in ([2, 4], [3, 3])
    assert {(Kind.DECODE, None), (Kind.MIXED, None)} & set(steps), "one rank had nothing to do"
    assert {(Kind.DECODE, Kind.MIXED), (Kind.MIXED, Kind.DECODE)} & set(steps)


CASES = [
    *(("dense", tp, dp, 1) for tp, dp in ((2, 2), (4, 2), (8, 4), (8, 8))),
    *((model, 4, dp, 1) for model in MODELS if model != "dense" for dp in (2, 4)),
    *((model, 2, 2, 2) for model in ("experts, one shared", "latents")),
    *((model, 1, dp, 4) for model in ("experts with biases", "latents") for dp in (2, 4)),
]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "tp", "dp", "ep"), CASES)
def test_ranks_answer_as_one_device_does(
    saved: Saved, model: str, tp: int, dp: int, ep: int
) -> None:
    expected = saved.alone(model)
    path = saved.oracle(model)[1]
    found = answers(start(path, tp, dp, ep_size=ep, enable_dp_attention=True))
    np.testing.assert_allclose(found.pop("logprobs"), expected["logprobs"], atol=1e-4)
    assert found == {key: value for key, value in expected.items() if key != "logprobs"}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_what_is_asked_of_an_engine_is_asked_of_every_rank(saved: Saved) -> None:
    theirs, path = saved.oracle("dense")
    with start(path, 2, 2, enable_dp_attention=True, enable_metrics=True) as engine:

        def by_rank(name: str) -> list[float]:
            return [state[name] for state in engine.get_server_info()["internal_states"]]

        for rank in (1, 1, 0):
            asked = {"input_ids": PROMPTS[2], "sampling_params": GREEDY, "routed_dp_rank": rank}
            assert engine.generate(**asked)["output_ids"] == greedy(theirs, PROMPTS[2])
        assert by_rank("num_requests_total") == [1, 2]
        with pytest.raises(RequestError, match=r"routed_dp_rank must be in \[0, 1\], got 2"):
            engine.generate(input_ids=[5], sampling_params=GREEDY, routed_dp_rank=2)
        told = engine.metrics.render().decode()
        assert 'dp_rank="1"' in told and "num_dp_ranks" in told
        engine.pause_generation("retract")
        assert all(by_rank("paused"))
        engine.continue_generation()
        assert not any(by_rank("paused"))
        assert engine.flush_cache(5.0)
        again = engine.generate(input_ids=PROMPTS[2], sampling_params=GREEDY)
        assert again["meta_info"]["cached_tokens"] == 0


def aborted_and_finished(engine: Engine, steps: list[tuple[Kind | None, ...]]) -> list[Any]:
    """Of two long answers on each rank the first is aborted."""

    async def run() -> list[Any]:
        long = {**GREEDY, "max_new_tokens": 60}
        tasks = []
        for rank, rid in ((0, "a0"), (0, "b0"), (1, "a1"), (1, "b1")):
            asked = {"input_ids": PROMPTS[1], "rid": rid, "routed_dp_rank": rank}
            answer = engine.async_generate(sampling_params=long, **asked)
            tasks.append(asyncio.ensure_future(answer))
        while steps.count((Kind.DECODE, Kind.DECODE)) < 3:  # each answer has begun
            await asyncio.sleep(0.005)
        engine.abort("a")
        return await asyncio.gather(*tasks)

    return asyncio.run(run())


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_failed_step_starts_all_ranks_over_and_loses_no_request(
    saved: Saved, steps: list[tuple[Kind | None, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, path = saved.oracle("dense")
    read, failures = StackedInFlight.read, []

    def fails_once(self: StackedInFlight) -> Any:
        if not failures and len(steps) > 12:
            failures.append(len(steps))
            raise RuntimeError("the device is lost")
        return read(self)

    monkeypatch.setattr(StackedInFlight, "read", fails_once)
    with start(path, 2, 2, enable_dp_attention=True) as engine:
        replies = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert failures, "it happened while requests ran on both ranks"
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            assert reply["output_ids"] == greedy(theirs, prompt)
        steps.clear()
        replies = aborted_and_finished(engine, steps)
        kinds = [reply["meta_info"]["finish_reason"]["type"] for reply in replies]
        assert kinds == ["abort", "length", "abort", "length"]
        assert engine.get_server_info()["num_running_reqs"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_of_several_devices_get_their_sums_in_every_dtype(dtype: str) -> None:
    rules = rules_of(tp=4, dp=2)
    ranks, split = rules.ranks, PartitionSpec("data")
    assert ranks is not None

    def summed(x: jax.Array) -> jax.Array:
        return ranks.scatter(rules.constrain(x[0], (None, "mlp")))[None]

    parts = np.arange(2 * 6 * 4, dtype=dtype).reshape(2, 6, 4)
    got = jax.jit(ranks.each(summed, split, split))(parts)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got).reshape(6, 4), parts.sum(axis=0))


REFUSED = {
    "one rank": ({"tp_size": 2}, "--dp-size ranks, which is 1; --dp-size 2 divides --tp-size 2"),
    "no divisor": (
        {"tp_size": 4, "dp_size": 3},
        "--tp-size 4 devices to --dp-size 3 ranks, .*; --dp-size 2, 4 divides --tp-size 4",
    ),
    "no divisor of experts": (
        {"ep_size": 4, "dp_size": 3},
        "--ep-size 4 devices to --dp-size 3 ranks, .*; --dp-size 2, 4 divides --ep-size 4",
    ),
    "one device": ({"dp_size": 2}, "it needs a --tp-size and --dp-size from 2 on"),
    "fewer requests than ranks": (
        {"tp_size": 2, "dp_size": 2, "max_running_requests": 1},
        "--max-running-requests 1 .* --dp-size 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_do_not_go_together_are_refused_with_those_that_would(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        resolved(**options)


def resolved(**options: int) -> Any:
    model = parse_config(hf_dict(oracle("Qwen3Config", **HEADS)))
    device = DeviceFacts("cpu", "cpu", 8, 8 << 30)
    config = Config.from_flags(model_path="x", enable_dp_attention=True, **options)
    return resolve(config, model, device)


def test_slots_are_dealt_out_and_each_rank_has_an_equal_part_of_the_memory() -> None:
    two, four = (resolved(tp_size=4, dp_size=n, max_running_requests=8) for n in (2, 4))
    assert (two.num_slots, four.num_slots) == (4, 2)
    assert (two.attn_dp_size, four.attn_dp_size) == (2, 4)
    assert (two.chunked_prefill_size, four.chunked_prefill_size) == (64, 64)
