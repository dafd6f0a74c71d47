"""An engine over several devices answers as one device does, with chunks, a warm cache, grammars,
penalties, seeds and log-probabilities.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import oracle

from jserve.engine.engine import Engine
from jserve.tokenizer.sources import byte_source

VOCAB, REGEX = 400, "[b-y]{3}-[0-9]{3}"
MODELS = {
    "8 heads, 4 KV heads": ("Qwen3Config", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "9 heads, 3 KV heads": (
        "LlamaConfig",
        {
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 36,
            "num_hidden_layers": 1,
        },
    ),
    "windows, 1 KV head": (
        "Gemma3TextConfig",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
GREEDY = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "penalties": {
        **GREEDY,
        **{"frequency_penalty": 0.9, "repetition_penalty": 1.2, "logit_bias": {"299": 4, "7": -9}},
    },
    "a seed": {**GREEDY, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "sampling_seed": 7},
    "a grammar": {"temperature": 0, "max_new_tokens": 10, "regex": REGEX},
}


class Alone:
    """Each model's checkpoint, and what one device answers."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, {}

    def __getitem__(self, asked: tuple[str, tuple[str, ...]]) -> tuple[Path, dict[str, Any]]:
        model, kinds = asked
        if asked not in self._made:
            config_class, overrides = MODELS[model]
            settings = {"vocab_size": VOCAB, "max_position_embeddings": 96, **overrides}
            path = self._folder / str(len(self._made))
            oracle(config_class, **settings).save_pretrained(path)
            byte_source(VOCAB, (1,)).save(path)
            self._made[asked] = path, answers(path, 1, kinds)
        return self._made[asked]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("models"))


def answers(path: Path, tp_size: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Token ids and log-probabilities of requests of every kind; what each must show is checked."""
    flags = {"page_size": 4, "max_running_requests": 2, "chunked_prefill_size": 4}
    flags |= {"recompile_guard": "error", "compilation_cache_dir": "off", "max_total_tokens": 400}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, length).tolist() for length in (29, 6, 13)]  # 29: 8 chunks
    found: dict[str, Any] = {}
    with Engine(str(path), inline=True, tp_size=tp_size, **flags) as engine:
        assert engine.get_server_info()["tp_size"] == tp_size
        batch = engine.generate(input_ids=prompts, sampling_params=GREEDY)
        found["batch"] = [reply["output_ids"] for reply in batch]
        longer = [*prompts[0], *found["batch"][0]]
        warm = engine.generate(input_ids=longer, sampling_params=GREEDY)
        assert warm["meta_info"]["cached_tokens"] >= 32, "it reads the first turn's pages"
        found["warm"] = warm["output_ids"]
        for kind in kinds:
            reply = engine.generate(input_ids=prompts[1], sampling_params=KINDS[kind])
            found[kind] = reply["output_ids"]
            assert kind != "a grammar" or re.fullmatch(REGEX, reply["text"]), reply["text"]
        wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 5}
        told = engine.generate(input_ids=prompts[2], sampling_params=GREEDY, **wanted)["meta_info"]
        numbers = [*told["input_token_logprobs"][1:], *told["output_token_logprobs"]]
        numbers += [entry for top in told["output_top_logprobs"] for entry in top]
        found["top ids"] = [entry[1] for entry in numbers]
        found["logprobs"] = [entry[0] for entry in numbers]
        assert engine.get_server_info()["recompiles_total"] == 0
    return found


#: By default no grammar: while one is prepared, programs compile that nothing here asks for.
CASES = [
    ("9 heads, 3 KV heads", 2, ("penalties", "a seed")),
    *(
        pytest.param(model, tp_size, tuple(KINDS), marks=pytest.mark.full)
        for model in MODELS
        for tp_size in (2, 4, 8)
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "tp_size", "kinds"), CASES)
def test_several_devices_answer_as_one_does(
    alone: Alone, model: str, tp_size: int, kinds: tuple[str, ...]
) -> None:
    path, expected = alone[model, kinds]
    found = answers(path, tp_size, kinds)
    np.testing.assert_allclose(found.pop("logprobs"), expected["logprobs"], atol=1e-4)
    assert found == {key: value for key, value in expected.items() if key != "logprobs"}
    assert len({tuple(ids) for ids in found["batch"]}) == 3 and len(set(found["a seed"])) > 3
