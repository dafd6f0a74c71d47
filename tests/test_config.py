"""Options: names, defaults, checks, the three ways in, and `resolve` as a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from jserve.config import (
    Config,
    DeviceFacts,
    ModelOptions,
    Resolved,
    add_arguments,
    resolve,
    unknown_option,
)
from jserve.config.options import all_options
from jserve.errors import ConfigError
from jserve.models.registry import build_model, parse_config
from jserve.types import ModelConfig, RopeConfig
from sharding.mesh import make_mesh
from sharding.rules import TP, Rules

GIB = 1 << 30
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
NO_RADIX = {"disable_radix_cache": True}
CPU = DeviceFacts("cpu", "cpu", 8, 16 * GIB)
H200 = DeviceFacts("gpu", "NVIDIA H200", 1, 139 * GIB)
A100 = DeviceFacts("gpu", "NVIDIA A100", 1, 40 * GIB, "8.0")
V5E = DeviceFacts("tpu", "TPU v5 lite", 4, 16 * GIB)
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position=8192,
    rope=RopeConfig(theta=10000.0),
    dtype="bfloat16",
)


def resolved(device: DeviceFacts = CPU, model: ModelConfig = MODEL, **flags) -> Resolved:
    return resolve(Config.from_flags(model_path="m", **flags), model, device)


def parse(*argv: str) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return Config.from_namespace(parser.parse_args(argv))


def test_flat_names_are_unique_over_the_sections() -> None:
    names = [option.name for _, option in all_options()]
    assert len(names) == len(set(names)) == len(Config.from_flags(model_path="m").flat())


def test_sglang_defaults_are_kept() -> None:
    flat = Config.from_flags(model_path="m").flat()
    expected = {
        "host": "127.0.0.1",
        "port": 30000,
        "schedule_policy": "fcfs",
        "max_prefill_tokens": 16384,
        "schedule_conservativeness": 1.0,
        "stream_interval": 1,
        "watchdog_timeout": 300.0,
        "log_level": "info",
        "tp_size": 1,
        "load_format": "auto",
        "enable_cache_report": False,
    }
    assert {name: flat[name] for name in expected} == expected


def test_every_flag_parses_back_to_the_value_it_was_given() -> None:
    for name, value in Config.from_flags(model_path="m").flat().items():
        if name == "model_path" or value is True or value is False:
            continue
        options = {option.name: option for _, option in all_options()}
        choices, low = (options[name].metadata[key] for key in ("choices", "low"))
        is_text = "str" in str(options[name].type)
        text = choices[-1] if choices else "some_text" if is_text else str(max(low or 0, 0) or 1)
        flat = parse("--model-path", "m", "--" + name.replace("_", "-"), text).flat()
        assert str(flat[name]).removesuffix(".0") == text.removesuffix(".0"), name


def test_switches_are_off_until_given() -> None:
    assert parse("--model", "m").cache.disable_radix_cache is False
    assert parse("--model", "m", "--disable-radix-cache").cache.disable_radix_cache is True


def test_command_line_wins_over_the_yaml_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model-path: from-file\npage_size: 64\nenable-metrics: true\n")
    config = parse("--config", str(file), "--page-size", "1")
    assert config.model.model_path == "from-file"
    assert config.cache.page_size == 1
    assert config.server.enable_metrics is True
    assert Config.from_yaml(str(file), port=0).server.port == 0


def test_the_command_line_switches_off_what_the_file_switches_on(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model-path: fake\nenable-metrics: true\nlog-requests: true\n")
    config = parse("--config", str(file), "--no-enable-metrics", "--disable-radix-cache")
    assert not config.server.enable_metrics
    assert config.server.log_requests and config.cache.disable_radix_cache


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a list\n", "must map flag names to values"),
        ("model-path: [unclosed\n", "cannot be read"),
        ("model-path: m\npage-sise: 4\n", "did you mean --page-size"),
        ("model-path: m\npage-size: big\n", r"--page-size must be int \| None, got 'big'"),
        ("model-path: m\nport: 1\n\nport: 2\n", "line 4: port was given in line 2; give it once"),
        ("page-size: 4\nmodel-path: m\npage_size: 4\n", "line 3: page_size was given in line 1"),
        ("model: m\nmodel-path: m\n", "line 2: model-path was given in line 1"),
        ("model: m\nno-enable-metrics: true\n", "command line; write enable-metrics: false"),
        ("model: m\nno_log_requests: false\n", "command line; write log-requests: false"),
        ("model: m\nno-such-flag: true\n", "unknown option --no-such-flag"),
        ("model: m\n--page-size: 4\n", "line 2: write page-size, without dashes in front"),
        ("model: m\ncache: {page-size: 4}\n", "line 2: cache must be one value, not a mapping"),
        ("model: m\npage-size: [4]\n", "line 2: page-size must be one value, not a list"),
        ("model: m\n1: 4\n", "unknown option --1"),
        ("model: m\ntrue: 4\n", "unknown option --true"),
        ("model: m\n? [a, b]\n: 4\n", "line 2: a list is no name of a flag"),
        ("model: m\n<<: {page-size: 4}\n", "line 2: << must be one value, not a mapping"),
        ("model: m\n'': 4\n", "unknown option --"),
        ("model: m\nport:\n", "--port must be int, got None"),
        ("model: m\nport: 'x'\n", "--port must be int, got 'x'"),
        ("model: m\nport: '30000'\n", "--port must be int, got '30000'"),
        ("model: m\nport: 0x10\n", "--port must be int, got '0x10'"),
        ("model: m\nport: 50:00\n", "--port must be int, got '50:00'"),
        ("model: m\nport: 1.0\n", "--port must be int, got '1.0'"),
        ("model: m\nport: on\n", "--port must be int, got 'on'"),
        ("model: m\nenable-metrics: 1\n", "--enable-metrics must be bool, got '1'"),
        ("model: m\nenable-metrics: 'yes'\n", "--enable-metrics must be bool, got 'yes'"),
        ("model: m\nenable-metrics:\n", "--enable-metrics must be bool, got None"),
        ("model: m\n--- \nmodel: n\n", "cannot be read: expected a single document"),
        ("a: &a [1]\nb: *c\n", "cannot be read: found undefined alias"),
        ("[" * 5000, "cannot be read"),
        ("", "must map flag names to values, but is empty"),
        ("# nothing\n", "but is empty"),
        ("m", "but holds one value"),
        ("\0", "cannot be read"),
    ],
)
def test_a_bad_yaml_file_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        Config.from_yaml(str(file))
    assert "\n" not in str(error.value)


def test_a_yaml_file_is_read_as_the_command_line_is(tmp_path: Path) -> None:
    """Not as YAML 1.1 would: off is no text there, 0123 octal, 12:30 a number, 1e5 a text."""
    file = tmp_path / "serve.yaml"
    text = {"recompile-guard": "off", "api-key": "0123", "revision": "1e5"}
    text |= {"served-model-name": "yes", "tokenizer-path": "2024-01-01", "host": "12:30"}
    numbers = {"port": "030000", "context-length": "1_000", "watchdog-timeout": "1e5"}
    given = {**text, **numbers, "schedule-conservativeness": "2", "tp": "2", "model": "m"}
    switches = "enable-metrics: yes\nlog-requests: ON\nenable-trace: no\n"
    nothing = "page-size:\nchat-template: ~\n"
    lines = [f"{name}: {value}\n" for name, value in given.items()]
    file.write_text("".join(lines) + switches + nothing)
    flags = [word for name, value in given.items() for word in ("--" + name, value)]
    expected = parse(*flags, "--enable-metrics", "--log-requests")
    assert Config.from_yaml(str(file)) == expected
    assert expected.execution.recompile_guard == "off" and expected.server.api_key == "0123"
    assert expected.server.port == 30000 and expected.server.watchdog_timeout == 1e5


def test_what_yaml_writes_of_a_configuration_is_read_as_that(tmp_path: Path) -> None:
    odd = ["off", "0123", "null", "a: b", "# no", "x\ny  ", "12:30", "'q\"", "word " * 40]
    given: list[dict[str, Any]] = [{"chat_template": text} for text in odd]
    given += [{"watchdog_timeout": number} for number in (1e6, 2.5, 3)]
    file = tmp_path / "serve.yaml"
    for flags in given:
        config = Config.from_flags(model_path="m", enable_metrics=True, **flags)
        file.write_text(yaml.safe_dump(config.flat()))
        assert Config.from_yaml(str(file)) == config, flags


def test_a_yaml_file_that_refers_to_itself_over_and_over_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    lines = [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 64)]
    file.write_text("model: &a0 m\n" + "".join(lines))
    with pytest.raises(ConfigError, match="line 2: a1 must be one value") as error:
        Config.from_yaml(str(file))
    assert len(str(error.value)) < 200


def test_a_folder_is_no_yaml_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: .* Is a directory"):
        Config.from_yaml(str(tmp_path))


def test_a_negated_switch_is_not_for_python_nor_called_unknown_where_its_section_is_not() -> None:
    with pytest.raises(ConfigError, match="command line; write enable_metrics=False"):
        Config.from_flags(model_path="m", no_enable_metrics=True)
    message = "--no-enable-metrics is not for this command"
    assert unknown_option("no_enable_metrics") == message
    assert unknown_option("no_page_size").startswith("unknown option --no-page-size")


def test_a_missing_yaml_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--config /nowhere\.yaml cannot be read"):
        Config.from_yaml("/nowhere.yaml")


def test_short_names_are_those_of_the_command_line() -> None:
    config = Config.from_flags(model="m", tp=2)
    assert (config.model.model_path, config.execution.tp_size) == ("m", 2)
    with pytest.raises(ConfigError, match="tp and tp_size are one option; give it once"):
        Config.from_flags(model_path="m", tp=2, tp_size=2)


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown option --tp-sise; did you mean --tp-size"):
        Config.from_flags(model_path="m", tp_sise=2)
    assert unknown_option("zzzzzz") == "unknown option --zzzzzz"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model_path": ""}, "--model-path is required"),
        ({"page_size": "16"}, r"--page-size must be int \| None, got '16'"),
        ({"page_size": True}, r"--page-size must be int \| None, got True"),
        ({"tp_size": None}, "--tp-size must be int, got None"),
        ({"dp_size": 10**20}, r"--dp-size must be in \[1, 4096\], got 1"),
        ({"max_total_tokens": 10**20}, r"--max-total-tokens must be in \[1, 2000000000\], got 1"),
        ({"watchdog_timeout": math.inf}, r"--watchdog-timeout must be in \[1, 1000000\], got inf"),
        ({"grammar_compile_timeout": 1e20}, "--grammar-compile-timeout must be in"),
        ({"req_running_timeout": math.nan}, "--req-running-timeout must be in .*, got nan"),
        ({"schedule_conservativeness": math.inf}, "--schedule-conservativeness must be in"),
        (
            {"tokenizer_path": ""},
            "--tokenizer-path must be a text without blanks around it, got ''",
        ),
        ({"revision": " "}, "--revision must be a text"),
        ({"served_model_name": ""}, "--served-model-name must be a text"),
        ({"chat_template": "\n"}, "--chat-template must be a file or a Jinja text"),
        ({"otlp_traces_endpoint": "a b"}, "--otlp-traces-endpoint must be an address"),
        ({"compilation_cache_dir": ""}, "--compilation-cache-dir must be a text"),
        ({"page_size": 0}, r"--page-size must be in \[1, 1024\], got 0"),
        ({"port": 65536}, "--port must be in"),
        ({"tp_size": 0}, r"--tp-size must be in \[1, 4096\], got 0"),
        ({"tp_size": 1.5}, "--tp-size must be int, got 1.5"),
        ({"disable_radix_cache": "yes"}, "--disable-radix-cache must be bool, got 'yes'"),
        ({"dtype": "half"}, "--dtype must be one of auto, float32, bfloat16, got half"),
        ({"mem_fraction_static": 1}, "--mem-fraction-static must be in"),
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static must be in"),
        ({"chunked_prefill_size": -2}, "--chunked-prefill-size must be >= -1, got -2"),
        ({"schedule_policy": "lifo"}, "--schedule-policy must be one of"),
        ({"metrics_prefix": "bad prefix"}, "--metrics-prefix must be letters, .* got 'bad prefix'"),
        ({"metrics_prefix": ""}, "--metrics-prefix must be"),
        ({"metrics_prefix": "a\n"}, "--metrics-prefix must be"),
        ({"api_key": " key"}, "--api-key must be"),
    ],
)
def test_a_bad_value_is_refused_by_name(flags: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_flags(**{"model_path": "m", **flags})


def test_a_tree_built_by_hand_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="--context-length must be >= 2"):
        Config(model=ModelOptions(model_path="m", context_length=1))


def test_an_int_will_do_for_a_float() -> None:
    assert Config.from_flags(model_path="m", watchdog_timeout=5).server.watchdog_timeout == 5


RANKED = {"enable_priority_scheduling": True}
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
RESOLVE = [
    # device, flags, what comes out
    (CPU, {}, {"dtype": "float32", "kv_dtype": "float32", "num_slots": 32, "page_size": 16}),
    (CPU, {}, {"chunked_prefill_size": 256, "max_prefill_tokens": 16384, "context_length": 8192}),
    (CPU, {}, {"mixed": True, "radix": True, "overlap_depth": 1, "policy": "fcfs", "tp_size": 1}),
    (CPU, {}, {"max_total_tokens": 2 * GIB // (2 * 30 * 3 * 64 * 4) // 16 * 16}),
    (CPU, {"tp_size": 6}, {"max_total_tokens": 2 * GIB // (2 * 30 * 6 * 64 * 4) // 16 * 16}),
    (CPU, {"context_length": 64, "max_running_requests": 2}, {"max_total_tokens": 2 * (64 + 16)}),
    (CPU, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_dtype": "bfloat16"}),
    (CPU, {"kv_cache_dtype": "bfloat16"}, {"dtype": "float32", "kv_dtype": "bfloat16"}),
    (CPU, {"kv_cache_dtype": "fp8_e4m3"}, {"dtype": "float32", "kv_dtype": "float8_e4m3fn"}),
    (CPU, {"kv_cache_dtype": "fp8_e5m2"}, {"max_total_tokens": 2 * GIB // 11520 // 16 * 16}),
    (CPU, {"kv_cache_dtype": "bfloat16"}, {"max_total_tokens": GIB // 11520 // 16 * 16}),
    (H200, FP8, {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"}),
    (H200, {**FP8, "attention_backend": "jax_triton"}, {"kv_dtype": "float8_e4m3fn"}),
    (A100, {"kv_cache_dtype": "fp8_e5m2"}, {"kv_dtype": "float8_e5m2"}),
    (CPU, {"disable_overlap_schedule": True}, {"overlap_depth": 0}),
    (CPU, {"disable_mixed_chunk": True, **NO_RADIX}, {"radix": False, "mixed": False}),
    (CPU, {**RANKED, "schedule_policy": "lof", "retraction_policy": "priority"}, {"policy": "lof"}),
    (CPU, {}, {"mixed_chunk_size": 64}),
    (CPU, {"chunked_prefill_size": 32}, {"mixed_chunk_size": 32}),
    (CPU, {"mixed_chunk_size": 48}, {"mixed_chunk_size": 48}),
    (H200, {}, {"mixed_chunk_size": 512}),
    (CPU, {"max_total_tokens": 1000, "page_size": 64}, {"max_total_tokens": 960}),
    (CPU, {"chunked_prefill_size": 65}, {"chunked_prefill_size": 80}),
    (CPU, {"chunked_prefill_size": 1}, {"chunked_prefill_size": 16}),
    (CPU, {"chunked_prefill_size": 9000}, {"chunked_prefill_size": 8192}),
    (CPU, {"max_prefill_tokens": 64}, {"chunked_prefill_size": 64, "max_prefill_tokens": 64}),
    (CPU, {"context_length": 100}, {"context_length": 100, "chunked_prefill_size": 112}),
    (H200, {}, {"dtype": "bfloat16", "num_slots": 256, "chunked_prefill_size": 8192}),
    (H200, {}, {"max_total_tokens": None, "mem_fraction_static": 0.909}),
    (H200, {"mem_fraction_static": 0.5}, {"mem_fraction_static": 0.5}),
    (H200, {"chunked_prefill_size": -1}, {"chunked_prefill_size": 8192}),
    (H200, {"attention_backend": "pallas_triton"}, {"attention_backend": "pallas_triton"}),
    (V5E, {"tp_size": 4}, {"chunked_prefill_size": 2048, "tp_size": 4, "num_slots": 256}),
    (V5E, {"dp_size": 2, "tp_size": 2, "max_running_requests": 301}, {"num_slots": 150}),
    (V5E, {"dp_size": 4}, {"num_slots": 256}),
    (V5E, {}, {"page_size": 16, "attention_backend": None}),
    (V5E, {"max_running_requests": 512}, {"page_size": 32, "chunked_prefill_size": 2048}),
    (V5E, {"max_running_requests": 512, "max_total_tokens": 999}, {"max_total_tokens": 992}),
    (V5E, {"max_running_requests": 512, "dp_size": 2}, {"page_size": 16}),
    (V5E, {"attention_backend": "mosaic_tpu"}, {"attention_backend": "mosaic_tpu"}),
    (V5E, FP8, {"kv_dtype": "float8_e4m3fn"}),  # 3 heads are stored as 4
    (dataclasses.replace(H200, memory_bytes=40 * GIB), {}, {"chunked_prefill_size": 4096}),
    (dataclasses.replace(H200, memory_bytes=None), {}, {"mem_fraction_static": 0.85}),
]  # fmt: skip


@pytest.mark.parametrize(("device", "flags", "expected"), RESOLVE)
def test_resolve_derives(device: DeviceFacts, flags: dict, expected: dict) -> None:
    found = dataclasses.asdict(resolved(device, **flags))
    assert {name: found[name] for name in expected} == expected


def test_chunks_are_off_for_contexts_over_max_prefill_tokens_too() -> None:
    long = dataclasses.replace(MODEL, max_position=131072)
    found = resolved(H200, long, chunked_prefill_size=-1)
    assert (found.chunked_prefill_size, found.max_prefill_tokens) == (131072, 131072)


def test_a_bigger_device_has_the_biggest_chunks() -> None:
    long = dataclasses.replace(MODEL, max_position=131072)
    found = resolved(dataclasses.replace(H200, memory_bytes=180 * GIB), long)
    assert found.chunked_prefill_size == 16384


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_auto_dtype_is_the_checkpoints_on_an_accelerator_and_float32_on_cpu(dtype: str) -> None:
    model = dataclasses.replace(MODEL, dtype=dtype)
    assert resolved(CPU, model).dtype == "float32"
    assert resolved(H200, model).dtype == ("float32" if dtype == "float32" else "bfloat16")


@pytest.mark.parametrize(
    ("device", "flags", "names"),
    [
        (CPU, {"context_length": 8193}, ("--context-length", "--model-path")),
        (CPU, {"page_size": 128, "context_length": 64}, ("--page-size", "--context-length")),
        (CPU, {"max_total_tokens": 8}, ("--max-total-tokens", "--page-size")),
        (CPU, {"schedule_policy": "lpm", **NO_RADIX}, ("--schedule-policy", "--disable-radix")),
        (CPU, {"schedule_policy": "dfs-weight", **NO_RADIX}, ("--disable-radix-cache",)),
        (CPU, {"mixed_chunk_size": 8, "disable_mixed_chunk": True}, ("--mixed-ch", "--disable-mi")),
        (CPU, {"dtype": "bfloat16", "kv_cache_dtype": "float32"}, ("--kv-cache-dtype", "--dtype")),
        (H200, {**FP8, "attention_backend": "mosaic_gpu"}, ("--kv-cache-d", "--attention-b")),
        (A100, FP8, ("--kv-cache-dtype fp8_e4m3", "8.0", "fp8_e5m2")),
        (V5E, {**FP8, "tp_size": 4}, ("--kv-cache-dtype", "--tp-size 4", "1 of --model-path")),
        (CPU, {"attention_backend": "mosaic_tpu"}, ("--attention-backend", "--device")),
        (H200, {"attention_backend": "mosaic_tpu"}, ("--attention-backend", "--device")),
        (V5E, {"attention_backend": "pallas_triton"}, ("--attention-backend", "--device")),
        (V5E, {"attention_backend": "xla"}, ("--attention-backend xla", "cpu or gpu", "--device")),
        (V5E, {"dp_size": 3, "tp_size": 2}, ("--dp-size 3", "--tp-size 2", "--dp-size 2 is the")),
        (V5E, {"dp_size": 4, "max_running_requests": 3}, ("--max-running-r", "--dp-size 4")),
        (H200, {"tp_size": 2}, ("--tp-size", "--device")),
        (
            CPU,
            {"chunked_prefill_size": 512, "max_prefill_tokens": 256},
            ("--chunked-prefill-size", "--max-prefill-tokens"),
        ),
        (CPU, {"chunked_prefill_size": 0}, ("--chunked-prefill-size",)),
        (CPU, {**RANKED, "schedule_policy": "lpm"}, ("--enable-priority-sch", "lpm", "--schedule")),
        (CPU, {**RANKED, "schedule_policy": "dfs-weight"}, ("--enable-priority", "dfs-weight")),
        (CPU, {**RANKED, "schedule_policy": "random"}, ("--enable-priority", "random")),
        (CPU, {"default_priority_value": 0}, ("--default-priority-value 0", "--enable-priority")),
        (CPU, {"schedule_low_priority_values_first": True}, ("--schedule-low", "--enable-pri")),
        (CPU, {"disable_priority_preemption": True}, ("--disable-priority", "--enable-priority")),
        (CPU, {"priority_scheduling_preemption_threshold": 3}, ("-threshold 3", "--enable-prio")),
        (CPU, {"retraction_policy": "priority"}, ("--retraction-policy", "--enable-priority")),
    ],
)  # fmt: skip
def test_options_that_cannot_work_together_are_refused_and_both_named(
    device: DeviceFacts, flags: dict, names: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(device, **flags)
    assert all(name in str(error.value) for name in names), error.value


LONG = dataclasses.replace(MODEL, max_position=131072)


@pytest.mark.parametrize(("context", "slots", "page_size"), [
    (None, None, 256), (40_960, None, 64), (8192, None, 16), (None, 16, 16), (None, 600, 512),
])  # fmt: skip
def test_a_tpus_pages_are_as_large_as_its_page_tables_need(
    context: int | None, slots: int | None, page_size: int
) -> None:
    flags = {"context_length": context, "max_running_requests": slots}
    assert resolved(V5E, LONG, **flags).page_size == page_size
    assert resolved(H200, LONG, **flags).page_size == 16


@pytest.mark.parametrize(
    ("flags", "fitting"),
    [
        ({"page_size": 128}, {"page_size": 256}),
        ({"page_size": 128}, {"max_running_requests": 200}),
        ({"page_size": 128}, {"context_length": 114_560}),
        ({"max_running_requests": 2048}, {"max_running_requests": 608}),
        ({"page_size": 64, "max_running_requests": 300, "dp_size": 2},
         {"max_running_requests": 208}),
    ],
)  # fmt: skip
def test_page_tables_too_large_for_a_tpu_are_refused_with_what_fits(
    flags: dict, fitting: dict
) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(V5E, LONG, **flags)
    told = str(error.value)
    assert all(
        flag in told for flag in ("--page-size", "--max-running-requests", "--context-length")
    )
    for name, value in fitting.items():
        assert f"--{name.replace('_', '-')} {value}" in told.partition(";")[2], told
    assert resolved(V5E, LONG, **{**flags, **fitting})


@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 2), (2, 1)])
def test_float8_on_tpu_counts_the_heads_that_a_device_stores(tp_size: int, ep_size: int) -> None:
    moe = parse_config(json.loads((CONFIGS / "qwen3-30b-a3b.json").read_text()))
    flags = {**FP8, "tp_size": tp_size, "ep_size": ep_size}
    odd = dataclasses.replace(moe, num_kv_heads=2, num_heads=8)
    with pytest.raises(ConfigError, match=f"--ep-size {ep_size} leave 1 of --model-path"):
        resolved(V5E, odd, **flags)
    padded = dataclasses.replace(moe, num_kv_heads=9, num_heads=9)  # 5 a device, stored as 8
    assert resolved(V5E, padded, **flags).kv_dtype == "float8_e4m3fn"


SHAPES = {
    # billions of parameters as published, and whether the head is the embedding
    "qwen3-8b": (8.2, False),
    "qwen3-0.6b": (0.6, True),
    "llama-3.1-8b": (8.0, False),
    "smollm2-135m": (0.135, True),
    "gemma-3-270m": (0.27, True),
    "mistral-7b": (7.2, False),
    "qwen3-30b-a3b": (30.5, False),
    "gpt-oss-20b": (20.9, False),
    "deepseek-v2-lite": (15.7, False),
    "deepseek-v3": (671, False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    model = parse_config(json.loads((CONFIGS / f"{name}.json").read_text()))
    rules = Rules(make_mesh(jax.devices()[:1]), TP)
    built = build_model(model, rules, dtype="bfloat16", attention_backend=None, page_size=16)
    billions, tied = SHAPES[name]
    assert model.tie_embeddings is tied
    found = sum(math.prod(spec.shape) for spec in built.specs) / 1e9
    assert found == pytest.approx(billions, rel=0.03)


def test_every_shape_file_is_in_the_table() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == set(SHAPES)


@pytest.mark.parametrize(
    "value", [2**63, -(2**63), 10**30, 10**5000], ids=["max", "min", "1e30", "1e5000"]
)
def test_every_integer_option_fits_the_messages_that_hold_it(value: int) -> None:
    integers = [option.name for _, option in all_options() if "int" in str(option.type)]
    assert len(integers) > 20
    for name in integers:
        with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} must be in "):
            Config.from_flags(model_path="m", **{name: value})
