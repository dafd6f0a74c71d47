"""Fields of features that are not there, by the body that names them.

A field leaves its table when its feature comes. Each maps to the value that asks for nothing.
"""

from __future__ import annotations

from typing import Any

from jserve.errors import RequestError


def _refused(names: str, idle: Any = None) -> dict[str, Any]:
    """`idle` asks for nothing, as do null, false, "", [], {}."""
    return dict.fromkeys(names.split(), idle)


_EVERYWHERE = (
    _refused("bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank session_id")
    | _refused("session_params lora_path watermark custom_labels custom_logit_processor")
    | _refused("return_hidden_states return_routed_experts")
    | _refused("routed_dp_rank data_parallel_rank", 0)  # of several, ranked.py takes them
)
_ONE_RANK = "must be 0: this server has one data-parallel rank, which --dp-size is for"
_WHY = {"routed_dp_rank": _ONE_RANK, "data_parallel_rank": _ONE_RANK}
_OPENAI = (
    _EVERYWHERE
    | _refused("custom_params")
    | _refused("return_cached_tokens_details return_spec_tokens_details")
)
COMPLETION = _OPENAI | _refused("suffix")
CHAT = (
    _OPENAI
    | _refused("tools functions reasoning_effort max_thinking_tokens audio prediction verbosity")
    | _refused("web_search_options store return_meta_info")
    | _refused("return_input_ids_in_sglext return_output_ids_in_sglext")
    | _refused("tool_choice function_call", "none")
    | _refused("modalities", ["text"])
)
MESSAGE = _refused("tool_calls tool_call_id function_call annotations audio refusal")
GENERATE = (
    _EVERYWHERE
    | _refused("bootstrap_pair_key decode_tp_size kv_hints lora_id input_embeds image_data")
    | _refused("video_data audio_data modalities mm_hashes mm_content_hashes use_audio_in_video")
    | _refused("video_config return_indexer_topk return_sampling_mask sampling_logprobs_mode")
    | _refused("return_entropy return_flat_raw_top_logprobs max_thinking_tokens")
    | _refused("routed_experts_start_len", 0)
)

LOGGING = _refused("dump_requests_folder dump_requests_threshold crash_dump_folder")


def check_idle(name: str, value: Any, idle: Any, at: str) -> None:
    """Raise RequestError unless `value` asks for nothing; `at` is the path of the object."""
    same = type(value) is type(idle) and value == idle
    if not (value is None or value is False or value in ("", [], {}) or same):
        path = f"{at}.{name}" if at else name
        raise RequestError(f"{path} {_WHY.get(name, 'is not supported yet')}.", path)
