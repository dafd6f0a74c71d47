"""What a benchmark asks for: conversations of token ids, the same for the same seed.

Owns lengths and what prompts share. Refuses to know when they are sent and to whom.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import numpy as np

from jserve.bench.texts import Prompt, TextTokenizer, chat_prompts, cut_prompts, read_pairs
from jserve.errors import ConfigError

#: Datasets that read --dataset-path → what stands in for them without a file.
TEXTS = {
    "sharegpt": "--dataset-name sharegpt-like, which has such lengths and random ids",
    "random": "--dataset-name random-ids, which has these lengths and random ids",
    "custom": "--dataset-name random-ids",
}
_CHATS = ("sharegpt", "custom")


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that follow the conversation so far, and how many are to be generated then."""

    new_ids: list[int]
    max_new_tokens: int


Conversation = tuple[Turn, ...]  # a plain prompt is a conversation of one turn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """Names and defaults of SGLang's serving benchmark. Lengths in tokens.

    A `…_range_ratio` r: lengths are uniform in [r · len, len].
    """

    dataset_name: str = "random-ids"
    dataset_path: str = ""
    sharegpt_output_len: int | None = None
    sharegpt_context_len: int | None = None
    apply_chat_template: bool = False
    num_prompts: int = 1000
    random_input_len: int = 1024
    random_output_len: int = 1024
    random_range_ratio: float = 0.0
    gsp_num_groups: int = 64
    gsp_prompts_per_group: int = 16
    gsp_system_prompt_len: int = 2048
    gsp_question_len: int = 128
    gsp_output_len: int = 256
    gsp_range_ratio: float = 1.0
    gsp_ordered: bool = False
    num_turns: int = 4
    seed: int = 42

    def __post_init__(self) -> None:
        """Raises ConfigError naming the flag."""
        for name in ("random_range_ratio", "gsp_range_ratio"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be in [0, 1], got {value}")
        for name in (field.name for field in dataclasses.fields(self)):
            value, least = getattr(self, name), _LEAST.get(name, 1)
            if name not in _UNCOUNTED and value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be >= {least}, got {value}")
        self._check_texts()

    def _check_texts(self) -> None:
        name = self.dataset_name
        if name in TEXTS and not self.dataset_path:
            raise ConfigError(
                f"--dataset-name {name} reads texts and nothing is downloaded: give "
                f"--dataset-path FILE, or use {TEXTS[name]}"
            )
        if self.dataset_path and name not in TEXTS:
            raise ConfigError(
                f"--dataset-path is for --dataset-name {', '.join(TEXTS)}; {name} reads no file"
            )
        own = ("sharegpt_output_len", "sharegpt_context_len", "apply_chat_template")
        given = [one for one in own if getattr(self, one)]
        if given and name not in _CHATS:
            flag = given[0].replace("_", "-")
            raise ConfigError(f"--{flag} is for --dataset-name {', '.join(_CHATS)}, not {name}")


_UNCOUNTED = (
    *("dataset_name", "dataset_path", "apply_chat_template", "gsp_ordered"),
    *("random_range_ratio", "gsp_range_ratio"),
)
_LEAST = {"seed": 0, "sharegpt_output_len": 4}


@dataclasses.dataclass(frozen=True, slots=True)
class Material:
    """What prompts are made of: random numbers, random ids, and a tokenizer for texts."""

    rng: np.random.Generator
    ids: Callable[[int], list[int]]
    tokenizer: TextTokenizer | None

    def texts(self) -> TextTokenizer:
        if self.tokenizer is None:
            raise ConfigError(
                "texts need a tokenizer, and the server's is not on this machine: give "
                "--tokenizer PATH"
            )
        return self.tokenizer


def make_workload(
    options: WorkloadOptions, vocab_size: int, tokenizer: TextTokenizer | None = None
) -> list[Conversation]:
    """The conversations of `options.dataset_name`; random ids are below `vocab_size`."""
    rng = np.random.default_rng(options.seed)
    # low ids are often special tokens
    first = min(1000, vocab_size // 2)

    def ids(length: int) -> list[int]:
        return rng.integers(first, vocab_size, max(length, 1)).tolist()

    return DATASETS[options.dataset_name](options, Material(rng, ids, tokenizer))


def _random_ids(options: WorkloadOptions, material: Material) -> list[Conversation]:
    """Nothing is shared."""
    ratio, n = options.random_range_ratio, options.num_prompts
    inputs = _uniform(material.rng, ratio, options.random_input_len, n)
    outputs = _uniform(material.rng, ratio, options.random_output_len, n)
    return [(Turn(material.ids(i), o),) for i, o in zip(inputs, outputs, strict=True)]


def _sharegpt_like(options: WorkloadOptions, material: Material) -> list[Conversation]:
    """Log-normal lengths with the means of chats that people shared: about 220 in, 190 out."""
    rng, n = material.rng, options.num_prompts
    inputs = np.clip(rng.lognormal(np.log(110), 1.2, n), 4, 4096).astype(int).tolist()
    outputs = np.clip(rng.lognormal(np.log(130), 0.9, n), 4, 2048).astype(int).tolist()
    return [(Turn(material.ids(i), o),) for i, o in zip(inputs, outputs, strict=True)]


def _chats(options: WorkloadOptions, material: Material) -> list[Conversation]:
    """Questions of a file, in random order, as they are."""
    pairs = read_pairs(options.dataset_path, lines=options.dataset_name == "custom")
    prompts = chat_prompts(
        [pairs[i] for i in material.rng.permutation(len(pairs))],
        options.num_prompts,
        material.texts(),
        output_len=options.sharegpt_output_len,
        context_len=options.sharegpt_context_len,
        template=options.apply_chat_template,
    )
    return _single_turns(options, prompts)


def _cut_texts(options: WorkloadOptions, material: Material) -> list[Conversation]:
    """Questions of a file, cut or repeated to random lengths."""
    rng, ratio, n = material.rng, options.random_range_ratio, options.num_prompts
    inputs = _uniform(rng, ratio, options.random_input_len, n)
    outputs = _uniform(rng, ratio, options.random_output_len, n)
    pairs = read_pairs(options.dataset_path, lines=False)
    shuffled = [pairs[i] for i in rng.permutation(len(pairs))]
    return _single_turns(options, cut_prompts(shuffled, inputs, outputs, material.texts()))


def _single_turns(options: WorkloadOptions, prompts: list[Prompt]) -> list[Conversation]:
    """Raises ConfigError when the file has nothing, and tells when it has too little."""
    path, wanted = options.dataset_path, options.num_prompts
    if not prompts:
        raise ConfigError(f"--dataset-path {path}: no conversation of two turns fits the flags")
    if len(prompts) < wanted:
        told = f"{path} has {len(prompts)} prompts that fit, fewer than --num-prompts {wanted}"
        print(told, file=sys.stderr)
    return [(Turn(ids, length),) for ids, length in prompts]


def _shared_prefix(options: WorkloadOptions, material: Material) -> list[Conversation]:
    """Groups of questions, each group behind a system prompt of its own; in random order, or one
    after the other.
    """
    rng, ids, ratio = material.rng, material.ids, options.gsp_range_ratio
    groups, per_group = options.gsp_num_groups, options.gsp_prompts_per_group
    prompts: list[Conversation] = []
    for system_len in _uniform(rng, ratio, options.gsp_system_prompt_len, groups):
        system = ids(system_len)
        questions = _uniform(rng, ratio, options.gsp_question_len, per_group)
        outputs = _uniform(rng, ratio, options.gsp_output_len, per_group)
        for question_len, output_len in zip(questions, outputs, strict=True):
            prompts.append((Turn(system + ids(question_len), output_len),))
    if options.gsp_ordered:
        return prompts
    return [prompts[i] for i in rng.permutation(len(prompts))]


def _multi_turn(options: WorkloadOptions, material: Material) -> list[Conversation]:
    """Conversations that grow by question and answer; each turn waits for the last answer."""
    rng, turns, ratio = material.rng, options.num_turns, options.random_range_ratio
    conversations: list[Conversation] = []
    for _ in range(options.num_prompts):
        inputs = _uniform(rng, ratio, options.random_input_len, turns)
        outputs = _uniform(rng, ratio, options.random_output_len, turns)
        pairs = zip(inputs, outputs, strict=True)
        conversations.append(tuple(Turn(material.ids(i), o) for i, o in pairs))
    return conversations


def _uniform(rng: np.random.Generator, ratio: float, length: int, n: int) -> list[int]:
    least = max(int(length * ratio), 1)
    return rng.integers(least, length + 1, n).tolist()


DATASETS: dict[str, Callable[[WorkloadOptions, Material], list[Conversation]]] = {
    "random-ids": _random_ids,
    "random": _cut_texts,
    "sharegpt-like": _sharegpt_like,
    "sharegpt": _chats,
    "custom": _chats,
    "generated-shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
}
