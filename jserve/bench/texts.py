"""What people asked, from a file: ShareGPT's JSON, or a line of JSON a conversation.

Owns how the file reads and how its texts become prompts of token ids. Refuses to know flags.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from jserve.errors import ConfigError, RequestError

Pair = tuple[str, str]  # question, answer
Prompt = tuple[list[int], int]  # ids, how many are to be generated


class TextTokenizer(Protocol):
    """What texts need of `jserve.tokenizer.Tokenizer`."""

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...
    def apply_chat_template(self, messages: Sequence[Any], **options: Any) -> list[int]: ...


def read_pairs(path: str, lines: bool) -> list[Pair]:
    """First question and answer of each conversation that has both, in the file's order.

    `lines`: a JSON object a line; else one JSON array. Raises ConfigError naming the file.
    """
    try:
        with open(path, encoding="utf-8") as file:
            rows = list(_rows(path, file)) if lines else json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path {path}: {error}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"--dataset-path {path}: a JSON array of conversations is wanted")
    pairs = [_pair(path, i, row) for i, row in enumerate(rows)]
    return [pair for pair in pairs if pair is not None]


def chat_prompts(
    pairs: Sequence[Pair],
    most: int,
    tokenizer: TextTokenizer,
    *,
    output_len: int | None = None,
    context_len: int | None = None,
    template: bool = False,
) -> list[Prompt]:
    """At most `most` questions as they are, each with `output_len` or as long as its answer was.

    Without those of a side under two tokens, or together over `context_len`. `template`: as the
    first message of a chat. Raises ConfigError when there is no template.
    """
    prompts: list[Prompt] = []
    for question, answer in pairs:
        if len(prompts) == most:
            break
        ids = _first_message(tokenizer, question) if template else tokenizer.encode(question)
        length = len(tokenizer.encode(answer)) if output_len is None else output_len
        fits = context_len is None or len(ids) + length <= context_len
        if len(ids) >= 2 and length >= 2 and fits:
            prompts.append((ids, length))
    return prompts


def cut_prompts(
    pairs: Sequence[Pair],
    input_lens: Sequence[int],
    output_lens: Sequence[int],
    tokenizer: TextTokenizer,
) -> list[Prompt]:
    """Questions cut, or repeated, to `input_lens`; fewer when the pairs run out."""
    prompts: list[Prompt] = []
    for question, _ in pairs:
        if len(prompts) == len(input_lens):
            break
        ids, wanted = tokenizer.encode(question, add_special=False), input_lens[len(prompts)]
        if ids:
            repeated = ids * -(-wanted // len(ids))
            prompts.append((repeated[:wanted], output_lens[len(prompts)]))
    return prompts


def _rows(path: str, file: Iterator[str]) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"--dataset-path {path}: line {number}: {error}") from None


def _pair(path: str, index: int, row: Any) -> Pair | None:
    """{"conversations": [{"value": …}, …]}; `conversation` and `content` are names of old."""
    try:
        turns = row.get("conversations", row.get("conversation", []))[:2]
        texts = [turn["value"] if "value" in turn else turn["content"] for turn in turns]
        ok = all(isinstance(text, str) for text in texts)
    except (AttributeError, KeyError, TypeError):
        ok, texts = False, []
    if not ok:
        want = '{"conversations": [{"value": TEXT}, {"value": TEXT}]}'
        raise ConfigError(f"--dataset-path {path}: conversation {index} is not like {want}")
    return (texts[0], texts[1]) if len(texts) == 2 else None


def _first_message(tokenizer: TextTokenizer, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    except RequestError as error:
        raise ConfigError(f"--apply-chat-template: {error}") from None
