"""What a benchmark asks for: conversations of token ids, the same for the same seed.

Owns lengths and what prompts share. Refuses to know when they are sent and to whom.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jserve.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that follow the conversation so far, and how many are to be generated then."""

    new_ids: list[int]
    max_new_tokens: int


Conversation = tuple[Turn, ...]  # a plain prompt is a conversation of one turn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Names and defaults of SGLang's serving benchmark. Lengths in tokens.

    `random_range_ratio` r: lengths are uniform in [r · len, len].
    """

    dataset_name: str = "random-ids"
    num_prompts: int = 1000
    random_input_len: int = 1024
    random_output_len: int = 1024
    random_range_ratio: float = 0.0
    gsp_num_groups: int = 64
    gsp_prompts_per_group: int = 16
    gsp_system_prompt_len: int = 2048
    gsp_question_len: int = 128
    gsp_output_len: int = 256
    num_turns: int = 4
    seed: int = 42

    def __post_init__(self) -> None:
        """Raises ConfigError naming the flag."""
        for field in dataclasses.fields(self):
            value, flag = getattr(self, field.name), "--" + field.name.replace("_", "-")
            if field.name == "random_range_ratio":
                if not 0 <= value <= 1:
                    raise ConfigError(f"{flag} must be in [0, 1], got {value}")
            elif field.name != "dataset_name" and value < (field.name != "seed"):
                least = 0 if field.name == "seed" else 1
                raise ConfigError(f"{flag} must be >= {least}, got {value}")


def make_workload(options: WorkloadOptions, vocab_size: int) -> list[Conversation]:
    """The conversations of `options.dataset_name`; ids below `vocab_size`."""
    rng = np.random.default_rng(options.seed)
    # low ids are often special tokens
    first = min(1000, vocab_size // 2)

    def ids(length: int) -> list[int]:
        return rng.integers(first, vocab_size, max(length, 1)).tolist()

    return DATASETS[options.dataset_name](options, rng, ids)


Ids = Callable[[int], list[int]]


def _random_ids(options: WorkloadOptions, rng: np.random.Generator, ids: Ids) -> list[Conversation]:
    """Nothing is shared."""
    ratio, n = options.random_range_ratio, options.num_prompts
    inputs = _uniform(rng, ratio, options.random_input_len, n)
    outputs = _uniform(rng, ratio, options.random_output_len, n)
    return [(Turn(ids(i), o),) for i, o in zip(inputs, outputs, strict=True)]


def _sharegpt_like(
    options: WorkloadOptions, rng: np.random.Generator, ids: Ids
) -> list[Conversation]:
    """Log-normal lengths with the means of chats that people shared: about 220 in, 190 out."""
    n = options.num_prompts
    inputs = np.clip(rng.lognormal(np.log(110), 1.2, n), 4, 4096).astype(int).tolist()
    outputs = np.clip(rng.lognormal(np.log(130), 0.9, n), 4, 2048).astype(int).tolist()
    return [(Turn(ids(i), o),) for i, o in zip(inputs, outputs, strict=True)]


def _shared_prefix(
    options: WorkloadOptions, rng: np.random.Generator, ids: Ids
) -> list[Conversation]:
    """Groups of questions, each group behind a system prompt of its own; in random order."""
    prompts: list[Conversation] = []
    for _ in range(options.gsp_num_groups):
        system = ids(options.gsp_system_prompt_len)
        for _ in range(options.gsp_prompts_per_group):
            turn = Turn(system + ids(options.gsp_question_len), options.gsp_output_len)
            prompts.append((turn,))
    return [prompts[i] for i in rng.permutation(len(prompts))]


def _multi_turn(options: WorkloadOptions, rng: np.random.Generator, ids: Ids) -> list[Conversation]:
    """Conversations that grow by question and answer; each turn waits for the last answer."""
    turns, ratio = options.num_turns, options.random_range_ratio
    conversations: list[Conversation] = []
    for _ in range(options.num_prompts):
        inputs = _uniform(rng, ratio, options.random_input_len, turns)
        outputs = _uniform(rng, ratio, options.random_output_len, turns)
        pairs = zip(inputs, outputs, strict=True)
        conversations.append(tuple(Turn(ids(i), o) for i, o in pairs))
    return conversations


def _uniform(rng: np.random.Generator, ratio: float, length: int, n: int) -> list[int]:
    least = max(int(length * ratio), 1)
    return rng.integers(least, length + 1, n).tolist()


DATASETS: dict[str, Callable[[WorkloadOptions, np.random.Generator, Ids], list[Conversation]]] = {
    "random-ids": _random_ids,
    "sharegpt-like": _sharegpt_like,
    "generated-shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
}
