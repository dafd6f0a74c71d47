"""SmolLM2-135M over three devices, or two and with padded heads, scores the golden set as the
reference does."""

from __future__ import annotations

import dataclasses

import golden
import jax
import numpy as np
import pytest
from tiny_models import batch, empty_pool, rules_of

from jserve.models.registry import build_model, parse_config
from jserve.weights.checkpoint import open_checkpoint
from jserve.weights.loader import load_params

PAGE, TOKENS, ROWS = 16, 512, 4


@dataclasses.dataclass(frozen=True)
class Options:
    model_path: str = "smollm2-135m"
    revision: str | None = None
    load_format: str = "auto"


@pytest.mark.full
@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 4), (3, 3)])
def test_the_golden_set_holds_over_several_devices(tp, kv_heads):
    checkpoint, rules = open_checkpoint(Options()), rules_of(tp)
    model = build_model(
        parse_config(checkpoint.hf_config, checkpoint.generation_config),
        rules,
        dtype="float32",
        attention_backend=None,
        page_size=PAGE,
    )
    done = []
    params = load_params(
        model.specs, checkpoint, rules, "float32", progress=lambda *count: done.append(count)
    )
    assert done[-1] == (len(model.specs), len(model.specs))
    assert params["embed.weight"].addressable_shards[0].data.shape == (49152 // tp, 576)
    assert model.cache.num_kv_heads == kv_heads
    kv = empty_pool(model, 129, PAGE, "float32", rules)
    tables = 1 + np.arange(128, dtype=np.int32).reshape(ROWS, 32)

    @jax.jit
    def score(params, kv, context, token_ids):
        hidden, _ = model.forward(params, kv, context, token_ids)
        return jax.nn.log_softmax(model.logits(params, hidden))

    cases = [case for case in golden.load_cases() if len(case.all_ids) <= TOKENS // ROWS]
    assert len(cases) >= 8
    for start in range(0, len(cases), ROWS):
        some = cases[start : start + ROWS]
        context, ids = batch(
            [(0, case.all_ids) for case in some],
            tables,
            decode=False,
            page=PAGE,
            bucket=(TOKENS, ROWS),
        )
        logprobs = np.asarray(score(params, kv, *jax.device_put((context, ids), rules.sharding())))
        end = 0
        for case in some:
            begin, end = end, end + len(case.all_ids)
            rows = logprobs[begin : end - 1]
            ours = rows[np.arange(len(rows)), case.all_ids[1:]]
            # The reference keeps only the first log-probabilities of a long prompt.
            prompt, answer = case.prompt_logprobs[1:], case.output_logprobs
            assert len(answer) == len(case.output_ids)
            np.testing.assert_allclose(ours[: len(prompt)], prompt, atol=1e-3, rtol=0)
            np.testing.assert_allclose(ours[-len(answer) :], answer, atol=1e-3, rtol=0)
