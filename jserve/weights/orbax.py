"""Orbax checkpoints: save the parameters of a running model, read them into any mesh.

Owns the folder's layout: config.json, generation_config.json and the tokenizer's files beside
`orbax/`, which holds one array per Hugging Face tensor. Fused parameters are taken apart on saving,
because how they are fused depends on the mesh.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, KeysView, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jserve.errors import ConfigError, WeightError
from jserve.weights.checkpoint import ORBAX_FOLDER
from jserve.weights.spec import WeightSpec

_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_NOT_TOKENIZER = ("/config.json", "generation_config.json", ".index.json")


class OrbaxSource:
    """TensorSource over the Orbax folder of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = (folder / ORBAX_FOLDER).absolute()
        self.files = (self._folder,)
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                tree = checkpointer.metadata(self._folder).item_metadata.tree
            self._shapes = {name: tuple(meta.shape) for name, meta in tree.items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise WeightError(f"{self._folder}: not a whole Orbax checkpoint: {error}") from None

    def names(self) -> KeysView[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def file(self, name: str) -> Path:
        return self._folder

    def read(self, name: str) -> np.ndarray:
        arguments = ocp.args.PyTreeRestore(
            item={name: 0},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                return checkpointer.restore(self._folder, args=arguments)[name]
        except (OSError, ValueError) as error:
            raise WeightError(f"{self._folder}: tensor {name} cannot be read: {error}") from None


def save_params(
    path: Path,
    params: Mapping[str, jax.Array],
    specs: Iterable[WeightSpec],
    hf_config: Mapping[str, Any],
    *,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_dir: Path | None = None,
) -> None:
    """Write a checkpoint folder that --model-path takes. Host memory: the model.

    Raises ConfigError when `path` already holds one.
    """
    target = Path(path).absolute()
    if (target / ORBAX_FOLDER).exists():
        raise ConfigError(f"{target} already holds an Orbax checkpoint")
    target.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for spec in specs:
        tensors |= take_apart(spec, jax.device_get(params[spec.path]), tensors)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target / ORBAX_FOLDER, tensors)
    (target / "config.json").write_text(json.dumps(dict(hf_config), indent=2))
    if generation_config:
        (target / "generation_config.json").write_text(
            json.dumps(dict(generation_config), indent=2)
        )
    for file in sorted(tokenizer_dir.iterdir()) if tokenizer_dir is not None else ():
        if file.suffix in _TOKENIZER_SUFFIXES and not str(file).endswith(_NOT_TOKENIZER):
            shutil.copy(file, target / file.name)


def take_apart(
    spec: WeightSpec, param: np.ndarray, found: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """The checkpoint tensors that a fused parameter was made of: the inverse of its pieces'
    `place`. Those of `found`, which other parameters have parts of, are filled in further.

    `place` only moves elements, so running it on element numbers tells where each one went.
    """
    tensors = {}
    for piece in spec.pieces:
        part = piece.part(param)
        size = int(np.prod(piece.shape, dtype=np.int64))
        # From 1 on: `place` writes 0 where the layout pads.
        wide = max(size, part.size) >= 2**31 - 1
        numbers = np.arange(1, 1 + size, dtype=np.int64 if wide else np.int32)
        origin = np.zeros(part.shape, numbers.dtype)
        piece.place(origin, numbers.reshape(piece.shape))
        placed = origin > 0
        known = (found or {}).get(piece.name)
        tensor = np.zeros(size, param.dtype) if known is None else known.reshape(-1)
        tensor[origin[placed] - 1] = part[placed]
        tensors[piece.name] = tensor.reshape(piece.shape)
    return tensors
