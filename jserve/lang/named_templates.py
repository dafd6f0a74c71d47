"""Chat templates by name, for servers that do not show their own: who says where a message begins.

Owns the table and which name a model's path suggests. A server that shows its template needs none
of them.
"""

from __future__ import annotations

import dataclasses
import re

from jserve.lang.errors import ExpressionError
from jserve.lang.roles import Messages, RoleTemplate
from jserve.tokenizer.chat_template import ChatTemplate
from jserve.types.wording import nearest_name


@dataclasses.dataclass(frozen=True, slots=True)
class _Named:
    """Text before and behind the content of each role; `system`: what is said when the program
    does not begin with a system message. `path`: models whose template it is."""

    parts: dict[str, tuple[str, str]]
    stops: tuple[str, ...] = ()
    system: str = ""
    path: str = ""

    @property
    def source(self) -> str:
        """As a Jinja template."""
        lines = []
        if self.system:
            before, behind = self.parts["system"]
            text = f"{before}{self.system}{behind}"
            lines.append(f"{{% if messages[0].role != 'system' %}}{{{{ {text!r} }}}}{{% endif %}}")
        lines.append("{% for m in messages %}")
        for role, (before, behind) in self.parts.items():
            shown = f"{{{{ {before!r} + m.content + {behind!r} }}}}"
            lines.append(f"{{% if m.role == {role!r} %}}{shown}{{% endif %}}")
        begin = self.parts["assistant"][0]
        opened = f"{{% if add_generation_prompt %}}{{{{ {begin!r} }}}}{{% endif %}}"
        return "".join([*lines, "{% endfor %}", opened])


def _tagged(begin: str, middle: str, end: str, **roles: str) -> dict[str, tuple[str, str]]:
    names = {role: role for role in ("system", "user", "assistant")} | roles
    return {role: (f"{begin}{name}{middle}", end) for role, name in names.items()}


_CHATML = _tagged("<|im_start|>", "\n", "<|im_end|>\n")
_TEMPLATES = {
    "default": _Named(
        {
            "system": ("SYSTEM:", "\n"),
            "user": ("USER:", "\n"),
            "assistant": ("ASSISTANT:", "\n"),
        }
    ),
    "chatml": _Named(_CHATML, ("<|im_end|>",), path="chatml|smollm"),
    "qwen": _Named(
        _CHATML, ("<|im_end|>",), "You are a helpful assistant.", path=r"qwen(?!.*vl).*(chat|inst)"
    ),
    "yi-1.5": _Named(
        {
            "system": ("", ""),
            "user": ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
            "assistant": ("", "<|im_end|>\n"),
        },
        ("<|im_end|>",),
        path=r"yi-1\.5.*chat",
    ),
    "llama-3-instruct": _Named(
        _tagged("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|eot_id|>",),
        path=r"llama-3.*instruct",
    ),
    "gemma-it": _Named(
        {
            "system": ("", ""),
            "user": ("<start_of_turn>user\n", "<end_of_turn>\n"),
            "assistant": ("<start_of_turn>model\n", "<end_of_turn>\n"),
        },
        ("<end_of_turn>",),
        path=r"gemma.*it",
    ),
    "vicuna_v1.1": _Named(
        {
            "system": ("", " "),
            "user": ("USER:", " "),
            "assistant": ("ASSISTANT:", "</s>"),
        },
        system="A chat between a curious user and an artificial intelligence assistant. The "
        "assistant gives helpful, detailed, and polite answers to the user's questions.",
        path=r"vicuna",
    ),
    "mistral": _Named(
        {
            "system": ("[SYSTEM_PROMPT] ", " [/SYSTEM_PROMPT]"),
            "user": ("[INST] ", " [/INST]"),
            "assistant": ("", " </s><s>"),
        },
        ("</s>",),
        path=r"mistral.*instruct",
    ),
    "deepseek-v3": _Named(
        {
            "system": ("", ""),
            "user": ("<｜User｜>", ""),
            "assistant": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        },
        ("<｜end▁of▁sentence｜>",),
        path=r"deepseek-(v3|r1)",
    ),
    "claude": _Named(
        {"system": ("", ""), "user": ("\n\nHuman: ", ""), "assistant": ("\n\nAssistant:", "")}
    ),
}  # fmt: skip


def named_template(name: str) -> RoleTemplate:
    """Raises ExpressionError for a name that is not there."""
    if name not in _TEMPLATES:
        near = nearest_name(name, _TEMPLATES)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(_TEMPLATES)}."
        raise ExpressionError(f"no chat template is called {name!r}; {hint}")
    named = _TEMPLATES[name]
    template = ChatTemplate(named.source, {})

    async def render(messages: Messages, opened: bool) -> str:
        return template.render(messages, add_generation_prompt=opened)

    return RoleTemplate(render, named.stops, reach=1)


def name_for_model(path: str) -> str:
    """The template that a model's name suggests."""
    known = (name for name, one in _TEMPLATES.items() if one.path and _suits(one.path, path))
    return next(known, "default")


def _suits(pattern: str, path: str) -> bool:
    return re.search(pattern, path, re.IGNORECASE) is not None
