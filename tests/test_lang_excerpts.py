"""Long conversations: their ends, cut out, look as in the whole, whatever the template."""

from __future__ import annotations

import asyncio
import random
import types
from typing import Any

import pytest

from jserve.errors import RequestError
from jserve.lang.backends.engine import EngineTransport
from jserve.lang.roles import RoleTemplate
from jserve.tokenizer.chat_template import ChatTemplate
from jserve.tokenizer.sources import byte_source
from jserve.tokenizer.tokenizer import Tokenizer
from tests.test_lang_roles import TEMPLATES

SPECIAL = {"bos_token": "<s>"}
SHOWN = "<{{ m.role }}>{{ m.content }}</>"
PLAIN = "{% for m in messages %}" + SHOWN + "{% endfor %}"
#: By what they do; those of the second kind carry something from message to message.
SKIPPING = TEMPLATES | {
    "marks the last": "{% for m in messages %}{{ m.content }}{% if loop.last %}<LAST>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    "ends by the last": PLAIN + "{% if messages[-1].role == 'user' %}assistant:{% endif %}",
    "counts to the last": "{% for m in messages %}{% if loop.index0 == messages|length - 1 %}[end]"
    "{% endif %}" + SHOWN + "{% endfor %}",
    "numbers": "{% for m in messages %}{{ loop.index }}." + SHOWN + "{% endfor %}"
    "{{ messages|length }} said",
    "merges": "{% for m in messages %}{% if not loop.first and messages[loop.index0 - 1].role == "
    "m.role %}{{ '\n' + m.content }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% if loop.last or messages[loop.index0 + 1].role != m.role %}</{{ m.role }}>{% endif %}"
    "{% endfor %}",
    "strips": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}",
    "strips but the last": "{% for m in messages %}<{{ m.role }}>{% if loop.last %}{{ m.content }}"
    "{% else %}{{ m.content | trim }}{% endif %}</>{% endfor %}",
    "refuses length": "{% if messages|length > 20 %}{{ raise_exception('too long') }}{% endif %}"
    + PLAIN,
    "forgets": "{% for m in messages[-15:] %}" + SHOWN + "{% endfor %}",
    "ends with the user": "{% if messages[-1].role != 'user' and add_generation_prompt %}"
    "{{ raise_exception('user last') }}{% endif %}" + PLAIN,
    "system first": "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}" + SHOWN + "{% endfor %}",
    "alternates": "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('alternate') }}{% endif %}{{ loop.index0 }}" + SHOWN + "{% endfor %}",
    "chooses": "{% set n = messages|selectattr('role', 'equalto', 'user')|list|length %}"
    + PLAIN
    + "{{ n }}",
    "twice": "{% for m in messages %}{{ loop.index }}{% endfor %}" + PLAIN,
    "backwards": "{% for m in messages[::-1] %}{{ loop.index }}{{ m.role[0] }}{% endfor %}" + PLAIN,
    "looks for the last user": "{% set ns = namespace(last=-1) %}{% for m in messages[::-1] %}"
    "{% if ns.last < 0 and m.role == 'user' %}{% set ns.last = messages|length - loop.index %}"
    "{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and "
    "loop.index0 > ns.last %}<think>{% endif %}{{ m.content }}</>{% endfor %}",
    "calls": "{% macro show(m, i) %}{{ i }}" + SHOWN + "{% endmacro %}"
    "{% for m in messages %}{{ show(m, loop.index) }}{% endfor %}",
    "forgets what it sets": "{% set n = 0 %}{% for m in messages %}{% set n = n + 1 %}{{ n }}"
    + SHOWN
    + "{% endfor %}{{ n }}",
}
CARRYING = {
    "counts": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}" + SHOWN + "{% endfor %}",
    "merges with the one before": "{% for m in messages %}{% if loop.previtem and "
    "loop.previtem.role == m.role %}{{ '\n' + m.content }}{% else %}" + SHOWN + "{% endif %}"
    "{% endfor %}",
    "breaks off": "{% for m in messages %}{% if loop.index > 30 %}{% break %}{% endif %}"
    + SHOWN
    + "{% endfor %}",
    "leaves out": "{% for m in messages if m.role != 'system' %}{{ loop.index }}" + SHOWN
    + "{% endfor %}",
    "counts down": "{% for m in messages %}{{ loop.revindex }}" + SHOWN + "{% endfor %}",
    "keeps the text": "{% set t %}" + PLAIN + "{% endset %}{{ t|length }}{{ t }}",
    "measures": "{% macro all(of) %}{% for m in of %}" + SHOWN + "{% endfor %}{% endmacro %}"
    "{{ all(messages)|length }}{{ all(messages) }}",
    "adds one": "{% for m in [{'role': 'system', 'content': 'S'}] + messages %}{{ loop.index }}"
    + SHOWN
    + "{% endfor %}{{ messages|tojson|length }}",
    "uses up": "{% set it = messages|map(attribute='role') %}{% for m in messages %}"
    "{{ it|first }}" + SHOWN + "{% endfor %}",
    "cycles": "{% set c = cycler('a', 'b', 'c') %}{% for m in messages %}{{ c.next() }}" + SHOWN
    + "{% endfor %}",
}  # fmt: skip


def conversations() -> list[list[str]]:
    rng = random.Random(3)
    any_roles = [rng.choice(["system", "user", "assistant"]) for _ in range(40)]
    turns = (["user", "assistant"], ["user", "user", "assistant"], ["user", "assistant"] * 2)
    mixed = [role for _ in range(20) for role in rng.choice(turns)]
    return [["user", "assistant"] * 20, ["system", *["user", "assistant"] * 20], any_roles, mixed]


async def texts(template: RoleTemplate, roles: list[str]) -> list[Any]:
    """What a program would add, or hear, message by message; as if it went on behind an error."""
    found: list[Any] = []
    behind = template.none
    for role in roles:
        behind, before = behind.then(role), behind
        for asked in (template.begin(before, role), template.trims(behind), template.end(behind)):
            try:
                found.append(await asked)
            except RequestError as error:
                found.append(str(error))
    return found


def both(source: str) -> tuple[RoleTemplate, RoleTemplate, list[int]]:
    """The template that renders all of it for each message, the one that renders its ends, and how
    much it has rendered of each: characters."""
    whole = ChatTemplate(source, SPECIAL)
    lengths: list[int] = []

    async def render(messages, opened):
        return whole.render(messages, add_generation_prompt=opened)

    async def ends(roles, opened):
        text = roles.cut(whole.render(roles.messages(), add_generation_prompt=opened))
        lengths.append(len(text))
        return text

    return RoleTemplate(render), RoleTemplate(render, ends=ends), lengths


@pytest.mark.parametrize("name", [*SKIPPING, *CARRYING])
def test_the_ends_of_a_conversation_look_as_in_the_whole(name: str) -> None:
    whole, ends, lengths = both((SKIPPING | CARRYING)[name])
    for roles in conversations():
        assert asyncio.run(texts(ends, roles)) == asyncio.run(texts(whole, roles))
    assert lengths or name == "adds one"  # which shows what is no message, and so is refused
    assert ends._ends is not None, "both have disagreed"


def test_a_way_to_the_ends_that_disagrees_is_not_taken_again() -> None:
    whole = ChatTemplate(PLAIN, {})
    asked: list[int] = []

    async def render(messages, opened):
        return whole.render(messages, add_generation_prompt=opened)

    async def ends(roles, opened):
        asked.append(roles.num)
        return roles.cut(whole.render(roles.messages(), add_generation_prompt=opened)) + "!"

    asyncio.run(texts(RoleTemplate(render, ends=ends), ["user", "assistant"] * 20))
    assert max(asked) == 16


async def read(source: str, num_messages: int) -> list[int]:
    """Characters of each text whose tokens an engine reads for a conversation."""
    tokenizer = Tokenizer(byte_source(256, templates={"default": source}))
    lengths: list[int] = []
    encode = tokenizer.encode

    def watched(text: str, add_special: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special)

    tokenizer.encode = watched  # type: ignore[method-assign]
    engine: Any = types.SimpleNamespace(tokenizer=tokenizer)
    template = await EngineTransport(engine).template()
    await texts(template, ["user", "assistant"] * (num_messages // 2))
    return lengths


@pytest.mark.parametrize("source", [TEMPLATES["smol"], CARRYING["counts"]])
def test_an_engine_reads_no_more_tokens_for_a_message_of_a_long_conversation(source: str) -> None:
    short, long = asyncio.run(read(source, 100)), asyncio.run(read(source, 400))
    assert sum(long) < 6 * sum(short), (sum(short), sum(long))
    assert len(long) >= 400 and sorted(long)[-10] < 600
