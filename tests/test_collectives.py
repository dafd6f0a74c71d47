"""The collectives of each compiled program are those written here and no other: a gathered weight,
pool or matrix of logits would be one more, and a large one.
"""

from __future__ import annotations

import functools
import re
from collections import Counter

import pytest
from collectives import collectives
from test_deepseek import MOE as LATENT_EXPERTS
from tiny_models import hf_dict, oracle, rules_of

from jserve.models.registry import build_model, parse_config
from jserve.plan import Kind
from jserve.runner.buckets import Buckets
from jserve.runner.programs import Programs
from jserve.runner.ranked import for_ranks
from jserve.runner.recount import recount_program
from jserve.runner.score import score_program
from jserve.runner.shapes import Shapes
from sharding import experts

ROWS, TOKENS, LAYERS, HIDDEN = 4, 16, 2, 32
BLOCK, WORD = 128, 4  # tokens of a block, bytes of a number
EXPERTS, TOP_K = 8, 3
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
MODELS = {
    "heads that divide": ("Qwen3Config", HEADS),
    "heads that are padded": ("Qwen3Config", {"num_attention_heads": 9, "num_key_value_heads": 3}),
    "experts": (
        "Qwen3MoeConfig",
        {
            **HEADS,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "moe_intermediate_size": 16,
        },
    ),
    "latents": (
        "DeepseekV3Config",
        {
            **{**LATENT_EXPERTS, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K},
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        },
    ),
}


@functools.cache
def programs_of(model: str, tp: int, ep: int = 1, exchanged: bool = False, dp: int = 1) -> Programs:
    """`exchanged` is what makes another model of one: its layers are traced once."""
    config_class, overrides = MODELS[model]
    theirs = oracle(config_class, vocab_size=700, **overrides)
    rules = rules_of(tp, ep, dp)
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


DIVIDED, PADDED, SPARSE, LATENT = MODELS
FORWARDS = [(DIVIDED, 2, Kind.DECODE), (DIVIDED, 4, Kind.MIXED), (PADDED, 2, Kind.DECODE)]
ALL = [(m, tp, kind) for m in (DIVIDED, PADDED, SPARSE) for tp in (2, 4) for kind in Kind]


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


def test_what_concerns_a_single_row_is_each_devices_part_of_the_vocabulary() -> None:
    """Where the compiler was to split them, a program for two GPUs copied the whole matrix."""
    lowered = programs_of(DIVIDED, 2).forward(Kind.DECODE, 1).lower()
    assert collectives(lowered.compile()) == of_layers(1)
    looked_up = re.findall(r"stablehlo.gather.*?: \(tensor<(\d+)x32xf32>", lowered.as_text())
    assert "384" in looked_up and "768" not in looked_up
    head = programs_of(DIVIDED, 2).head(1, False, False).lower()
    assert collectives(head.compile()) == gathers(2, 2)
    multiplied = re.findall(r"dot_general.*?tensor<1x32xf32>, tensor<(\d+)x32xf32>", head.as_text())
    assert multiplied == ["384"]


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


def of_exchange(tokens: int, ep: int) -> dict[tuple[str, int], int]:
    """In each layer: how many rows go where, the rows of all there, whose they are, what their
    experts made of them back (a place for all that may come), and the shares of the sum. On CPUs,
    which gather what accelerators send."""
    rows = tokens * TOP_K  # of all devices
    numbers = (ep * ep, rows * HIDDEN, rows, ep * rows * HIDDEN, tokens * HIDDEN)
    return dict(Counter(("all-gather", n * WORD) for n in numbers for _ in range(LAYERS)))


MESHES = [(1, 2), (1, 4), (2, 2)]


@pytest.mark.parametrize(
    ("tp", "ep", "kind"),
    [
        pytest.param(tp, ep, kind, marks=() if (tp, ep, kind) == everyday else pytest.mark.full)
        for tp, ep in MESHES
        for kind in Kind
        for everyday in [(2, 2, Kind.DECODE)]
    ],
)
@pytest.mark.parametrize("exchanged", [False, True])
def test_experts_take_the_place_of_an_mlp_in_a_sum_or_send_rows(
    exchanged: bool, tp: int, ep: int, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a router is told, no weight moves, and shares of tokens end with the experts."""
    monkeypatch.setattr(
        experts, "exchange_pays", lambda shape, *_: exchanged and shape[0] % ep == 0
    )
    size = ROWS if kind is Kind.DECODE else TOKENS
    compiled = programs_of(SPARSE, tp, ep, exchanged).forward(kind, size).lower().compile()
    expected = of_layers(size)
    if exchanged:
        expected = {("all-reduce", size * HIDDEN * WORD): LAYERS + 1} | of_exchange(size, ep)
        if tp > 1:  # a share's sum over slices of experts
            expected |= {("all-reduce", size // ep * HIDDEN * WORD): LAYERS}
    assert collectives(compiled) == expected


@pytest.mark.full
@pytest.mark.parametrize(("tp", "ep"), MESHES)
def test_heads_of_models_with_experts_are_split_over_all_devices(tp: int, ep: int) -> None:
    made = programs_of(SPARSE, tp, ep)
    greedy = made.head(ROWS, False, False).lower().compile()
    assert collectives(greedy) == gathers(tp * ep, ROWS * 2)
    logprobs = made.head(ROWS, True, True).lower().compile()
    assert collectives(logprobs) == of_sampler(tp * ep) | gathers(tp * ep, ROWS * 74)


@pytest.mark.full
@pytest.mark.parametrize("kind", Kind)
def test_latents_are_told_to_nobody(kind: Kind) -> None:
    """Each device keeps all of them. A shared expert is one more sum, in the one sparse layer."""
    size = ROWS if kind is Kind.DECODE else TOKENS
    compiled = programs_of(LATENT, 2).forward(kind, size).lower().compile()
    assert collectives(compiled) == {("all-reduce", size * HIDDEN * WORD): 2 * LAYERS + 1 + 1}
    kv = programs_of(LATENT, 2).shapes.kv
    assert kv.k.sharding.shard_shape(kv.k.shape) == kv.k.shape and kv.v is None


def of_ranks(tokens: int, tp: int, dp: int, sums: int = LAYERS) -> Counter[tuple[str, int]]:
    """In front of each wide layer the tokens of all ranks are gathered, behind it each gets the
    sums of its own. Where a rank has several devices, they sum what they did before: hidden rows of
    their own tokens behind attention and the embedding, and of all tokens `sums` times.
    """
    mine = tokens * HIDDEN * WORD
    told = Counter({("all-gather", dp * mine): LAYERS, ("reduce-scatter", mine): LAYERS})
    if tp > dp:
        told += Counter({("all-reduce", mine): LAYERS + 1})
        told += Counter({("all-reduce", dp * mine): sums})
    return told


RANKS = [(2, 2), (4, 2), (4, 4), (8, 2), (8, 8)]  # --tp-size, --dp-size


@pytest.mark.parametrize(
    ("model", "tp", "dp", "kind"),
    [
        pytest.param(m, tp, dp, kind, marks=() if (m, tp, kind) == everyday else pytest.mark.full)
        for m in (DIVIDED, SPARSE, LATENT)
        for tp, dp in RANKS
        for kind in Kind
        for everyday in [(DIVIDED, 2, Kind.MIXED)]
    ],
)
def test_ranks_tell_each_other_what_wide_layers_need(
    model: str, tp: int, dp: int, kind: Kind
) -> None:
    """No weight, no page and nothing of attention. A shared expert is one more sum of a rank."""
    size = ROWS if kind is Kind.DECODE else TOKENS
    made = programs_of(model, tp, dp=dp)
    program = for_ranks(made.shapes.rules)(made.forward(kind, size))
    sums = LAYERS + (model == LATENT)
    assert collectives(program.lower().compile()) == of_ranks(size, tp, dp, sums)


@pytest.mark.full
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("dp", [2, 4])
def test_experts_dealt_out_to_ranks_are_told_of_as_split_ones_are(dp: int, kind: Kind) -> None:
    """Along --ep-size 4, in place of --tp-size."""
    size = ROWS if kind is Kind.DECODE else TOKENS
    made = programs_of(SPARSE, 1, 4, dp=dp)
    program = for_ranks(made.shapes.rules)(made.forward(kind, size))
    assert made.shapes.params["layers.0.mlp.down"].sharding.shard_shape((EXPERTS, 16, HIDDEN)) == (
        *(EXPERTS // 4, 16),
        HIDDEN,
    )
    assert collectives(program.lower().compile()) == of_ranks(size, 4, dp)


@pytest.mark.full
@pytest.mark.parametrize("program", ["greedy", "logprobs", "edit", "score"])
@pytest.mark.parametrize(("tp", "dp"), RANKS)
def test_what_follows_a_ranks_step_is_told_among_its_devices_alone(
    tp: int, dp: int, program: str
) -> None:
    make = {
        "greedy": lambda made: made.head(ROWS, False, False),
        "logprobs": lambda made: made.head(ROWS, True, True),
        "edit": lambda made: made.edit(),
        "score": lambda made: score_program(made, TOKENS),
    }[program]
    made, alone = programs_of(DIVIDED, tp, dp=dp), programs_of(DIVIDED, tp // dp)
    ranked = for_ranks(made.shapes.rules)(make(made)).lower().compile()
    assert collectives(ranked) == collectives(make(alone).lower().compile())
