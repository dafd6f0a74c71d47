"""How select decides, against the formulae worked out by hand."""

from __future__ import annotations

import pytest

import jserve.lang as sgl
from jserve.lang.choices import Scores, heal


def scored(*rows):
    """Choices a, b, c … whose tokens, all different, have these log-probabilities."""
    tokens = [
        [[value, 10 * row + i, f"t{i}"] for i, value in enumerate(values)]
        for row, values in enumerate(rows)
    ]
    return tuple("abcdef"[: len(rows)]), tokens


def test_the_mean_of_a_token_decides():
    choices, tokens = scored([-1.0, -3.0], [-1.9], [-0.5, -0.5, -6.0])
    decision = sgl.token_length_normalized(Scores(choices, tokens, [[], [], []]))
    assert decision.decision == "b"
    assert decision.meta_info["normalized_prompt_logprobs"] == [-2.0, -1.9, pytest.approx(-7 / 3)]
    assert decision.meta_info["input_token_logprobs"] == tokens
    assert decision.meta_info["output_token_logprobs"] == [[], [], []]


def test_a_token_without_a_log_probability_does_not_count():
    choices, tokens = scored([None, -4.0], [-3.0, -3.0])
    assert sgl.token_length_normalized(Scores(choices, tokens, [[], []])).decision == "b"


def test_a_choice_of_which_nothing_is_scored_is_not_chosen():
    choices, tokens = scored([None], [-9.0])
    for method in (sgl.token_length_normalized, sgl.greedy_token_selection):
        assert method(Scores(choices, tokens, [[], []])).decision == "b"


def test_equal_means_give_the_first():
    choices, tokens = scored([-2.0], [-2.0])
    assert sgl.token_length_normalized(Scores(choices, tokens, [[], []])).decision == "a"


def test_greedy_walks_the_tokens_and_a_short_choice_goes_on_with_its_mean():
    choices, tokens = scored([-1.0, -5.0, -9.0], [-1.0, -4.0], [-2.0, 0.0, 0.0])
    decision = sgl.greedy_token_selection(Scores(choices, tokens, [[], [], []]))
    assert decision.decision == "b"  # a and b are ahead after one token, b after two
    matrix = decision.meta_info["greedy_logprob_matrix"]
    assert matrix == [[-1.0, -5.0, -9.0], [-1.0, -4.0, -2.5], [-2.0, 0.0, 0.0]]


def test_greedy_ties_to_the_end_give_the_first():
    choices, tokens = scored([-1.0, -1.0], [-1.0, -1.0])
    assert sgl.greedy_token_selection(Scores(choices, tokens, [[], []])).decision == "a"


def test_greedy_takes_the_same_token_as_equally_likely_whatever_rounding_says():
    shared = [[[-1.0, 7, ":"], [-3.0, 1, "a"]], [[-1.0 - 1e-6, 7, ":"], [-2.0, 2, "b"]]]
    assert sgl.greedy_token_selection(Scores(("a", "b"), shared, [[], []])).decision == "b"


def test_unconditional_takes_what_a_token_gains_from_its_context():
    choices, tokens = scored([-1.0, -2.0], [-0.5, -0.5])
    alone = [[[None, 0, ""], [-6.0, 1, ""]], [[None, 0, ""], [-0.5, 1, ""]]]
    scores = Scores(choices, tokens, [[], []], alone)
    decision = sgl.unconditional_likelihood_normalized(scores)
    assert decision.decision == "a"
    gains = decision.meta_info["normalized_unconditional_prompt_logprobs"]
    assert gains == [(-1.0 - 0 - 2.0 + 6.0) / 2, (-0.5 - 0 - 0.5 + 0.5) / 2]
    assert decision.meta_info["unconditional_token_logprobs"] == alone
    assert sgl.unconditional_likelihood_normalized.needs_unconditional


@pytest.mark.parametrize(
    ("prompt", "healed"),
    [("The answer", True), ("The answer ", False), ("", False)],
)
def test_a_token_that_ends_the_prompt_is_not_the_choices(prompt, healed):
    entries = [[-3.0, 1, " answer"], [-1.0, 2, " yes"]]
    assert heal(prompt, entries) == entries[healed:]


def test_tokens_without_text_are_left_alone():
    assert heal("abc", [[-1.0, 1, None]]) == [[-1.0, 1, None]]
    assert heal("abc", []) == []


def test_a_method_of_ones_own_is_an_object_like_ours():
    class Last:
        name = "last"
        needs_unconditional = False

        def __call__(self, scores):
            from jserve.lang.choices import ChoicesDecision

            return ChoicesDecision(scores.choices[-1], {})

    backend = sgl.TestBackend()

    @sgl.function
    def program(s):
        s += "q" + sgl.select("x", ["a", "b"], choices_method=Last())

    assert program.run(backend=backend).get_meta_info("x") == {"method": "last"}
    backend.shutdown()
