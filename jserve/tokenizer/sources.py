"""Where a model's tokenizer comes from: Hugging Face files, GGUF metadata, or a byte-level stand-in
for random weights.

Owns that choice and the files, once, at start. It imports neither torch nor jax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jserve.errors import ConfigError
from jserve.models.hf_config import eos_token_ids
from jserve.models.hf_values import count, section
from jserve.tokenizer.gguf_vocab import build_pipeline
from jserve.tokenizer.template_dialect import read_template
from jserve.tokenizer.token_bytes import byte_alphabet
from jserve.weights import gguf_config
from jserve.weights.checkpoint import Checkpoint, resolve_path
from jserve.weights.gguf import read_metadata

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_END_OF_MESSAGE = "<|eom_id|>"  # how Llama 3 ends a call of a tool
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerSource:
    """What a Tokenizer is made of. A text is encoded whole, and nothing is put behind it: what a
    tokenizer.json says of cutting and padding is about batches for training.
    """

    pipeline: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...] = ()  # any of them ends a generation: see vocabulary.with_ends
    #: Texts of bos_token, eos_token … as chat templates name them; only those that exist.
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Chat templates by name; "tool_use" is for requests with tools, "default" for all.
    templates: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pipeline.no_truncation()
        self.pipeline.no_padding()

    def save(self, folder: Path) -> None:
        """Write the Hugging Face files in which find_source finds this tokenizer again."""
        folder.mkdir(parents=True, exist_ok=True)
        self.pipeline.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special}
        if self.templates:
            config["chat_template"] = [
                {"name": name, "template": source} for name, source in self.templates.items()
            ]
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False)
        )


#: A folder of Hugging Face files, the checkpoint's own ends, and the templates that replace the
#: folder's, if any do.
ReadFolder = Callable[[Path, set[int], Mapping[str, str]], TokenizerSource]


def find_source(
    checkpoint: Checkpoint,
    tokenizer_path: str | None,
    chat_template: str | None,
    read_folder: ReadFolder | None = None,
) -> TokenizerSource:
    """The checkpoint's tokenizer, or the one at `tokenizer_path` (folder, tokenizer.json, .gguf or
    hub id).

    `chat_template` (a file, or Jinja text) replaces the tokenizer's own. Random weights without a
    tokenizer get one that encodes bytes. `read_folder` is in place of transformers. Raises
    ConfigError when there is no tokenizer.
    """
    templates = {} if chat_template is None else {"default": read_template(chat_template)}
    eos = _config_eos(checkpoint)
    if tokenizer_path is not None:
        path, metadata = resolve_path(tokenizer_path, None, False, "--tokenizer-path"), {}
        if path.suffix == ".gguf":
            with _naming_flag(tokenizer_path):
                metadata = read_metadata(path)
    else:
        path, metadata = checkpoint.path, checkpoint.metadata
    if metadata:
        return _from_gguf(metadata, eos, templates)
    if path.name == "tokenizer.json":
        path = path.parent
    if path.is_dir() and any((path / name).is_file() for name in _TOKENIZER_FILES):
        with _naming_flag(tokenizer_path):
            return (read_folder or _from_hf)(path, eos, templates)
    if checkpoint.kind == "dummy" and tokenizer_path is None:
        size = count(_language(checkpoint), "vocab_size", 256)
        return byte_source(size, eos, templates or {"default": _PLAIN_TEMPLATE})
    where, remedy = ("--tokenizer-path ", "") if tokenizer_path else ("", "; pass --tokenizer-path")
    files = ", ".join(_TOKENIZER_FILES)
    raise ConfigError(f"{where}{path}: no tokenizer found ({files}){remedy}")


@contextlib.contextmanager
def _naming_flag(tokenizer_path: str | None) -> Iterator[None]:
    """Over what reads the tokenizer: its ConfigErrors name the flag, if one says where it is."""
    try:
        yield
    except ConfigError as error:
        if tokenizer_path is None:
            raise
        raise ConfigError(f"--tokenizer-path {error}") from None


def byte_source(
    vocab_size: int, eos: Collection[int] = (), templates: Mapping[str, str] | None = None
) -> TokenizerSource:
    """A stand-in for models without one: id = byte; ids past 255 read `<id>` and are never encoded.

    With fewer than 256 ids, bytes that have none become the last id.
    """
    alphabet = byte_alphabet()
    letters = {byte: letter for letter, byte in alphabet.items()}
    num_bytes = min(256, vocab_size)
    vocabulary = {letters[byte]: byte for byte in range(num_bytes)}
    vocabulary |= {f"<{i}>": i for i in range(num_bytes, vocab_size)}
    pipeline = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token=letters[num_bytes - 1]))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.decoder = decoders.ByteLevel()
    return TokenizerSource(pipeline, tuple(eos), templates=templates or {})


def _config_eos(checkpoint: Checkpoint) -> set[int]:
    """Every id that the checkpoint's config files call the end."""
    config = checkpoint.hf_config
    return {*eos_token_ids(config, _language(checkpoint), checkpoint.generation_config)}


def _language(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The config of the language model, which a multi-modal one holds one level down."""
    return section(checkpoint.hf_config, "text_config") or checkpoint.hf_config


def _from_gguf(
    metadata: Mapping[str, Any], eos: set[int], templates: Mapping[str, str]
) -> TokenizerSource:
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}
    own = metadata.get("tokenizer.chat_template")
    return TokenizerSource(
        build_pipeline(metadata),
        eos_token_ids=tuple({*eos, *gguf_config.eos_token_ids(metadata)}),
        special=special,
        templates=templates or ({} if own is None else {"default": own}),
    )


def _from_hf(folder: Path, eos: set[int], templates: Mapping[str, str]) -> TokenizerSource:
    # NOTE: AutoTokenizer imports torch where that is installed; the other class does not, and takes
    # tokenizer.json as it is. AutoTokenizer is for folders that have only vocab.json or a
    # SentencePiece model. Imported here, because a second is too long for a GGUF file to wait.
    import transformers

    whole = (folder / "tokenizer.json").is_file()
    loader = transformers.PreTrainedTokenizerFast if whole else transformers.AutoTokenizer
    try:
        loaded = loader.from_pretrained(str(folder), local_files_only=True)
        pipeline = loaded.backend_tokenizer
    except (
        Exception
    ) as error:  # a broken file may raise any type; the Rust library raises plain Exception
        raise ConfigError(f"{folder}: the tokenizer cannot be loaded: {error!r}") from None
    named = {name: loaded.special_tokens_map.get(name) for name in _SPECIAL_NAMES}
    own = loaded.chat_template or {}
    ends = {*eos, loaded.eos_token_id, pipeline.token_to_id(_END_OF_MESSAGE)} - {None}
    return TokenizerSource(
        pipeline,
        eos_token_ids=tuple(ends),
        special={name: str(token) for name, token in named.items() if token is not None},
        templates=templates or ({"default": own} if isinstance(own, str) else own),
    )
