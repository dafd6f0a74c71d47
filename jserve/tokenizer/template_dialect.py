"""The Jinja dialect that published chat templates are written in: helpers, block trimming, the
generation tag, in a sandbox.

Owns finding and compiling a template, once, at start; rendering is chat_template.py's.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jserve.errors import ConfigError, RequestError


def compile_template(source: str) -> jinja2.Template:
    """Raises ConfigError when `source` is not valid Jinja."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template, line {error.lineno}: {error.message}") from None


def read_template(option: str) -> str:
    """The source that --chat-template gives: a file's content, or the option itself when it is
    Jinja.
    """
    if "{{" in option or "{%" in option:
        return option
    try:
        return Path(option).expanduser().read_text("utf-8")
    except OSError as error:
        why = error.strerror
    except ValueError:  # bytes that are no UTF-8, or a name that no file can have
        why = "no text in UTF-8"
    raise ConfigError(f"--chat-template {option}: {why}, and it is no Jinja text")


def refusal(error: Exception) -> RequestError:
    """What the caller hears of what a template raised: whatever it is, these messages led to it."""
    why = str(error) or type(error).__name__
    return RequestError(f"messages: the chat template refuses them: {why}", "messages")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model is trained on; for serving it is
    its body.
    """

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which would reach the model."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
