"""Files that flags name are looked at before anything starts: a port, a process, a device."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jserve.config import Config
from jserve.engine import engine, startup
from jserve.engine.early import check_early
from jserve.engine.local import local_ends
from jserve.errors import ConfigError
from jserve.grammar import choice
from jserve.server import app
from jserve.tokenizer.first_look import check_tokenizer
from jserve.tokenizer.loader import load_tokenizer
from jserve.tokenizer.sources import byte_source
from jserve.weights.checkpoint import Checkpoint

LLAMA = {
    **{"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64},
}


def broken_json(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "mod')


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_settings(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")


def broken_template_file(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if %}")


def binary_template_file(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")


def broken_template(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "{{ x"}))


def nothing_at_all(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


FAULTS = {
    nothing_at_all: r"--tokenizer-path \S+/tok: no such file or folder",
    no_tokenizer: r"--tokenizer-path \S+/tok: no tokenizer found \(tokenizer.json",
    broken_json: r"--tokenizer-path \S+/tok: the tokenizer cannot be loaded: ",
    broken_settings: r"--tokenizer-path \S+/tok/tokenizer_config.json: not valid JSON",
    broken_template_file: r"--tokenizer-path \S+/tok/chat_template.jinja: the chat template, line",
    binary_template_file: r"--tokenizer-path \S+/tok/chat_template.jinja: .*utf-8",
    broken_template: r"--tokenizer-path \S+/tok/tokenizer_config.json: the chat template, line 1",
}


@pytest.fixture
def flags(tmp_path: Path) -> dict[str, Any]:
    """A model of random weights, and a tokenizer beside it."""
    byte_source(256).save(tmp_path / "tok")
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(LLAMA))
    return {
        **{"model_path": str(shape), "load_format": "dummy"},
        **{"tokenizer_path": str(tmp_path / "tok"), "compilation_cache_dir": "off"},
    }


def never(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("it went on")


@pytest.mark.parametrize(("spoil", "message"), FAULTS.items())
def test_a_tokenizer_that_cannot_be_used_is_refused_before_anything_starts(
    flags: dict[str, Any],
    spoil: Callable[[Path], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_early(Config.from_flags(**flags))
    spoil(Path(flags["tokenizer_path"]))
    monkeypatch.setattr(app, "listen", never)
    with pytest.raises(ConfigError, match=message):
        app.serve(Config.from_flags(**flags))
    monkeypatch.setattr(engine, "EngineLife", never)
    with pytest.raises(ConfigError, match=message):
        engine.Engine(**flags, inline=True)


def test_the_tokenizer_is_looked_at_where_the_model_is_to_be_downloaded(
    flags: dict[str, Any],
) -> None:
    hub = {**flags, "model_path": "somebody/something", "load_format": "auto"}
    check_early(Config.from_flags(**hub))
    broken_json(Path(flags["tokenizer_path"]))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        check_early(Config.from_flags(**hub))


@pytest.mark.parametrize(
    ("read", "name"),
    [
        *((check_tokenizer, name) for name in ("x.gguf", "tokenizer.json")),
        *((load_tokenizer, name) for name in ("x.gguf", "tokenizer.json", "tokenizer.model")),
    ],
)
def test_a_broken_tokenizer_is_named_with_its_flag_by_whoever_reads_it(
    tmp_path: Path, read: Callable[..., Any], name: str
) -> None:
    (tmp_path / name).write_text("{")
    path = str(tmp_path if name == "tokenizer.model" else tmp_path / name)
    with pytest.raises(ConfigError, match=rf"^--tokenizer-path {tmp_path}\S*: "):
        read(Checkpoint("hub", Path(), {}, {}), path, None)


def test_a_template_that_is_replaced_is_not_looked_at(flags: dict[str, Any]) -> None:
    broken_template_file(Path(flags["tokenizer_path"]))
    check_early(Config.from_flags(**flags, chat_template="{{ messages }}"))


def test_truncated_weights_are_refused_before_anything_starts(tmp_path: Path) -> None:
    byte_source(256).save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ConfigError, match=r"/model\.safetensors: truncated"):
        check_early(Config.from_flags(model_path=str(tmp_path)))


def test_a_model_that_cannot_be_served_is_refused_before_a_device_is_asked_for(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "own_devices", never)
    Path(flags["model_path"]).write_text(json.dumps({**LLAMA, "num_attention_heads": "two"}))
    with pytest.raises(ConfigError, match="num_attention_heads"):
        startup.build(Config.from_flags(**flags), local_ends()[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grammar_backend": "xgrammar"}, r"--grammar-backend xgrammar needs: pip install"),
        ({"enable_trace": True}, "--enable-trace needs OpenTelemetry: pip install"),
        ({"chat_template": "{% if %}"}, "the chat template, line 1"),
        ({"chat_template": "/no/such.jinja"}, "--chat-template /no/such.jinja: No such file"),
        ({"compilation_cache_dir": "/dev/null/x"}, "--compilation-cache-dir /dev/null/x cannot"),
        ({"schedule_policy": "lpm", "disable_radix_cache": True}, "--schedule-policy lpm orders"),
    ],
)
@pytest.mark.parametrize("inline", [True, False])
def test_an_engine_with_wrong_options_starts_nothing(
    flags: dict[str, Any],
    given: dict[str, Any],
    message: str,
    inline: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)  # not installed
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: name != "xgrammar" or None)
    monkeypatch.setattr(app, "listen", never)
    monkeypatch.setattr(engine, "EngineLife", never)
    with pytest.raises(ConfigError, match=message):
        app.serve(Config.from_flags(**flags | given))
    with pytest.raises(ConfigError, match=message):
        engine.Engine(**flags | given, inline=inline)


def test_a_parser_of_thinking_that_the_model_cannot_write_for_starts_nothing(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_early(Config.from_flags(**flags, reasoning_parser="deepseek-r1"))
    monkeypatch.setattr(app, "listen", never)
    with pytest.raises(ConfigError, match="--reasoning-parser qwen3 does not go with .*<think>"):
        app.serve(Config.from_flags(**flags, reasoning_parser="qwen3"))
