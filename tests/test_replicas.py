"""--dp-size with real models: each rank has devices and a cache of its own, and answers as the
oracle does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import jax
import pytest
import torch
from tiny_models import oracle

from jserve.engine.engine import Engine
from jserve.tokenizer.sources import byte_source

VOCAB = 400
MODEL = {
    **{"vocab_size": VOCAB, "max_position_embeddings": 96, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
FLAGS = {
    **{"chunked_prefill_size": 8, "page_size": 4, "random_seed": 0, "max_total_tokens": 400},
    **{"recompile_guard": "error", "compilation_cache_dir": "off"},
}
GREEDY = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
PROMPTS = [[(7 * i + 3 * j) % 390 + 2 for j in range(20 + i)] for i in range(4)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("tiny")
    model = oracle("Qwen3Config", **MODEL)
    model.save_pretrained(path)
    byte_source(VOCAB, (1,)).save(path)
    return path, model


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(GREEDY["max_new_tokens"]):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def ask(engine: Engine, model: torch.nn.Module) -> Counter[int]:
    """Prompts in chunks, together, then each with what was answered and a little more, which must
    find its beginning cached. → how many each rank served."""
    replies = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    asked = list(PROMPTS)
    for prompt, first in zip(PROMPTS, list(replies), strict=True):
        asked.append([*prompt, *first["output_ids"], 5, 6])
        again = engine.generate(input_ids=asked[-1], sampling_params=GREEDY)
        assert again["meta_info"]["cached_tokens"] >= 24
        assert again["meta_info"]["dp_rank"] == first["meta_info"]["dp_rank"]
        replies.append(again)
    for prompt, reply in zip(asked, replies, strict=True):
        assert reply["output_ids"] == greedy(model, prompt)
    return Counter(reply["meta_info"]["dp_rank"] for reply in replies)


def check_facts(engine: Engine, size: int, slots: int) -> None:
    info = engine.get_server_info()
    assert info["recompiles_total"] == 0 and info["max_total_num_tokens"] == 400 * size
    assert info["max_running_requests"] == slots * size
    states = info["internal_states"]
    assert [one["max_running_requests"] for one in states] == [slots] * size
    assert [one["max_total_num_tokens"] for one in states] == [400] * size


def test_two_ranks_share_the_work_on_devices_of_their_own(
    served: tuple[Path, torch.nn.Module],
) -> None:
    path, model = served
    others = jax.live_arrays()  # of engines before this one that nothing has collected yet; held
    with Engine(str(path), inline=True, dp_size=2, max_running_requests=3, **FLAGS) as engine:
        assert ask(engine, model) == {0: 4, 1: 4}
        check_facts(engine, 2, 1)
        known = {id(one) for one in others}
        pools = [x for x in jax.live_arrays() if x.nbytes > 10_000 and id(x) not in known]
        assert {device.id for one in pools for device in one.devices()} == {0, 1}


@pytest.mark.full
@pytest.mark.parametrize(
    ("inline", "dp_size", "tp_size"),
    [(True, 4, 1), (True, 2, 2), (False, 2, 1), (False, 2, 2)],
)
def test_ranks_of_several_devices_and_processes_answer_as_the_oracle(
    served: tuple[Path, torch.nn.Module], inline: bool, dp_size: int, tp_size: int
) -> None:
    path, model = served
    flags = {"dp_size": dp_size, "tp_size": tp_size, "max_running_requests": 2 * dp_size}
    with Engine(str(path), inline=inline, **flags, **FLAGS) as engine:
        assert ask(engine, model) == dict.fromkeys(range(dp_size), 8 // dp_size)
        check_facts(engine, dp_size, 2)
