"""The collectives of each compiled program are those written here and no other: a gathered weight,
pool or matrix of logits would be one more, and a large one.
"""

from __future__ import annotations

import functools

import pytest
from collectives import collectives
from tiny_models import hf_dict, oracle, rules_of

from jserve.models.registry import build_model, parse_config
from jserve.plan import Kind
from jserve.runner.buckets import Buckets
from jserve.runner.programs import Programs
from jserve.runner.recount import recount_program
from jserve.runner.score import score_program
from jserve.runner.shapes import Shapes

ROWS, TOKENS, LAYERS, HIDDEN = 4, 16, 2, 32
BLOCK, WORD = 128, 4  # tokens of a block, bytes of a number
MODELS = {
    "heads that divide": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "heads that are padded": {"num_attention_heads": 9, "num_key_value_heads": 3},
}


@functools.cache
def programs_of(model: str, tp: int) -> Programs:
    theirs = oracle("Qwen3Config", vocab_size=700, **MODELS[model])
    rules = rules_of(tp)
    built = build_model(
        parse_config(hf_dict(theirs)), rules, dtype="float32", attention_backend=None, page_size=4
    )
    shapes = Shapes(
        built,
        rules,
        num_slots=ROWS,
        num_pages=64,
        page_size=4,
        context_length=64,
        kv_dtype="float32",
    )
    return Programs(shapes, Buckets.of(ROWS, TOKENS))


def of_layers(tokens: int) -> dict[tuple[str, int], int]:
    """One sum of hidden rows behind attention, one behind the MLP, one of the embedding."""
    return {("all-reduce", tokens * HIDDEN * WORD): 2 * LAYERS + 1}


def gathers(tp: int, *numbers: int) -> dict[tuple[str, int], int]:
    """Of that many numbers of each device."""
    return {("all-gather", tp * count * WORD): numbers.count(count) for count in numbers}


def of_sampler(tp: int) -> dict[tuple[str, int], int]:
    """The best token, the whole sum, the search in a loop, the blocks, and the drawn block."""
    blocks = -(-700 // (tp * BLOCK))
    told = gathers(tp, ROWS * 2, ROWS * 2, ROWS * 30, ROWS * blocks)
    return told | {("all-reduce", ROWS * BLOCK * WORD): 1}


DIVIDED, PADDED = MODELS
FORWARDS = [(DIVIDED, 2, Kind.DECODE), (DIVIDED, 4, Kind.MIXED), (PADDED, 2, Kind.DECODE)]
ALL = [(model, tp, kind) for model in MODELS for tp in (2, 4) for kind in Kind]


@pytest.mark.parametrize(
    ("model", "tp", "kind"),
    [pytest.param(*c, marks=() if c in FORWARDS else pytest.mark.full) for c in ALL],
)
def test_a_step_sums_hidden_rows_twice_a_layer_and_tells_nothing_else(
    model: str, tp: int, kind: Kind
) -> None:
    size = ROWS if kind is Kind.DECODE else TOKENS
    compiled = programs_of(model, tp).forward(kind, size).lower().compile()
    assert collectives(compiled) == of_layers(size)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_greedy_head_tells_each_shards_best(tp: int) -> None:
    greedy = programs_of(DIVIDED, tp).head(ROWS, False, False).lower().compile()
    assert collectives(greedy) == gathers(tp, ROWS * 2)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.full)])
def test_other_heads_tell_a_few_numbers_a_row_and_no_logits(tp: int) -> None:
    made = programs_of(DIVIDED, tp)
    logprobs = made.head(ROWS, True, True).lower().compile()
    assert collectives(logprobs) == of_sampler(tp) | gathers(tp, ROWS * 74)
    score = score_program(made, TOKENS).lower().compile()
    assert collectives(score) == gathers(tp, TOKENS * 2, TOKENS * 74)


def test_edits_and_recounts_tell_nothing() -> None:
    made = programs_of(DIVIDED, 2)
    for program in (made.edit(), recount_program(made.shapes)):
        assert not collectives(program.lower().compile())
    counts = made.shapes.state.counts
    assert counts.shape[1] == 768 and counts.sharding.shard_shape(counts.shape)[1] == 384
