"""Flags of `jserve bench`, with the names and defaults of SGLang's benchmarks."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from jserve.bench.workload import DATASETS, WorkloadOptions

_ABOUT = {
    "num_prompts": "prompts, or conversations",
    "random_input_len": "longest prompt, or turn",
    "random_output_len": "longest answer",
    "random_range_ratio": "lengths are uniform in [RATIO * LEN, LEN]",
    "gsp_num_groups": "generated-shared-prefix: groups",
    "gsp_prompts_per_group": "… questions in a group",
    "gsp_system_prompt_len": "… shared tokens",
    "gsp_question_len": "… own tokens",
    "gsp_output_len": "… answer",
    "num_turns": "multi-turn: turns of a conversation",
    "seed": "of workload and arrivals",
}


def add_workload(parser: argparse.ArgumentParser) -> None:
    """What is asked."""
    group = parser.add_argument_group("workload")
    for field in dataclasses.fields(WorkloadOptions):
        flag, default = "--" + field.name.replace("_", "-"), field.default
        if field.name == "dataset_name":
            group.add_argument(flag, default=default, choices=DATASETS, help=f"[{default}]")
        else:
            about = f"{_ABOUT[field.name]} [{default}]"
            kind = type(default)
            metavar = kind.__name__.upper()
            group.add_argument(flag, type=kind, default=default, metavar=metavar, help=about)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-file", metavar="FILE", help="append the JSON line to it")


def add_load(parser: argparse.ArgumentParser) -> None:
    """How an engine is loaded, over HTTP or not."""
    parser.add_argument(
        "--disable-ignore-eos", action="store_true", help="answers may end before their length"
    )
    parser.add_argument(
        "--warmup-requests", type=int, default=1, metavar="INT", help="before the clock starts [1]"
    )
    add_workload(parser)
    add_output(parser)


def add_one_batch(parser: argparse.ArgumentParser) -> None:
    for name, default in (("batch-size", 1), ("input-len", 1024), ("output-len", 16)):
        parser.add_argument(
            f"--{name}", type=int, nargs="+", default=[default], metavar="INT", help=f"[{default}]"
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
        choices=("jserve", "jserve-oai", "sglang", "sglang-oai", "vllm"),
        help="jserve and sglang: /generate; the others: /v1/completions [jserve]",
    )
    group.add_argument("--base-url", metavar="URL", help="[http://HOST:PORT]")
    group.add_argument("--host", default="127.0.0.1", metavar="STR", help="[127.0.0.1]")
    group.add_argument("--port", type=int, default=30000, metavar="INT", help="[30000]")
    group.add_argument("--api-key", metavar="STR", help="bearer key")
    group.add_argument("--model", metavar="NAME", help="name in the API [the server's]")
    group.add_argument("--vocab-size", type=int, metavar="INT", help="ids are below [the server's]")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=60, metavar="FLOAT", help="[60]"
    )
    group.add_argument(
        "--extra-request-body", type=_json_object, metavar="JSON", help="more fields of each body"
    )
    group.add_argument("--flush-cache", action="store_true", help="before the clock starts")
    group = parser.add_argument_group("load")
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
    group.add_argument("--plot", metavar="FILE", help="PNG of TTFT, ITL and throughput")
    add_load(parser)


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


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
