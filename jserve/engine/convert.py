"""`jserve convert`: any model that is served, as an Orbax checkpoint that is served alike.

Owns which tensors are written, and that what cannot be served is refused before any is. They keep
their dtypes; packed ones are unpacked. Runs on the CPU, whatever other devices there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jserve.config.options import ModelOptions
from jserve.errors import ConfigError
from jserve.models.architectures import find_architecture
from jserve.models.registry import build_model, model_config_of
from jserve.tokenizer.sources import find_source
from jserve.weights.checkpoint import Checkpoint, open_checkpoint
from jserve.weights.loader import uses_of
from jserve.weights.orbax import copy_tokenizer, require_new, save_tensors
from jserve.weights.spec import WeightSpec
from sharding.mesh import make_mesh
from sharding.rules import TP, Rules


def convert(
    model: ModelOptions, folder: Path, progress: Callable[[int, int], None] = lambda *_: None
) -> int:
    """Write `folder`; → how many tensors. `progress(done, total)` counts them.

    Raises ConfigError when there is something at `folder`, when the model is not served, has no
    tokenizer, no weights, or is an Orbax checkpoint already; WeightError for a broken checkpoint.
    """
    require_new(folder)
    if model.model_path.endswith(".json"):
        raise ConfigError(f"{model.model_path} is a model's shape without weights")
    jax.config.update("jax_platforms", "cpu")
    checkpoint = open_checkpoint(model, find_architecture)
    if checkpoint.kind == "orbax":
        raise ConfigError(f"{checkpoint.path} is an Orbax checkpoint already")
    source = checkpoint.tensors()
    used = uses_of(_specs(checkpoint), source)
    add_tokenizer = _tokenizer(model, checkpoint)
    names = [name for name in source.names() if name in used]
    done = iter(range(1, len(names) + 1))

    def read(name: str) -> np.ndarray:
        tensor = source.read(name)
        progress(next(done), len(names))
        return tensor

    save_tensors(
        folder,
        {name: functools.partial(read, name) for name in names},
        _unpacked(checkpoint),
        generation_config=checkpoint.generation_config,
        add_tokenizer=add_tokenizer,
    )
    return len(names)


def _specs(checkpoint: Checkpoint) -> Sequence[WeightSpec]:
    """Of the model on one device."""
    config = model_config_of(checkpoint)
    rules = Rules(make_mesh(jax.devices("cpu")[:1]), TP)
    return build_model(config, rules, dtype="float32", attention_backend=None, page_size=16).specs


def _tokenizer(model: ModelOptions, checkpoint: Checkpoint) -> Callable[[Path], object]:
    """What writes it: the model's own files as they are, any other in Hugging Face's form."""
    found = find_source(checkpoint, model.tokenizer_path, model.chat_template)
    if checkpoint.path.is_dir() and model.tokenizer_path is None and model.chat_template is None:
        return functools.partial(copy_tokenizer, checkpoint.path)
    return found.save


def _unpacked(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config of what the source's tensors are when they have been read."""
    config = dict(checkpoint.hf_config)
    if checkpoint.quantization:
        del config["quantization_config"]
    return config
