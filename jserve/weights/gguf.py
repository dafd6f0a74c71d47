"""The GGUF file: its header, and its tensors under Hugging Face names and conventions.

Owns the binary format, dequantization (through the gguf package) and the table of tensor names;
gguf_config.py reads the metadata. It knows nothing of models or of devices.
"""

from __future__ import annotations

import dataclasses
import mmap
import re
import struct
from collections.abc import Iterator, KeysView, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import constants, quants

from jserve.errors import ConfigError, WeightError

_MAGIC = b"GGUF"
#: Type number of a metadata value → numpy's code.
_SCALARS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_PLAIN: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_GLOBAL_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH_NAMES: Mapping[str, str] = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: architecture → names of a block's tensors. An architecture that is not here cannot be loaded.
BLOCK_NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": _BLOCK_NAMES,
    "qwen2": _BLOCK_NAMES,
    "qwen3": _BLOCK_NAMES,
    "gemma3": {**_BLOCK_NAMES, **_SANDWICH_NAMES},
}


@dataclasses.dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in numpy order (rows first), in elements whatever the
    quantization.
    """

    name: str
    shape: tuple[int, ...]
    type: constants.GGMLQuantizationType
    file: Path
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata (arrays of numbers are numpy arrays, arrays of strings are lists) and tensors by
    GGUF name, in file order.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


class GGUFSource:
    """TensorSource over the tensors of one GGUF model, named and laid out as its Hugging Face
    checkpoint would be.
    """

    def __init__(self, header: GGUFHeader) -> None:
        self._architecture = header.metadata["general.architecture"]
        self._num_heads = _heads(header.metadata, self._architecture)
        named = ((hf_name(t.name, self._architecture), t) for t in header.tensors.values())
        self._tensors = {name: tensor for name, tensor in named if name is not None}
        self.files = tuple(dict.fromkeys(t.file for t in self._tensors.values()))

    def names(self) -> KeysView[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def file(self, name: str) -> Path:
        return self._tensors[name].file

    def read(self, name: str) -> np.ndarray:
        """The tensor, dequantized: float32, or float16/bfloat16 where the file holds that. A
        private copy or a view.
        """
        tensor = self._tensors[name]
        raw = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.num_bytes,))
        rows = raw.reshape(tensor.shape[0], -1)
        if self._architecture == "llama":
            rows = self._unpermute(name, rows)
        values = _dequantize(tensor, rows)
        if self._architecture == "gemma3" and name.endswith("norm.weight"):
            return values - np.float32(1)  # the file holds 1 + w, as the norm applies it
        return values

    def _unpermute(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Undo llama.cpp's row order of q and k (rotary pairs adjacent) in favour of Hugging Face's
        (halves apart).
        """
        num_heads = next((n for key, n in self._num_heads.items() if key in name), None)
        if num_heads is None:
            return rows
        pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
        return pairs.swapaxes(1, 2).reshape(rows.shape)


def hf_name(name: str, architecture: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None when there is none (`rope_freqs.weight`)."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block is not None:
        target = BLOCK_NAMES[architecture].get(block[2])
        return None if target is None else f"model.layers.{block[1]}.{target}.{block[3]}"
    stem, _, kind = name.rpartition(".")
    target = _GLOBAL_NAMES.get(stem)
    return None if target is None else f"{target}.{kind}"


def read_header(path: Path) -> GGUFHeader:
    """Parse `path`, and its further parts when it is the first of a split model.

    Raises ConfigError for a file that is not GGUF or of an architecture without a name table,
    WeightError for one that is truncated (naming the first tensor that is not whole).
    """
    metadata, tensors = _read_file(path)
    for part in _other_parts(path, int(metadata.get("split.count", 1))):
        tensors |= _read_file(part)[1]
    architecture = metadata.get("general.architecture")
    if architecture not in BLOCK_NAMES:
        raise ConfigError(
            f"{path}: GGUF architecture {architecture!r} is not supported; "
            f"known: {', '.join(BLOCK_NAMES)}"
        )
    return GGUFHeader(metadata, tensors)


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a file of any architecture, also one that holds a tokenizer only."""
    return _read_file(path)[0]


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    if not path.is_file():
        raise WeightError(f"{path}: no such file")
    if path.stat().st_size < 24:
        raise WeightError(f"{path}: truncated, {path.stat().st_size} bytes are no GGUF header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        magic, version, num_tensors, num_keys = struct.unpack("<4sIQQ", cursor.take(24))
        if magic != _MAGIC or version not in (2, 3):
            raise ConfigError(f"{path}: not a little-endian GGUF file of version 2 or 3")
        try:
            metadata = {cursor.string(): cursor.value(cursor.number("<I")) for _ in range(num_keys)}
            infos = [_tensor_info(cursor, path) for _ in range(num_tensors)]
        except EOFError:
            raise WeightError(f"{path}: truncated inside the header at byte {len(data)}") from None
        align = int(metadata.get("general.alignment", constants.GGUF_DEFAULT_ALIGNMENT))
        start = -(-cursor.position // align) * align
        infos = [dataclasses.replace(t, offset=start + t.offset) for t in infos]
        for tensor in infos:
            end = tensor.offset + tensor.num_bytes
            if end > len(data):
                raise WeightError(
                    f"{path}: truncated, tensor {tensor.name} ends at byte {end}, "
                    f"the file holds {len(data)}"
                )
    return metadata, {t.name: t for t in sorted(infos, key=lambda t: t.offset)}


def _other_parts(path: Path, count: int) -> Iterator[Path]:
    """The further files of a model split as NAME-00001-of-0000N.gguf."""
    if count <= 1:
        return
    first = re.fullmatch(r"(.*-)00001(-of-\d{5}\.gguf)", path.name)
    if first is None:
        raise ConfigError(
            f"{path}: one part of a GGUF split into {count}; "
            f"pass the first (…-00001-of-{count:05}.gguf)"
        )
    for index in range(2, count + 1):
        yield path.with_name(f"{first[1]}{index:05}{first[2]}")


def _tensor_info(cursor: _Cursor, path: Path) -> GGUFTensor:
    name = cursor.string()
    num_dims = cursor.number("<I")
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
    type_id, offset = cursor.number("<I"), cursor.number("<Q")
    try:
        kind = constants.GGMLQuantizationType(type_id)
    except ValueError:
        raise WeightError(f"{path}: tensor {name} has the unknown type {type_id}") from None
    block_size, block_bytes = constants.GGML_QUANT_SIZES[kind]
    shape = tuple(int(d) for d in reversed(dims)) or (1,)
    num_bytes = int(np.prod(shape, dtype=np.int64)) // block_size * block_bytes
    return GGUFTensor(name, shape, kind, path, offset, num_bytes)


def _dequantize(tensor: GGUFTensor, rows: np.ndarray) -> np.ndarray:
    plain = _PLAIN.get(tensor.type.name)
    if plain is not None:
        return rows.reshape(-1).view(plain).reshape(tensor.shape)
    try:
        return quants.dequantize(rows, tensor.type).reshape(tensor.shape)
    except NotImplementedError:
        raise WeightError(
            f"{tensor.file}: tensor {tensor.name} is of type {tensor.type.name}, "
            "which cannot be dequantized"
        ) from None


def _heads(metadata: Mapping[str, Any], architecture: str) -> dict[str, int]:
    num_heads = int(metadata[f"{architecture}.attention.head_count"])
    num_kv_heads = int(metadata.get(f"{architecture}.attention.head_count_kv", num_heads))
    return {"q_proj": num_heads, "k_proj": num_kv_heads}


class _Cursor:
    """Sequential reads from mapped bytes; EOFError past their end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self._data):
            raise EOFError
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def number(self, code: str) -> int:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, length = self.number("<I"), self.number("<Q")
            if element in _SCALARS:
                dtype = np.dtype(_SCALARS[element])
                return np.frombuffer(self.take(dtype.itemsize * length), dtype)
            return [self.value(element) for _ in range(length)]
        if kind not in _SCALARS:
            raise EOFError
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
