"""Sliding-window models served with a pool of their own for windowed layers: the tokens of a single
pool and of transformers, and little memory. Scheduler, cache and runner are real, the loop is not.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from fake_model import Settings
from scripted_runner import submit
from tiny_models import PAGE, hf_dict, oracle, params_of, rules_of

from jserve.cache.manager import CacheManager
from jserve.cache.window import WindowGroup
from jserve.models.registry import build_model, parse_config
from jserve.runner.runner import InFlight, Runner
from jserve.runner.startup import compile_programs
from jserve.runner.window_share import kept_tokens
from jserve.scheduler.request import SchedulerSettings
from jserve.scheduler.scheduler import Scheduler

WINDOW, CHUNK, SLOTS, CONTEXT = 8, 16, 4, 160
MODELS = {
    "gemma3": (
        "Gemma3TextConfig",
        {"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "mistral": ("MistralConfig", {"num_hidden_layers": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {"num_hidden_layers": 3, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
}


class Serving:
    """One model behind a scheduler, one launch in flight, integrity checked after every tick."""

    def __init__(
        self, hf_model: torch.nn.Module, *, hybrid: bool, pages: int, ratio: float
    ) -> None:
        rules = rules_of()
        model = build_model(
            parse_config(hf_dict(hf_model)),
            rules,
            dtype="float32",
            attention_backend=None,
            page_size=PAGE,
            hybrid=hybrid,
        )
        numbers = Settings(
            context_length=CONTEXT,
            num_slots=SLOTS,
            chunked_prefill_size=CHUNK,
            max_total_tokens=pages * PAGE,
            swa_full_tokens_ratio=ratio if hybrid else None,
        )
        params = params_of(model, hf_model.state_dict(), rules)
        parts = compile_programs(model, params, rules, numbers, lambda done, total: None)
        self.runner = Runner(*parts)
        self.groups = tuple(
            WindowGroup(
                WINDOW,
                kept_tokens(WINDOW, PAGE),
                num_pages=n,
                full_pages=self.runner.num_pages,
                page_size=PAGE,
            )
            for n in self.runner.group_pages
        )
        self.cache = CacheManager(self.runner.num_pages, PAGE, groups=self.groups)
        settings = SchedulerSettings(
            num_slots=SLOTS,
            context_length=CONTEXT,
            page_size=PAGE,
            chunked_prefill_size=CHUNK,
            max_prefill_tokens=256,
            vocab_size=96,
            schedule_conservativeness=0.05,
        )
        self.scheduler = Scheduler(settings, self.cache)
        self.queue: deque[InFlight] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.most_locked = 0

    def run(self, prompts: dict[str, list[int]], new_tokens: int) -> None:
        for rid, prompt in prompts.items():
            self.scheduler.submit(submit(rid, prompt, new_tokens, temperature=0))
        while self.scheduler.has_work or self.queue:
            self.tick()

    def tick(self) -> None:
        plan, deltas = self.scheduler.plan(), []
        if plan is not None:
            self.queue.append(self.runner.launch(plan))
        if self.queue and (plan is None or len(self.queue) > 1):
            flight = self.queue.popleft()
            deltas = self.scheduler.commit(flight.plan, flight.read())
        if plan is not None:
            self.runner.finish(self.queue[-1])
        for delta in [*deltas, *self.scheduler.drain()]:
            self.outputs.setdefault(delta.rid, []).extend(delta.token_ids)
            self.cached[delta.rid] = delta.cached_tokens
        self.scheduler.check_integrity()
        for group in self.groups:
            for lease in self.cache.leases:
                locked = np.count_nonzero(group.locks[lease.pages] > 0)
                alone = locked - np.count_nonzero(group.locks[lease.pages[: lease.num_shared]] > 1)
                self.most_locked = max(self.most_locked, int(alone))

    def close(self) -> None:
        self.runner.close()


def greedy(hf_model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            token = hf_model(ids).logits[0, -1].argmax()
            ids = torch.cat([ids, token.reshape(1, 1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def prompts_of(seed: int, lengths: tuple[int, ...], begin: list[int]) -> dict[str, list[int]]:
    rng = np.random.default_rng(seed)
    return {f"{seed}.{n}": begin + rng.integers(2, 96, n).tolist() for n in lengths}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["gemma3", *(pytest.param(n, marks=pytest.mark.full) for n in ("mistral", "gpt_oss"))]
)
def test_windows_in_a_pool_of_their_own_give_the_tokens_of_one_pool_and_of_transformers(
    name: str,
) -> None:
    config, overrides = MODELS[name]
    hf_model = oracle(config, sliding_window=WINDOW, max_position_embeddings=CONTEXT, **overrides)
    shared = prompts_of(0, (40,), [])["0.40"]  # more than a chunk
    crowd = prompts_of(1, (9, 10, 11, 12), [])  # with long answers: more than the pools hold
    long = prompts_of(2, (90, 23, 61), []) | prompts_of(3, (30, 9), shared)  # many windows
    expected = {rid: greedy(hf_model, prompt, 60) for rid, prompt in crowd.items()}
    expected |= {rid: greedy(hf_model, prompt, 24) for rid, prompt in long.items()}
    turns = {f"{rid} again": long[rid] + expected[rid] + [5, 6, 7] for rid in long}
    expected |= {rid: greedy(hf_model, prompt, 8) for rid, prompt in turns.items()}
    for hybrid in (True, False):
        serving = Serving(hf_model, hybrid=hybrid, pages=52, ratio=0.6)
        for prompts, count in ((crowd, 60), (long, 24), (turns, 8)):
            serving.run(prompts, count)
        assert serving.outputs == expected, f"{hybrid=}"
        stats = serving.scheduler.stats()
        assert stats["num_chunked_requests_total"] >= 2 and stats["evicted_tokens_total"] > 0
        assert stats["num_retracted_requests_total"] >= 1
        assert any(serving.cached[rid] > 0 for rid in turns)
        if hybrid:
            check_memory(serving, stats)
        serving.close()


def check_memory(serving: Serving, stats: dict[str, float]) -> None:
    (group,) = serving.groups
    assert group.slid > 0 and group.tombstones > 0
    assert group.num_pages == 1 + 32 < serving.runner.num_pages == 1 + 52
    kept = -(-kept_tokens(WINDOW, PAGE) // PAGE) + 1
    assert 0 < serving.most_locked <= kept + CHUNK // PAGE
    kv = serving.runner._kv
    assert kv is not None
    assert kv.groups[0].k.shape[0] == 2 * group.num_pages, "two layers have a window"
    assert stats["max_total_num_tokens_swa"] == (group.num_pages - 1) * PAGE
    assert (
        stats["swa_available_tokens"] + stats["swa_evictable_tokens"]
        == (stats["max_total_num_tokens_swa"])
    ), "nothing is in use any more"
    assert stats["swa_used_tokens"] == stats["swa_token_usage"] == stats["full_token_usage"] == 0
