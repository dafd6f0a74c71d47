"""Text to ids and back, against reference ids and by hand."""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from jserve.config import ModelOptions
from jserve.errors import ConfigError, RequestError
from jserve.tokenizer.chat_template import ChatTemplate
from jserve.tokenizer.gguf_vocab import build_pipeline
from jserve.tokenizer.loader import load_tokenizer
from jserve.tokenizer.sources import TokenizerSource, byte_source
from jserve.tokenizer.tokenizer import Tokenizer
from jserve.weights.checkpoint import Checkpoint, open_checkpoint

CASES = json.loads((Path(__file__).parent / "data" / "smollm2-135m.json").read_text())["cases"]
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(open_checkpoint(ModelOptions(model_path="smollm2-135m")))


def render(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages, **{"add_generation_prompt": False, **options})


def byte_metadata(pre: str, **more: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level vocabulary without merges."""
    tokens = json.loads(byte_source(256).pipeline.to_str())["model"]["vocab"]
    prefix = "tokenizer.ggml."
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": sorted(tokens, key=tokens.__getitem__),
        **more,
    }
    return {prefix + key: value for key, value in metadata.items()}


def spm_metadata(**more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary of Gemma's kind: byte tokens, user-defined runs, scores for
    merges.
    """
    normal = {"▁": -9, "a": -9, "b": -9, "ab": -1, "▁a": -2, "▁ab": -3, "ba": -4}
    tokens = ["<unk>", "<s>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    runs = ["  ", "   ", "\n\n"]
    metadata = {
        "model": "llama",
        "tokens": [*tokens, *runs, *normal],
        "token_type": [*kinds, 4, 4, 4, *[1] * len(normal)],
        "scores": [0.0] * (len(tokens) + len(runs)) + [float(s) for s in normal.values()],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": False,
        **more,
    }
    return {"tokenizer.ggml." + key: value for key, value in metadata.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_prompts_have_the_reference_ids(smollm2: Tokenizer, case: dict[str, Any]) -> None:
    if case["kind"] == "raw":
        ids = smollm2.encode(case["prompt"])
    else:
        ids = smollm2.apply_chat_template(case["messages"])
    assert ids == case["prompt_ids"]
    assert smollm2.decode(case["output_ids"], skip_special_tokens=False) == case["output_text"]


def test_smollm2_splits_digits_before_bytes(smollm2: Tokenizer) -> None:
    assert smollm2.encode("\n\n1. Milk")[:2] == [1116, 33]
    assert len(smollm2.encode("12345")) == 5
    assert smollm2.eos_token_ids == (2,)
    assert (smollm2.bos_token_id, smollm2.vocab_size) == (1, 49152)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["Ġ", "1", "2", "3", "4", "ĠDON", "'", "T"]),
        ("gpt-2", ["Ġ1234", "ĠDON", "'", "T"]),
        ("default", ["Ġ1234", "ĠDON", "'", "T"]),
        ("llama-bpe", ["Ġ", "123", "4", "ĠDON", "'T"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4", "ĠDON", "'T"]),
        ("tekken", ["Ġ", "1", "2", "3", "4", "ĠDON", "'T"]),
    ],
)
def test_each_pre_tokenizer_splits_its_way(pre: str, expected: list[str]) -> None:
    pipeline = build_pipeline(byte_metadata(pre))
    pieces = pipeline.pre_tokenizer.pre_tokenize_str(" 1234 DON'T")
    assert [piece for piece, _ in pieces] == expected


def test_an_unknown_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"pre-tokenizer 'martian' is not supported; known: .*smollm"
    ):
        build_pipeline(byte_metadata("martian"))
    with pytest.raises(ConfigError, match="tokenizer 'rwkv' is not supported; known: gpt2, llama"):
        build_pipeline(byte_metadata("gpt-2", model="rwkv"))
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        build_pipeline({})


def test_sentence_piece_merges_follow_scores_and_runs_of_blanks_stay_whole() -> None:
    pipeline = build_pipeline(spm_metadata())
    cut = lambda text: pipeline.encode(text, add_special_tokens=False).tokens  # noqa: E731
    assert cut("aba") == ["ab", "a"]  # −1 beats "ba"
    assert cut(" ab") == ["▁ab"]
    assert cut("a  b") == ["a", "▁▁", "b"]
    assert cut("a     a") == ["a", "▁▁▁", "▁▁", "a"]  # longest from the left, and not "▁a"
    assert cut("a▁ a") == ["a", "▁▁", "a"]
    assert cut("\n\n\n") == ["\n\n", "<0x0A>"]
    assert pipeline.encode("a").tokens == ["<s>", "a"]
    with_prefix = build_pipeline(spm_metadata(add_space_prefix=True, add_bos_token=False))
    assert with_prefix.encode("ab").tokens == ["▁ab"]
    assert with_prefix.decode(with_prefix.encode("ab").ids) == "ab"


def test_bytes_of_tokens_concatenate_to_the_text(smollm2: Tokenizer) -> None:
    text = "naïve 日本語 🎉👩‍👩‍👧\n\tx"
    ids = smollm2.encode(text)
    assert b"".join(smollm2.id_to_bytes(i) for i in ids) == text.encode()
    assert smollm2.decode(ids) == text
    broken = next(i for i in ids if smollm2.id_to_text(i) == "\ufffd")
    assert len(smollm2.id_to_bytes(broken)) >= 1


def test_special_and_unknown_ids_when_decoding(smollm2: Tokenizer) -> None:
    ids = [1, *smollm2.encode("hi"), 2]
    assert smollm2.decode(ids) == "hi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    assert smollm2.id_to_text(2) == "<|im_end|>"
    assert (smollm2.decode([10**6]), smollm2.id_to_bytes(10**6)) == ("", b"")


def test_sentence_piece_bytes_and_leading_blank(tmp_path: Path) -> None:
    metadata = spm_metadata(add_space_prefix=True)
    tokenizer = load_tokenizer(Checkpoint("gguf", tmp_path, {}, {}, metadata))
    ids = tokenizer.encode("ab é ab")
    assert tokenizer.decode(ids) == "ab é ab"
    assert tokenizer.id_to_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizer.id_to_bytes(ids[1]) == b" ab"
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((2,), 1)


def test_saved_files_give_the_same_tokenizer(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2.source.save(tmp_path)
    checkpoint = Checkpoint("safetensors", tmp_path, {"eos_token_id": 2}, {"eos_token_id": [2, 0]})
    again = load_tokenizer(checkpoint)
    for case in CASES[:4]:
        assert again.encode(case["prompt"]) == smollm2.encode(case["prompt"])
    assert again.apply_chat_template(USER) == smollm2.apply_chat_template(USER)
    assert again.eos_token_ids == (0, 2)
    assert again.bos_token_id == smollm2.bos_token_id
    assert again.template_hash == smollm2.template_hash
    other = load_tokenizer(
        Checkpoint("dummy", Path("x.json"), {}, {}), str(tmp_path / "tokenizer.json"), "{{ 'hi' }}"
    )
    assert other.apply_chat_template(USER) == smollm2.encode("hi")


def test_a_text_is_encoded_whole_whatever_tokenizer_json_says_of_batches(tmp_path: Path) -> None:
    files = byte_source(260)
    for set_up, length in (
        (lambda pipeline: pipeline.enable_truncation(3), 3),
        (lambda pipeline: pipeline.enable_padding(length=16, pad_id=0, pad_token="<259>"), 16),
    ):
        set_up(files.pipeline)
        assert len(files.pipeline.encode("short").ids) == length
        files.save(tmp_path)
        tokenizer = load_tokenizer(Checkpoint("safetensors", tmp_path, {}, {}))
        assert tokenizer.encode("short") == list(b"short")
        assert Tokenizer(TokenizerSource(files.pipeline)).encode("short") == list(b"short")


def test_what_any_file_calls_the_end_ends_a_generation(tmp_path: Path) -> None:
    files = byte_source(260)
    files.pipeline.add_special_tokens(["<|eom_id|>"])
    dataclasses.replace(files, special={"eos_token": "<257>"}).save(tmp_path)
    config = {"eos_token_id": 1, "text_config": {"eos_token_id": (2,)}}
    checkpoint = Checkpoint("safetensors", tmp_path, config, {"eos_token_id": [3, 1]})
    assert load_tokenizer(checkpoint).eos_token_ids == (1, 2, 3, 257, 260)


def test_loading_imports_neither_torch_nor_jax(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2.source.save(tmp_path)
    program = (
        "import sys; from pathlib import Path\n"
        "from jserve.tokenizer.loader import load_tokenizer\n"
        "import jserve.tokenizer.detokenizer\n"
        "from jserve.weights.checkpoint import Checkpoint\n"
        f"t = load_tokenizer(Checkpoint('safetensors', Path({str(tmp_path)!r}), {{}}, {{}}))\n"
        "assert t.encode('hello')\n"
        "print('transformers' in sys.modules, *(m for m in ('torch', 'jax') if m in sys.modules))"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr


@pytest.mark.parametrize("size", [40, 256, 1000])
def test_random_weights_get_a_tokenizer_that_covers_the_vocabulary(size: int) -> None:
    checkpoint = Checkpoint("dummy", Path("tiny.json"), {"vocab_size": size, "eos_token_id": 3}, {})
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.vocab_size == size
    assert all(tokenizer.id_to_bytes(i) for i in range(size))
    ids = tokenizer.encode("héllo")
    assert ids and max(ids) < size
    if size >= 256:
        assert ids == list("héllo".encode())
        assert tokenizer.decode(ids) == "héllo"
    assert tokenizer.eos_token_ids == (3,)
    assert tokenizer.apply_chat_template(USER)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer found .*pass --tokenizer-path"):
        load_tokenizer(Checkpoint("safetensors", tmp_path, {}, {}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(Checkpoint("safetensors", tmp_path, {}, {}))


def test_text_without_utf8_is_a_bad_request() -> None:
    with pytest.raises(RequestError, match="lone surrogates") as caught:
        Tokenizer(byte_source(256)).encode("a\ud800")
    assert caught.value.param == "text"


def test_a_tokenizer_path_that_is_nothing_is_refused() -> None:
    checkpoint = Checkpoint("dummy", Path("x.json"), {}, {})
    with pytest.raises(ConfigError, match=r"--tokenizer-path no/such/folder: no such file"):
        load_tokenizer(checkpoint, "no/such/folder")


def test_a_decoder_that_cannot_stream_is_refused() -> None:
    pipeline = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))
    pipeline.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(TokenizerSource(pipeline))


def test_words_without_a_decoder_are_joined_by_blanks() -> None:
    pipeline = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    assert (
        Tokenizer(TokenizerSource(pipeline)).decode([0, 1, 0])
        == "a b a"
        == pipeline.decode([0, 1, 0])
    )


def test_templates_have_the_usual_helpers() -> None:
    year = str(datetime.datetime.now().year)
    assert render("{{ strftime_now('%Y') }}") == year
    tools = [{"name": "f", "doc": "a<b & ü"}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "f", "doc": "a<b & ü"}]'
    assert (
        render("{{ bos_token }}{% generation %}{{ messages[0].content }}{% endgeneration %}")
        == "<s>hi"
    )
    assert render("{% for m in messages %}{% break %}{% endfor %}x") == "x"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"
    assert render("{% if tools is none %}none{% endif %}") == "none"


def test_a_template_may_refuse_but_not_escape() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"
    for source in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 // (messages | length - 1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ):
        with pytest.raises(RequestError):
            render(source)
    with pytest.raises(ConfigError, match="line 2"):
        render("ok\n{% nope %}")


def test_the_last_message_can_be_continued(smollm2: Tokenizer) -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer "}]
    ids = smollm2.apply_chat_template(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    text = smollm2.decode(ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nThe answer ")
    assert messages[-1]["content"] == "The answer "
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "So"}]}]
    shown = "{{ messages[0].content[0].text | trim }}!"
    assert render(shown, parts, continue_final_message=True) == "So"
    for source, error in (("x", "does not show"), ("{{ messages }}", "exclude each other")):
        with pytest.raises(RequestError, match=error):
            render(
                source, continue_final_message=True, add_generation_prompt=error.startswith("excl")
            )


def test_tools_choose_their_own_template() -> None:
    tokenizer = Tokenizer(
        byte_source(256, templates={"default": "plain", "tool_use": "{{ tools[0] }}"})
    )
    assert tokenizer.decode(tokenizer.apply_chat_template(USER)) == "plain"
    assert tokenizer.decode(tokenizer.apply_chat_template(USER, tools=["f"])) == "f"


def test_without_a_template_chat_is_a_bad_request(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_source(256))
    assert not tokenizer.has_chat_template
    assert tokenizer.template_hash is None
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template(USER)
    checkpoint = Checkpoint("dummy", Path("x.json"), {"vocab_size": 256}, {})
    file = tmp_path / "mine.jinja"
    file.write_text("[{{ messages[0].content }}]")
    assert bytes(load_tokenizer(checkpoint, None, str(file)).apply_chat_template(USER)) == b"[hi]"
    with pytest.raises(ConfigError, match=r"--chat-template nothing.jinja"):
        load_tokenizer(checkpoint, None, "nothing.jinja")
