"""What a model thinks before it answers, told from the answer: one file a way to mark it.

`split_reasoning` splits whole texts by the name that SGLang gives a format.
"""

from __future__ import annotations

from jserve.errors import RequestError
from jserve.parsers.reasoning.formats import FORMATS, Format
from jserve.parsers.reasoning.think_tags import Splitter, split
from jserve.types.wording import written

__all__ = ["FORMATS", "Format", "Splitter", "check_model_type", "split", "split_reasoning"]


def check_model_type(model_type: str) -> None:
    """Raises RequestError for a type that is not there."""
    if not isinstance(model_type, str) or model_type.lower() not in FORMATS:
        known = ", ".join(FORMATS)
        rule = f"model_type must be one of {known}, got {written(model_type)}."
        raise RequestError(rule, "model_type")


def split_reasoning(text: str, model_type: str) -> tuple[str, str]:
    """(reasoning, answer). Raises RequestError as check_model_type."""
    check_model_type(model_type)
    return split(text, Splitter(FORMATS[model_type.lower()].thinks_at_once))
