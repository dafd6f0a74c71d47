"""Nouns that cross rooms: model hyper-parameters, sampling parameters, and the messages between the
two processes. Pure data; imports neither jax nor any other room but errors.
"""

from jserve.types.grammar import CompiledSpec, GrammarSpec, Thinking
from jserve.types.latent import LatentConfig
from jserve.types.logprobs import (
    MAX_LOGPROB_IDS,
    MAX_TOP_LOGPROBS,
    LogprobParams,
    TokenLogprobs,
)
from jserve.types.messages import (
    Abort,
    Control,
    ControlReply,
    Delta,
    Deltas,
    FinishReason,
    FromEngine,
    Gauges,
    GenerateRequest,
    Name,
    Output,
    Progress,
    Submit,
    Times,
    ToEngine,
    Transcript,
)
from jserve.types.model import KVShape, ModelConfig, RopeConfig
from jserve.types.moe import MoEConfig
from jserve.types.sampling import (
    MAX_EOS_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_OWN_STOP_TOKEN_IDS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    TOP_K_ALL,
    SamplingParams,
)

__all__ = [
    "MAX_EOS_TOKEN_IDS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROB_IDS",
    "MAX_OWN_STOP_TOKEN_IDS",
    "MAX_STOP_CHARACTERS",
    "MAX_STOP_STRINGS",
    "MAX_STOP_TOKEN_IDS",
    "MAX_TOP_LOGPROBS",
    "TOP_K_ALL",
    "Abort",
    "CompiledSpec",
    "Control",
    "ControlReply",
    "Delta",
    "Deltas",
    "FinishReason",
    "FromEngine",
    "Gauges",
    "GenerateRequest",
    "GrammarSpec",
    "KVShape",
    "LatentConfig",
    "LogprobParams",
    "MoEConfig",
    "ModelConfig",
    "Name",
    "Output",
    "Progress",
    "RopeConfig",
    "SamplingParams",
    "Submit",
    "Thinking",
    "Times",
    "ToEngine",
    "TokenLogprobs",
    "Transcript",
]
