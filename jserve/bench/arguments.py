"""Flags of `jserve bench`, with the names and defaults of SGLang's benchmarks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from jserve.bench import elsewhere
from jserve.bench.workload import DATASETS, TEXTS, WorkloadOptions

#: --backend → the wire.py it asks through.
BACKENDS = {
    **dict.fromkeys(("jserve", "sglang", "sglang-native"), "native"),
    **dict.fromkeys(("jserve-oai", "sglang-oai", "vllm"), "openai"),
    **dict.fromkeys(("jserve-oai-chat", "sglang-oai-chat", "vllm-chat"), "chat"),
}
_ABOUT = {
    "dataset_path": f"file of {', '.join(TEXTS)}: ShareGPT's JSON, for custom a JSON object a line",
    "sharegpt_output_len": "sharegpt, custom: tokens of each answer [the file's]",
    "sharegpt_context_len": "… leave out what is longer with its answer [nothing]",
    "apply_chat_template": "… each text as the first message of a chat",
    "num_prompts": "prompts, or conversations",
    "random_input_len": "longest prompt, or turn",
    "random_output_len": "longest answer",
    "random_range_ratio": "lengths are uniform in [RATIO * LEN, LEN]",
    "gsp_num_groups": "generated-shared-prefix: groups",
    "gsp_prompts_per_group": "… questions in a group",
    "gsp_system_prompt_len": "… shared tokens",
    "gsp_question_len": "… own tokens",
    "gsp_output_len": "… answer",
    "gsp_range_ratio": "… lengths are uniform in [RATIO * LEN, LEN]",
    "gsp_ordered": "… one group after the other, not in random order",
    "num_turns": "multi-turn: turns of a conversation",
    "seed": "of workload and arrivals",
}


def add_workload(parser: argparse.ArgumentParser) -> None:
    """What is asked."""
    group = parser.add_argument_group("workload")
    for field in dataclasses.fields(WorkloadOptions):
        flag, default, about = "--" + field.name.replace("_", "-"), field.default, field.name
        if field.name == "dataset_name":
            kind, names = elsewhere.one_of(DATASETS, elsewhere.DATASETS), ", ".join(DATASETS)
            about = f"{names} [{default}]"
            group.add_argument(flag, type=kind, default=default, metavar="NAME", help=about)
        elif field.name == "dataset_path":
            about = _ABOUT[field.name]
            group.add_argument(flag, type=_readable, default="", metavar="FILE", help=about)
        elif default is False:
            group.add_argument(flag, action="store_true", help=_ABOUT[field.name])
        elif default is None:
            about = _ABOUT[field.name]
            group.add_argument(flag, type=int, metavar="INT", help=about)
        else:
            about = f"{_ABOUT[field.name]} [{default}]"
            kind = type(default)
            metavar = kind.__name__.upper()
            group.add_argument(flag, type=kind, default=default, metavar=metavar, help=about)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output-file", type=_writable, metavar="FILE", help="append the JSON line to it"
    )


def add_load(parser: argparse.ArgumentParser) -> None:
    """How an engine is loaded, over HTTP or not."""
    parser.add_argument(
        "--disable-ignore-eos", action="store_true", help="answers may end before their length"
    )
    parser.add_argument(
        "--warmup-requests",
        type=_at_least(int, 0),
        default=1,
        metavar="INT",
        help="before the clock starts [1]",
    )
    add_workload(parser)
    add_output(parser)


def add_one_batch(parser: argparse.ArgumentParser) -> None:
    for name, default in (("batch-size", 1), ("input-len", 1024), ("output-len", 16)):
        parser.add_argument(
            f"--{name}",
            type=_at_least(int, 1),
            nargs="+",
            default=[default],
            metavar="INT",
            help=f"[{default}]",
        )
    parser.add_argument("--run-name", default="default", metavar="NAME", help="[default]")
    parser.add_argument(
        "--repeat", type=int, default=3, metavar="INT", help="the best run counts [3]"
    )
    add_output(parser)


def add_serving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend",
        default="jserve",
        type=elsewhere.one_of(BACKENDS, elsewhere.BACKENDS),
        metavar="NAME",
        help="/generate: jserve, sglang, sglang-native; "
        "/v1/completions: jserve-oai, sglang-oai, vllm; "
        "/v1/chat/completions: jserve-oai-chat, sglang-oai-chat, vllm-chat [jserve]",
    )
    group.add_argument("--base-url", metavar="URL", help="[http://HOST:PORT]")
    group.add_argument("--host", default="127.0.0.1", metavar="STR", help="[127.0.0.1]")
    group.add_argument("--port", type=int, default=30000, metavar="INT", help="[30000]")
    group.add_argument("--api-key", type=_header_value, metavar="STR", help="bearer key")
    group.add_argument(
        "--header",
        nargs="+",
        type=_header,
        default=[],
        metavar="NAME=VALUE",
        help="of each request",
    )
    group.add_argument("--model", metavar="NAME", help="name in the API [the server's]")
    group.add_argument("--served-model-name", metavar="NAME", help="the same; goes before --model")
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="of texts [--model's, or the server's, if on this machine]",
    )
    group.add_argument(
        "--vocab-size", type=_at_least(int, 1), metavar="INT", help="ids are below [the server's]"
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=_at_least(float, 0),
        default=60,
        metavar="FLOAT",
        help="[60]",
    )
    group.add_argument(
        "--extra-request-body", type=_json_object, metavar="JSON", help="more fields of each body"
    )
    group.add_argument("--flush-cache", action="store_true", help="before the clock starts")
    group.add_argument(
        "--flush-cache-timeout",
        type=_at_least(float, 0),
        default=30.0,
        metavar="FLOAT",
        help="seconds that the server may take to become idle [30]",
    )
    _add_asking(parser.add_argument_group("requests"))
    _add_rates(parser.add_argument_group("load"))
    add_load(parser)
    elsewhere.add_refused(parser)


def _add_rates(group: Any) -> None:
    group.add_argument(
        "--request-rate", type=float, default=float("inf"), metavar="FLOAT", help="a second [inf]"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="FLOAT",
        help="below 1: bursts [1]",
    )
    group.add_argument("--max-concurrency", type=int, metavar="INT", help="at a time [any]")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests that keep ttft, tpot, itl and e2e limits",
    )
    group.add_argument("--tag", metavar="STR", help="goes into the result")
    group.add_argument("--output-details", action="store_true", help="figures of each request")
    group.add_argument(
        "--cache-report",
        action="store_true",
        help="cache_report is wanted: say so when the server does not tell what it cached",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument(
        "--plot", type=_writable, metavar="FILE", help="PNG of TTFT, ITL and throughput"
    )


def _add_asking(group: Any) -> None:
    group.add_argument(
        "--temperature", type=_at_least(float, 0), default=0.0, metavar="FLOAT", help="[0]"
    )
    group.add_argument("--top-p", type=_share, default=1.0, metavar="FLOAT", help="[1]")
    group.add_argument(
        "--disable-stream",
        action="store_true",
        help="answers come whole: TTFT is their latency, and there are no ITLs",
    )
    group.add_argument(
        "--return-logprob", action="store_true", help="of each answer's tokens; /generate only"
    )
    group.add_argument(
        "--tokenize-prompt",
        action="store_true",
        help="prompts go as token ids; so they always do, except to the chat backends",
    )


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="plain radix grammar [all]")
    add_workload(parser)
    add_output(parser)


def add_program(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs", nargs="+", metavar="NAME", help="which [all six]")
    parser.add_argument("--items", type=int, metavar="INT", help="runs of each program [its own]")
    parser.add_argument("--repeat", type=int, default=1, metavar="INT", help="best of so many [1]")
    help_ = "examples and texts of the prompts, times over; at 3 they have 1300 to 2700 tokens [1]"
    parser.add_argument("--scale", type=int, default=1, metavar="INT", help=help_)
    add_output(parser)


BENCHMARKS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "one-batch": ("latency of a static batch: prefill, and a decode step", add_one_batch),
    "offline": ("throughput of a workload given at once to an engine", add_load),
    "serving": ("latencies and throughput of a server over HTTP", add_serving),
    "compare": ("one workload with one mechanism changed at a time", add_compare),
    "program": ("programs against the same calls without their structure", add_program),
}


def _at_least(kind: Callable[[str], Any], low: int) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid {kind.__name__} value: {text!r}") from None
        if not value >= low:  # nan is not
            raise argparse.ArgumentTypeError(f"must be >= {low}, got {text}")
        return value

    return number


def _share(text: str) -> float:
    value = _at_least(float, 0)(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {text}")
    return value


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII):
        raise argparse.ArgumentTypeError(f"wants NAME=VALUE, got {text!r}")
    return name, _header_value(value)


def _header_value(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError("must be printable ASCII")
    return text


def _readable(path: str) -> str:
    if not path:  # the default is checked, too
        return path
    try:
        with open(path, encoding="utf-8"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None


def _writable(path: str) -> str:
    """What a run costs is not lost to a wrong path."""
    try:
        with open(path, "a", encoding="utf-8"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
