"""A program's text is what the chat template makes of the same messages, whatever the template."""

from __future__ import annotations

import itertools

import pytest

import jserve.lang as sgl
from jserve.errors import RequestError
from jserve.lang.board import Board
from jserve.lang.errors import ExpressionError
from jserve.lang.loop import LoopThread
from jserve.lang.named_templates import _TEMPLATES, name_for_model, named_template
from jserve.lang.roles import RoleTemplate
from jserve.lang.transcript import Transcript
from jserve.tokenizer.chat_template import ChatTemplate

SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n'+ m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (  # the system prompt goes into the first user message
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}"
    "{% for m in rest %}{% if m['role'] == 'user' %}{% if loop.first and system is defined %}"
    "{{ '[INST] ' + system + '\n\n' + m['content'] + ' [/INST]' }}{% else %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% else %}"
    "{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
    "{% if not rest %}{{ raise_exception('a user message is needed') }}{% endif %}"
)
TEMPLATES = {"smol": SMOL, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
CONVERSATIONS = (
    [("user", "Hi."), ("assistant", "Hello!"), ("user", "And now?"), ("assistant", "x\ny")],
    [("system", "Be short."), ("user", "Hi."), ("assistant", "Yes"), ("user", "<b> & 1")],
    [("user", "  spaces around  "), ("assistant", " too "), ("user", "\n\nlines\n")],
)


def template_of(source: str) -> tuple[ChatTemplate, RoleTemplate]:
    template = ChatTemplate(source, {"bos_token": "<s>"})

    async def render(messages, opened):
        return template.render(messages, add_generation_prompt=opened)

    return template, RoleTemplate(render)


@pytest.fixture(scope="module")
def loop():
    one = LoopThread()
    yield one
    one.close()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["turns", "system", "blanks"])
def test_the_text_before_every_answer_is_the_rendered_conversation(name, conversation, loop):
    template, roles = template_of(TEMPLATES[name])
    board = Board()
    transcript = Transcript(board)
    compared = 0
    if name == "gemma" and conversation[0][0] == "system":
        with pytest.raises(RequestError, match="no system"):
            loop.call(transcript.begin("system", roles))
        return
    messages: list[dict[str, str]] = []
    for role, content in conversation:
        loop.call(transcript.begin(role, roles))
        if role == "assistant" and name != "mistral":
            assert board.text == template.render(messages, add_generation_prompt=True)
            compared += 1
        for piece in (content[:3], content[3:]):
            transcript.write(piece)
        loop.call(transcript.end(role, roles))
        messages.append({"role": role, "content": content})
        if role != "system":
            assert board.text == template.render(messages, add_generation_prompt=False)
            compared += 1
    assert compared >= 3


def test_blanks_before_a_generation_count_even_where_the_template_cuts_them(loop):
    _, roles = template_of(LLAMA3)
    board = Board()
    transcript = Transcript(board)
    loop.call(transcript.begin("user", roles))
    transcript.write("name: ")
    assert board.text.endswith("name:")
    transcript.settle()
    assert board.text.endswith("name: ") and transcript.opened == "name: "


def test_roles_do_not_nest_and_end_as_they_began(loop):
    _, roles = template_of(SMOL)
    transcript = Transcript(Board())
    loop.call(transcript.begin("user", roles))
    with pytest.raises(ExpressionError, match="assistant begins inside user"):
        loop.call(transcript.begin("assistant", roles))
    with pytest.raises(ExpressionError, match="system ends, but the open role is user"):
        loop.call(transcript.end("system", roles))


def test_a_template_that_hides_a_message_is_refused(loop):
    _, roles = template_of("{{ messages[-1]['content'] }}")
    with pytest.raises(RequestError, match="does not show every message"):
        loop.call(roles.begin(roles.none.then("user"), "user"))


def test_each_structure_is_rendered_once(loop):
    seen = []

    async def render(messages, opened):
        seen.append((len(messages), opened))
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>" * opened

    roles = RoleTemplate(render)
    for _ in range(3):
        assert loop.call(roles.begin(roles.none.then("user"), "assistant")) == "<assistant>"
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("default", "SYSTEM:S\nUSER:U\nASSISTANT:"),
        (
            "chatml",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_named_templates_have_sglangs_text(name, text, loop):
    backend = sgl.TestBackend(chat_template_name=name)

    @sgl.function
    def program(s):
        s += sgl.system("S") + sgl.user("U") + sgl.assistant_begin()

    assert program.run(backend=backend).text() == text
    backend.shutdown()


def test_a_template_with_a_default_system_prompt_puts_it_first_unless_the_program_has_one(loop):
    backend = sgl.TestBackend(chat_template_name="qwen")

    @sgl.function
    def program(s, roles):
        for role in roles:
            s += {"system": sgl.system, "user": sgl.user}[role]("x")

    plain = program.run(["user"], backend=backend).text()
    assert plain.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    assert plain.count("system") == 1
    own = program.run(["system", "user"], backend=backend).text()
    assert own.startswith("<|im_start|>system\nx<|im_end|>\n<|im_start|>user\n")
    backend.shutdown()


def test_the_stops_of_a_template_are_added_to_those_of_a_gen():
    backend = sgl.TestBackend({"a": "yes<|im_end|>no"}, chat_template_name="qwen")

    @sgl.function
    def program(s):
        s += sgl.user("?") + sgl.assistant(sgl.gen("a", stop="\n"))

    assert program.run(backend=backend)["a"] == "yes"
    assert backend.calls[0].sampling.stop == ("\n", "<|im_end|>")
    backend.shutdown()


def test_every_named_template_shows_every_message(loop):
    names = "default chatml qwen yi-1.5 llama-3-instruct gemma-it vicuna_v1.1 mistral deepseek-v3"
    for name, first in itertools.product([*names.split(), "claude"], ("system", "user")):
        template = named_template(name)
        board = Board()
        transcript = Transcript(board)
        for role in dict.fromkeys((first, "user", "assistant")):
            loop.call(transcript.begin(role, template))
            transcript.write(f"({role})")
            loop.call(transcript.end(role, template))
        assert "(user)" in board.text and board.text.count("(assistant)") == 1, name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-instruct"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen"),
        ("google/gemma-3-1b-it", "gemma-it"),
        ("/models/smollm2-135m", "chatml"),
        ("gpt2", "default"),
    ],
)
def test_a_models_path_suggests_its_template(path, name):
    assert name_for_model(path) == name


def test_an_unknown_template_is_refused_with_the_nearest_name():
    with pytest.raises(ExpressionError, match="did you mean chatml"):
        sgl.TestBackend(chat_template_name="chatlm")


def test_named_templates_look_one_message_back_and_see_no_more_in_the_whole() -> None:
    loop = LoopThread()
    for name in _TEMPLATES:
        near = named_template(name)
        whole = RoleTemplate(near._render, near.stops)
        for roles in itertools.product(("system", "user", "assistant"), repeat=3):
            for count in range(3):
                before, role = roles[:count], roles[count]
                both = [(one, one.none.then(*before)) for one in (near, whole)]
                begins = [loop.call(one.begin(behind, role)) for one, behind in both]
                ends = [loop.call(one.end(behind.then(role))) for one, behind in both]
                assert begins[0] == begins[1] and ends[0] == ends[1], (name, roles, count)
    loop.close()
