"""What the engine takes from the model's tokenizer: the ids that end an answer, and its tokens as
grammars know them.
"""

from __future__ import annotations

import dataclasses

from jserve.errors import ConfigError
from jserve.grammar.backend import Vocabulary
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.types import MAX_EOS_TOKEN_IDS, ModelConfig


def with_ends(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """`model` with every id that ends a generation: what its config files or its tokenizer call the
    end, a fine-tune's often in one of them only. Ids that it cannot draw are left out.

    Raises ConfigError when there are more than a slot has room for.
    """
    known = range(model.vocab_size)
    ends = {token for token in (*model.eos_token_ids, *tokenizer.eos_token_ids) if token in known}
    if len(ends) > MAX_EOS_TOKEN_IDS:
        named = f"the model's files name {len(ends)} tokens that end a generation"
        raise ConfigError(f"{named}, {sorted(ends)}; at most {MAX_EOS_TOKEN_IDS} are supported")
    return dataclasses.replace(model, eos_token_ids=tuple(sorted(ends)))


def vocabulary_of(tokenizer: Tokenizer, model: ModelConfig) -> Vocabulary:
    """The bytes of each token, none of special ones and of those that end an answer."""
    size, ends = model.vocab_size, tuple(dict.fromkeys(model.eos_token_ids))
    tokens = tokenizer.pieces(range(min(tokenizer.vocab_size, size)), skip_special_tokens=True)
    for token in ends:
        if token < len(tokens):
            tokens[token] = b""
    return Vocabulary(tuple(tokens), size, ends)
