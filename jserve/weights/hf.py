"""A Hugging Face checkpoint on disk: its JSON files, and its safetensors shards without torch.

Owns the safetensors format and the shard index. It knows nothing of models or of devices.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
from collections.abc import Iterable, KeysView, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from jserve.errors import ConfigError, WeightError

_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_FLOATS = tuple(_DTYPES[name] for name in ("F64", "F32", "F16", "BF16"))
_CONSOLIDATED = "consolidated"
_NUMBERED = re.compile(r"model-\d+-of-\d+\.safetensors")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


class SafetensorsSource:
    """TensorSource over safetensors files, in the order of the files and of the tensors in them.

    `places` is the file of each tensor that an index lists: a copy in another file is none. Raises
    WeightError for a tensor that is in two files and in no index.
    """

    def __init__(self, files: Sequence[Path], places: Mapping[str, Path] | None = None) -> None:
        self.files = tuple(files)
        self._tensors: dict[str, _Tensor] = {}
        for file in self.files:
            for name, tensor in _read_header(file).items():
                if places is not None and places.get(name, file) != file:
                    continue
                if name in self._tensors:
                    other = self._tensors[name].file.name
                    raise WeightError(f"{file}: tensor {name} is in {other} too; remove one")
                self._tensors[name] = tensor

    def names(self) -> KeysView[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self._tensors[name].dtype

    def file(self, name: str) -> Path:
        return self._tensors[name].file

    def read(self, name: str) -> np.ndarray:
        """A tensor of floating-point numbers in its own dtype, mapped read-only: pages come in as
        they are copied and go with the array. Raises WeightError for any other.
        """
        if (dtype := self.dtype(name)) not in _FLOATS:
            raise WeightError(
                f"{self.file(name)}: tensor {name} is {dtype}, which needs scales; unless the "
                "config's quantization_config says how, weights are float32, float16 or bfloat16"
            )
        return self.raw(name)

    def raw(self, name: str) -> np.ndarray:
        """As `read`, of any dtype."""
        tensor = self._tensors[name]
        if 0 in tensor.shape:
            return np.zeros(tensor.shape, tensor.dtype)
        shape = tensor.shape or (1,)
        try:
            return np.memmap(tensor.file, tensor.dtype, "r", tensor.offset, shape)
        except (OSError, ValueError) as error:  # it was there when its header was read
            raise WeightError(f"{tensor.file}: tensor {name} cannot be read: {error}") from None


def find_shards(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint folder, () when it holds none.

    An index decides where there is one. Some folders hold the same weights twice: of Mistral's own
    `consolidated*` beside others nothing is taken, nor of variants (`model.fp16.safetensors`)
    beside `model.safetensors` or its numbered shards.
    """
    index = _find_index(folder)
    if index is not None:
        files = tuple(sorted(set(_places(index).values())))
        for file in files:
            if not file.is_file():
                raise WeightError(f"{file}: no such file, but {index.name} lists it")
        return files
    found = _usual_first(folder.glob("*.safetensors"))
    whole = [file for file in found if file.name == "model.safetensors"]
    numbered = [file for file in found if _NUMBERED.fullmatch(file.name)]
    return tuple(whole or numbered or found)


def open_shards(folder: Path) -> SafetensorsSource:
    """The tensors of what find_shards finds."""
    index = _find_index(folder)
    return SafetensorsSource(find_shards(folder), None if index is None else _places(index))


def _places(index: Path) -> dict[str, Path]:
    """The file of each tensor that an index lists, which may be in a folder below its own. Raises
    WeightError."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        rule = "weight_map must be an object of tensors and their files"
        raise WeightError(f"{index}: {rule}, is {str(listed)[:80]}")
    for name, file in listed.items():
        if not isinstance(file, str) or not file.strip() or _leaves(Path(file)):
            rule = f"weight_map must name a file beside it for {name}"
            raise WeightError(f"{index}: {rule}, not {str(file)[:80]!r}")
    return {name: index.parent / file for name, file in listed.items()}


def _leaves(path: Path) -> bool:
    """Whether it can lead out of the folder that it begins in."""
    return path.is_absolute() or ".." in path.parts


def _find_index(folder: Path) -> Path | None:
    """The folder's index, but that of `consolidated*` only when there is nothing else."""
    found = _usual_first(folder.glob("*.safetensors.index.json"))
    first = next(iter(found), None)
    if first is None or not first.name.startswith(_CONSOLIDATED):
        return first
    files = _usual_first(folder.glob("*.safetensors"))
    return first if all(file.name.startswith(_CONSOLIDATED) for file in files) else None


def _usual_first(paths: Iterable[Path]) -> list[Path]:
    """transformers' own names first; without `consolidated*` where there is another."""
    found = sorted(paths, key=lambda path: (not path.name.startswith("model."), path.name))
    return [path for path in found if not path.name.startswith(_CONSOLIDATED)] or found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises ConfigError naming the file when it is missing or broken."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a JSON object is expected")
    return content


def _read_header(path: Path) -> dict[str, _Tensor]:
    """Layout: uint64 header length, JSON header with offsets relative to its end, then the data."""
    try:
        with path.open("rb") as file:
            return _parse_header(path, file, path.stat().st_size)
    except OSError as error:
        raise WeightError(f"{path}: {error.strerror or error}") from None


def _parse_header(path: Path, file: BinaryIO, num_bytes: int) -> dict[str, _Tensor]:
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(_MAX_HEADER_BYTES, num_bytes - 8):
        raise WeightError(
            f"{path}: truncated or not safetensors, the header does not fit {num_bytes} bytes"
        )
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        infos = {name: _tensor_info(path, name, info, 8 + length) for name, info in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightError(f"{path}: the safetensors header is broken: {error!r}") from None
    for name, tensor in infos.items():
        end = tensor.offset + math.prod(tensor.shape) * tensor.dtype.itemsize
        if end > num_bytes:
            raise WeightError(
                f"{path}: truncated, tensor {name} ends at byte {end}, the file holds {num_bytes}"
            )
    return dict(sorted(infos.items(), key=lambda item: item[1].offset))


def _tensor_info(path: Path, name: str, info: Mapping[str, Any], start: int) -> _Tensor:
    if info["dtype"] not in _DTYPES:
        raise WeightError(f"{path}: tensor {name} has the unsupported dtype {info['dtype']}")
    begin, end = info["data_offsets"]
    dtype, shape = _DTYPES[info["dtype"]], tuple(info["shape"])
    if not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
        raise WeightError(f"{path}: tensor {name} has sizes or offsets that are none: {info}")
    expected = math.prod(shape) * dtype.itemsize
    if end - begin != expected:
        raise WeightError(
            f"{path}: tensor {name} spans {end - begin} bytes, its shape {shape} needs {expected}"
        )
    return _Tensor(path, dtype, shape, start + begin)
