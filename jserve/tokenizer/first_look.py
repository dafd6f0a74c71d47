"""Whether a tokenizer is there and whole, without transformers, which takes a second to import.

Owns what of a folder's files is looked at. What a text becomes is the business of sources.py, which
reads them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from jserve.errors import ConfigError
from jserve.tokenizer.sources import TokenizerSource, find_source
from jserve.tokenizer.template_dialect import compile_template
from jserve.weights.checkpoint import Checkpoint, naming
from jserve.weights.hf import read_json


def check_tokenizer(
    checkpoint: Checkpoint, tokenizer_path: str | None, chat_template: str | None
) -> None:
    """Raises ConfigError where a Tokenizer would for a file that is missing or broken."""
    source = find_source(checkpoint, tokenizer_path, chat_template, _seen)
    for template in source.templates.values():
        compile_template(template)


def _seen(folder: Path, eos: set[int], given: Mapping[str, str]) -> TokenizerSource:
    """What of it is plain to see: of a folder without tokenizer.json, no pipeline."""
    pipeline, file = tokenizers.Tokenizer(models.BPE()), folder / "tokenizer.json"
    if file.is_file():
        try:
            pipeline = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust library raises plain Exception
            raise ConfigError(f"{folder}: the tokenizer cannot be loaded: {error}") from None
    settings = folder / "tokenizer_config.json"
    config = read_json(settings) if settings.is_file() else {}
    if not given:
        _check_template(folder, config.get("chat_template"))
    return TokenizerSource(pipeline, tuple(eos), templates=given)


def _check_template(folder: Path, stated: Any) -> None:
    """That of chat_template.jinja, else what tokenizer_config.json states."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            stated = file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: {error}") from None
    else:
        file = folder / "tokenizer_config.json"
    if isinstance(stated, str):
        with naming(file):
            compile_template(stated)
