"""A tokenizer's tokens as grammars know them."""

from __future__ import annotations

from jserve.grammar.backend import Vocabulary
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import ModelConfig


def vocabulary_of(tokenizer: Tokenizer, model: ModelConfig) -> Vocabulary:
    """The bytes of each token, none of special ones and of those that end an answer."""
    size, ends = model.vocab_size, tuple(dict.fromkeys(model.eos_token_ids))
    tokens = tokenizer.pieces(range(min(tokenizer.vocab_size, size)), skip_special_tokens=True)
    for token in ends:
        if token < len(tokens):
            tokens[token] = b""
    return Vocabulary(tuple(tokens), size, ends)
