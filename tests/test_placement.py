"""Where requests are placed: by cached prefix, by load, by name; and what is forgotten."""

from __future__ import annotations

from collections import Counter

import pytest

from jserve.engine.placement import Placement
from jserve.errors import EngineDeadError, RequestError
from jserve.types import SamplingParams, Submit


def submit(rid: str, ids: list[int], **fields: object) -> Submit:
    return Submit(rid=rid, prompt_ids=ids, sampling=SamplingParams(), **fields)  # type: ignore[arg-type]


def prompt(of: int, length: int = 160) -> list[int]:
    return [of * 1000 + i for i in range(length)]


def test_requests_that_share_nothing_are_dealt_out_in_turn() -> None:
    placement = Placement(3)
    ranks = [placement.place(submit(str(i), prompt(i))) for i in range(6)]
    assert ranks == [0, 1, 2, 0, 1, 2]
    for i in range(6):
        placement.end(str(i))
    assert [load.num_tokens for load in placement.loads()] == [0, 0, 0]
    assert placement.place(submit("next", prompt(7))) == 0, "one at a time, too"
    placement.end("next")
    assert placement.place(submit("after", prompt(8))) == 1


def test_a_prompt_goes_where_its_beginning_was_sent() -> None:
    placement = Placement(4)
    first = {placement.place(submit(f"a{i}", prompt(i))): i for i in range(4)}
    for rank, i in first.items():
        longer = prompt(i) + prompt(9, 100)
        assert placement.place(submit(f"b{i}", longer)) == rank
    assert placement.place(submit("c", prompt(0, 15))) == 0, "less than a block tells nothing"
    loads = {load.rank: load for load in placement.loads()}
    # what is cached weighs nothing: 160 tokens, then 100, and the decoding of two
    assert loads[1].num_requests == 2 and loads[1].num_tokens == 260 + 2 * 512


def test_the_longest_of_several_prefixes_wins_and_a_small_share_of_a_prompt_does_not() -> None:
    placement = Placement(2)
    assert placement.place(submit("a", prompt(1, 64), routed_dp_rank=0)) == 0
    assert placement.place(submit("b", prompt(1, 320), routed_dp_rank=1)) == 1
    assert placement.place(submit("c", prompt(1, 320) + prompt(2, 64))) == 1
    assert placement.place(submit("d", prompt(1, 320) + prompt(3, 3200))) == 0, "a tenth is cached"


def test_no_request_waits_for_its_prefix_beside_a_free_slot() -> None:
    placement = Placement(2)
    placement.slots = 3
    ranks = [placement.place(submit(str(i), prompt(1))) for i in range(8)]
    assert ranks[:6] == [0, 0, 0, 1, 1, 1] and sorted(ranks[6:]) == [0, 1], "then all are full"
    placement.end("3")
    assert placement.place(submit("next", prompt(1))) == 1


@pytest.mark.parametrize("space", [{"extra_key": "k"}, {"cache_salt": "k"}])
def test_namespaces_share_no_prefix(space: dict[str, str]) -> None:
    placement = Placement(2)
    placement.place(submit("plain", prompt(1), routed_dp_rank=0))
    placement.place(submit("own", prompt(1), routed_dp_rank=1, **space))
    for i in range(1, 5):
        assert placement.place(submit("plain", prompt(1), turn=i)) == 0
        assert placement.place(submit("own", prompt(1), turn=i, **space)) == 1


def test_a_rank_that_has_too_much_to_do_is_passed_over_and_then_both_have_the_prefix() -> None:
    placement = Placement(2)
    ranks = [placement.place(submit(str(i), prompt(1))) for i in range(200)]
    first = ranks.index(1)
    assert 10 < first < 20, "until it has 16 requests more than the other"
    counts = Counter(ranks[first:])
    placed = Counter(ranks)
    assert counts[1] > counts[0] and abs(placed[0] - placed[1]) <= 1, placed


def test_a_heavy_request_is_no_light_one() -> None:
    placement = Placement(2)
    assert placement.place(submit("long", prompt(1, 4000))) == 0
    ranks = [placement.place(submit(str(i), prompt(i + 2, 20))) for i in range(7)]
    assert ranks == [1] * 7


def test_a_named_rank_is_taken_at_any_load_and_one_that_is_not_there_is_refused() -> None:
    placement = Placement(2)
    for i in range(40):
        assert placement.place(submit(str(i), prompt(i), routed_dp_rank=1)) == 1
    for wrong in (2, -1):
        with pytest.raises(RequestError, match=r"routed_dp_rank must be in \[0, 1\]") as caught:
            placement.place(submit("wrong", prompt(1), routed_dp_rank=wrong))
        assert caught.value.param == "routed_dp_rank"
    placement.lose(1)
    with pytest.raises(EngineDeadError, match="routed_dp_rank 1 has ended; 0 can be chosen"):
        placement.place(submit("gone", prompt(1), routed_dp_rank=1))
    assert placement.rank_of("wrong") is None and placement.rank_of("gone") is None


def test_a_lost_rank_is_never_chosen_again_and_names_what_it_had() -> None:
    placement = Placement(2)
    placement.place(submit("a", prompt(1), turn=3))
    placement.place(submit("b", prompt(2), turn=4))
    assert placement.lose(0) == [("a", 3)]
    assert placement.rank_of("a") is None and placement.rank_of("b") == 1
    placed = {placement.place(submit(f"c{i}", prompt(1), turn=i)) for i in range(50)}
    assert placed == {1}, "neither by its cache nor by its load"
    first = placement.loads()[0]
    assert (first.num_requests, first.num_tokens, first.alive) == (0, 0, False)
    assert len(placement.lose(1)) == 51
    with pytest.raises(EngineDeadError):
        placement.place(submit("d", prompt(1)))


def test_an_id_that_is_used_again_is_told_from_its_first_use() -> None:
    placement = Placement(2)
    assert placement.place(submit("a", prompt(1), turn=1)) == 0
    assert placement.place(submit("a", prompt(2), turn=2)) == 1
    assert placement.rank_of("a") == 1
    placement.end("a", 1)  # the last Delta of the first use
    assert placement.rank_of("a") == 1
    assert [load.num_requests for load in placement.loads()] == [0, 1]
    placement.end("a")
    placement.end("a")  # twice, and of the unknown: nothing
    placement.end("unknown", 7)
    assert placement.rank_of("a") is None
    assert [load.num_requests for load in placement.loads()] == [0, 0]


def test_what_a_rank_was_sent_is_bounded_and_the_ends_of_old_prompts_go_first() -> None:
    placement = Placement(2, num_blocks=20)
    placement.place(submit("a", prompt(1, 160), routed_dp_rank=0))
    placement.place(submit("b", prompt(1, 160) + prompt(2, 160), routed_dp_rank=0))
    placement.place(submit("c", prompt(3, 160), routed_dp_rank=0))
    # 30 blocks were sent, 20 are known: all of c's, and of b's those that it shares with a
    ranks = placement._ranks
    assert len(ranks[0]._blocks) == 20
    assert ranks[0].num_cached(placement._blocks_of(submit("", prompt(3, 160)))) == 10
    shared = submit("", prompt(1, 160) + prompt(2, 160))
    assert ranks[0].num_cached(placement._blocks_of(shared)) == 10


def test_without_a_cache_only_load_counts() -> None:
    placement = Placement(2, num_blocks=0)
    assert [placement.place(submit(str(i), prompt(1))) for i in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
def test_blocks_are_whole_pages(page_size: int) -> None:
    placement = Placement(2, page_size)
    assert placement._block_size % page_size == 0 and placement._block_size >= 16
    assert len(placement._blocks_of(submit("a", prompt(1, 200)))) == 200 // placement._block_size


def test_after_a_flush_nothing_is_known() -> None:
    placement = Placement(2)
    placement.place(submit("a", prompt(1)))
    placement.end("a")
    placement.forget()
    assert placement.place(submit("b", prompt(1))) == 1
