"""What SGLang's serving benchmark takes and this one does not: each refused by name, with what to
use instead, so that no part of a pasted command line is dropped.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

_TEXT = "completions and chats only"
BACKENDS = {
    "sglang-embedding": _TEXT,
    "vllm-embedding": _TEXT,
    "lmdeploy": "use vllm, which asks /v1/completions",
    "lmdeploy-chat": "use vllm-chat, which asks /v1/chat/completions",
    "trt": "use vllm against its OpenAI server",
    "gserver": _TEXT,
    "truss": "use vllm against its OpenAI server",
}
_NO_IMAGES = "prompts are text only; use sharegpt-like"
_CUSTOM = "write it as conversations and use custom with --dataset-path FILE"
DATASETS = {
    "openai": _CUSTOM,
    "mmmu": _NO_IMAGES,
    "image": _NO_IMAGES,
    "mooncake": "use generated-shared-prefix with --request-rate",
    "longbench_v2": _CUSTOM,
    "speed-bench": _CUSTOM,
    "agentic-trace": "use multi-turn, or jserve bench program --programs agent",
}
_PROFILE = "read the server's /metrics, which time its stages (docs/observability.md)"
_LORA = "name one adapter in --extra-request-body '{\"lora_path\": NAME}'"
_MULTI = "use --dataset-name multi-turn --num-turns N"
_ONE_SIZE = "groups have one size, --gsp-prompts-per-group"
_TRACE = "use --request-rate and --burstiness"
_BODY = "put it into --extra-request-body"
FLAGS = {
    **dict.fromkeys(
        (
            *("profile", "profile-activities", "profile-start-step", "profile-steps"),
            *("profile-num-steps", "profile-by-stage", "profile-stages", "profile-output-dir"),
            *("profile-prefix", "pd-separated", "profile-prefill-url", "profile-decode-url"),
        ),
        _PROFILE,
    ),
    **dict.fromkeys(("lora-name", "lora-request-distribution", "lora-zipf-alpha"), _LORA),
    "plot-throughput": "use --plot FILE",
    "prompt-suffix": "write it into the texts of --dataset-path",
    "gsp-num-turns": _MULTI,
    "gsp-group-distribution": _ONE_SIZE,
    "gsp-zipf-alpha": _ONE_SIZE,
    "gsp-fast-prepare": "leave it out, nothing slow is prepared",
    "gsp-send-routing-key": "give one key to all with --header X-SMG-Routing-Key=KEY",
    "use-trace-timestamps": _TRACE,
    "mooncake-slowdown-factor": _TRACE,
    "mooncake-num-rounds": _TRACE,
    "mooncake-workload": _TRACE,
    **dict.fromkeys(("top-logprobs-num", "token-ids-logprob", "logprob-start-len"), _BODY),
    "return-routed-experts": _BODY,
    "print-requests": "use --output-details",
    "fake-prefill": "measure the decode server behind its router",
    **dict.fromkeys(("dataset-offset", "agentic-max-turns"), DATASETS["agentic-trace"]),
    **dict.fromkeys(("speed-bench-category", "speed-bench-output-len"), _CUSTOM),
    **dict.fromkeys(("image-count", "image-resolution", "image-format"), _NO_IMAGES),
    **dict.fromkeys(("image-content", "random-image-count"), _NO_IMAGES),
}


def add_refused(parser: argparse.ArgumentParser) -> None:
    for flag in FLAGS:
        parser.add_argument(f"--{flag}", nargs="*", action=_Refuse, help=argparse.SUPPRESS)


def one_of(known: Collection[str], refused: Mapping[str, str]) -> Any:
    """An argparse type."""

    def name(text: str) -> str:
        if text in known:
            return text
        if text in refused:
            raise argparse.ArgumentTypeError(f"{text} is not supported: {refused[text]}")
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r}; one of {', '.join(known)}")

    return name


class _Refuse(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        instead = FLAGS[self.option_strings[0].removeprefix("--")]
        raise argparse.ArgumentError(None, f"{option_string} is not supported: {instead}")
