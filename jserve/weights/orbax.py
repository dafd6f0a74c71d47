"""Orbax checkpoints: write a model's tensors as one, read them into any mesh.

Owns the folder's layout: config.json, generation_config.json and the tokenizer's files beside
`orbax/`, which holds one array per Hugging Face tensor. Fused parameters are taken apart on saving,
because how they are fused depends on the mesh. Orbax writes; read is through TensorStore, which
opens all arrays at once, where each restore of Orbax reads the metadata of all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

from jserve.errors import ConfigError, WeightError
from jserve.weights.checkpoint import ORBAX_FOLDER
from jserve.weights.spec import WeightSpec

_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_NOT_TOKENIZER = ("/config.json", "generation_config.json", ".index.json")
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"
_BATCH_BYTES = 128 << 20  # of tensors that are written at a time

#: An array's own metadata → the driver that reads it.
_DRIVERS = {"/.zarray": "zarr", "/zarr.json": "zarr3"}
_OCDBT = "manifest.ocdbt"  # where it is there, all arrays lie in one database
_STORES_ZEROS = "store_array_data_equal_to_fill_value"  # older versions left them out
_INDEX_CACHE = {"cache_pool#index": {"total_bytes_limit": 100_000_000}}


class OrbaxSource:
    """TensorSource over the Orbax folder of a checkpoint. Names are in alphabetical order."""

    def __init__(self, folder: Path) -> None:
        self._folder = (folder / ORBAX_FOLDER).absolute()
        self.files = (self._folder,)
        try:
            self._arrays = _open_arrays(self._folder)
        except (OSError, ValueError, AttributeError) as error:
            raise WeightError(
                f"{self._folder}: not a whole Orbax checkpoint: {_reason(error)}"
            ) from None

    def names(self) -> KeysView[str]:
        return self._arrays.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._arrays[name].shape)

    def file(self, name: str) -> Path:
        return self._folder

    def read(self, name: str) -> np.ndarray:
        try:
            return self._arrays[name].read().result()
        except (OSError, ValueError) as error:
            raise WeightError(
                f"{self._folder}: tensor {name} cannot be read: {_reason(error)}"
            ) from None


def _open_arrays(folder: Path) -> dict[str, ts.TensorStore]:
    """Name → array, none of it read. Orbax's file _METADATA is read once."""
    facts = json.loads((folder / "_METADATA").read_text("utf-8"))
    files = {"driver": "file", "path": f"{folder}/"}
    database = {"driver": "ocdbt", "base": files, "cache_pool": "cache_pool#index"}
    context = ts.Context(_INDEX_CACHE)
    spec = ts.KvStore.Spec(database if (folder / _OCDBT).is_file() else files)
    found = ts.KvStore.open(spec, context=context).result().list().result()
    opening = {}
    for key in sorted(key.decode() for key in found):
        for ending, driver in _DRIVERS.items():
            if key.endswith(ending):
                name = key.removesuffix(ending)
                array = {"driver": driver, "kvstore": (spec / f"{name}/").to_json()}
                array |= {"recheck_cached_metadata": False, "recheck_cached_data": False}
                array["fill_missing_data_reads"] = not facts.get(_STORES_ZEROS, False)
                opening[name] = ts.open(array, open=True, read=True, context=context)
    if not opening:
        raise ValueError("it holds no arrays")
    return {name: array.result() for name, array in opening.items()}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Lazy:
    """A tensor that `read` makes when its turn comes."""

    read: Callable[[], np.ndarray]


class _Streaming(type_handlers.TypeHandler):
    """Writes lazy tensors as the arrays they are, a batch of some bytes after the other."""

    def __init__(self) -> None:
        self._arrays = type_handlers.NumpyHandler(deepcopy_host_arrays=False)

    def typestr(self) -> str:
        return self._arrays.typestr()

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        return await self._arrays.metadata(infos)

    async def deserialize(
        self, infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        return await self._arrays.deserialize(infos, args)

    async def serialize(
        self,
        values: Sequence[_Lazy],
        infos: Sequence[Any],
        args: Sequence[Any] | None = None,
    ) -> Sequence[Any]:
        batch: list[np.ndarray] = []
        size = 0
        for index, value in enumerate(values):
            batch.append(np.asarray(value.read()))
            size += batch[-1].nbytes
            if size < _BATCH_BYTES and index + 1 < len(values):
                continue
            these = slice(index + 1 - len(batch), index + 1)
            some_args = None if args is None else args[these]
            for written in await self._arrays.serialize(batch, infos[these], some_args):
                written.result()
            batch, size = [], 0
        return []


def save_params(
    path: Path,
    params: Mapping[str, jax.Array],
    specs: Iterable[WeightSpec],
    hf_config: Mapping[str, Any],
    *,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer_dir: Path | None = None,
) -> None:
    """save_tensors of the parameters of a model that runs, for programs that changed them:
    `jserve convert` has the tensors themselves. Host memory: the model."""
    require_new(path)
    tensors: dict[str, np.ndarray] = {}
    for spec in specs:
        tensors |= take_apart(spec, jax.device_get(params[spec.path]), tensors)
    save_tensors(
        path,
        {name: functools.partial(tensors.__getitem__, name) for name in tensors},
        hf_config,
        generation_config=generation_config,
        add_tokenizer=functools.partial(copy_tokenizer, tokenizer_dir) if tokenizer_dir else None,
    )


def save_tensors(
    path: Path,
    tensors: Mapping[str, Callable[[], np.ndarray]],
    hf_config: Mapping[str, Any],
    *,
    generation_config: Mapping[str, Any] | None = None,
    add_tokenizer: Callable[[Path], object] | None = None,
) -> None:
    """Write a checkpoint folder that --model-path takes; `tensors` are read as they are written.

    `add_tokenizer` gets the folder. Host memory: two or three batches, or twice the largest tensor.
    Raises ConfigError when `path` holds anything, or cannot be written; what was written then is
    removed.
    """
    target = Path(path).absolute()
    require_new(target)
    known = (jax.Array, type_handlers.ArrayHandler())  # Orbax warns when it is not
    registry = type_handlers.create_type_handler_registry((_Lazy, _Streaming()), known)
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    try:
        with _removed_on_failure(target), ocp.Checkpointer(handler) as checkpointer:
            target.mkdir(parents=True, exist_ok=True)
            tree = {name: _Lazy(read) for name, read in tensors.items()}
            checkpointer.save(target / ORBAX_FOLDER, args=ocp.args.PyTreeSave(tree))
            if add_tokenizer is not None:
                add_tokenizer(target)
            if generation_config:
                _write_json(target / "generation_config.json", generation_config)
            _write_json(target / "config.json", hf_config)  # last: a folder without is no model
    except (OSError, ValueError) as error:
        raise ConfigError(f"{target} cannot be written: {_reason(error)}") from error


def require_new(path: Path) -> None:
    """Raises ConfigError unless nothing is at `path`, or an empty folder."""
    try:
        taken = any(path.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:  # a file, or closed to us
        raise ConfigError(f"{path}: {error.strerror}; name a new folder") from None
    if taken:
        raise ConfigError(f"{path} already holds files; name a new folder")


def copy_tokenizer(source: Path, target: Path) -> None:
    """The tokenizer's files of a Hugging Face folder, as they are."""
    for file in sorted((*source.iterdir(), *source.glob(_MORE_TEMPLATES))):
        if file.suffix in _TOKENIZER_SUFFIXES and not str(file).endswith(_NOT_TOKENIZER):
            place = target / file.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, place)


@contextlib.contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:  # an interruption too leaves nothing half written
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _reason(error: Exception) -> str:
    """Without what TensorStore adds for those who write its specs."""
    return str(error).partition(" [tensorstore_spec")[0]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(content), indent=2))


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
