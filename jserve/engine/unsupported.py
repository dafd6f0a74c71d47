"""SGLang's names of what a native request may ask for and is not there, of every front.

A name leaves when its feature comes. Each maps to the value that asks for nothing.
"""

from __future__ import annotations

from typing import Any


def refused(names: str, idle: Any = None) -> dict[str, Any]:
    """`idle` asks for nothing, as does what `is_idle` says."""
    return dict.fromkeys(names.split(), idle)


EVERYWHERE = (
    refused("bootstrap_host bootstrap_port bootstrap_room disagg_prefill_dp_rank session_id")
    | refused("session_params lora_path watermark custom_labels custom_logit_processor")
    | refused("return_hidden_states return_routed_experts")
)
GENERATE = (
    EVERYWHERE
    | refused("bootstrap_pair_key decode_tp_size kv_hints lora_id input_embeds image_data")
    | refused("video_data audio_data modalities mm_hashes mm_content_hashes use_audio_in_video")
    | refused("video_config return_indexer_topk return_sampling_mask")
    | refused("return_entropy return_flat_raw_top_logprobs max_thinking_tokens")
    | refused("sampling_logprobs_mode", "selected")
    | refused("routed_experts_start_len", 0)
)


def is_idle(value: Any, idle: Any) -> bool:
    """Whether a value asks for nothing: `idle`, null, false, "", {}, or a list of nothing but
    nulls."""
    if isinstance(value, list) and all(one is None for one in value):
        return True
    same = type(value) is type(idle) and value == idle
    return same or value is None or value is False or value in ("", {})
