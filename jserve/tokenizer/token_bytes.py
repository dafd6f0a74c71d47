"""A `tokenizers` pipeline → the bytes of each of its tokens.

Owns the reading of decoders, once, when a tokenizer is made. It decodes no texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from jserve.errors import ConfigError


def token_bytes(pipeline: tokenizers.Tokenizer) -> tuple[dict[int, bytes], int]:
    """The bytes of each token, special ones too, and how many blanks are taken off the start of a
    whole text.

    Raises ConfigError for a decoder whose tokens do not stand alone.
    """
    to_bytes, num_blanks = _byte_rule(pipeline)
    tokens = {i: token for token, i in pipeline.get_vocab(with_added_tokens=False).items()}
    tokens |= {i: token.content for i, token in pipeline.get_added_tokens_decoder().items()}
    return {i: to_bytes(token) for i, token in tokens.items()}, num_blanks


def _byte_rule(pipeline: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], int]:
    """How a token's text becomes bytes, and the number of leading blanks.

    The pipeline's decoder is read as data and done here, because a decoder of whole sequences
    cannot stream.
    """
    steps = [] if pipeline.decoder is None else _decoder_steps(pipeline.decoder)
    known = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    for step in steps:
        if step["type"] not in known or "Regex" in step.get("pattern", {}):
            raise ConfigError(f"tokenizers whose decoder holds {step} are not supported")
    if any(step["type"] == "ByteLevel" for step in steps):
        return _from_alphabet(byte_alphabet()), 0
    if not steps:
        return lambda token: b" " + token.encode(), 1  # words, joined by blanks
    replaced = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
    spaces = [s for s in steps if s["type"] == "Metaspace"]
    replaced += [(step["replacement"], " ") for step in spaces]
    leading = sum(step["start"] for step in steps if step["type"] == "Strip")
    leading += sum(step.get("prepend_scheme", "always") != "never" for step in spaces)
    fallback = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    if not any(step["type"] == "ByteFallback" for step in steps):
        fallback = {}

    def to_bytes(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        return fallback.get(token) or token.encode("utf-8")

    return to_bytes, leading


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    step = json.loads(decoder.__getstate__())
    return step["decoders"] if step["type"] == "Sequence" else [step]


def _from_alphabet(alphabet: Mapping[str, int]) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[letter] for letter in token])
        except KeyError:  # an added token, written as itself
            return token.encode("utf-8")

    return to_bytes


def byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves, the others follow
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
