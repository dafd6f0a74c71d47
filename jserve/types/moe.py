"""Hyper-parameters of a mixture of experts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Of a model's sparse layers, as its checkpoint has them.

    `scoring` says what a token's weights for its experts are made of:
        softmax       over all experts, of which the top_k largest are taken
        sigmoid       of each expert's logit, of which the top_k largest are taken
        softmax_topk  the top_k largest logits are taken, softmax is over those
    `renormalize` divides the weights by their sum, `scale` multiplies them afterwards. With
    `num_groups` > 1 the choice is among the experts of the `top_groups` best groups, a group being
    worth its best expert ("max") or the sum of its best two ("top2_sum").
    """

    num_experts: int
    top_k: int
    width: int  # intermediate size of one expert
    scoring: str = "softmax"  # softmax | sigmoid | softmax_topk
    renormalize: bool = False
    scale: float = 1.0
    score_bias: bool = False  # DeepSeek-V3: added to the scores for the choice only
    num_groups: int = 1
    top_groups: int = 1
    group_by: str = "max"  # max | top2_sum
    router_bias: bool = False  # gpt-oss: added to the logits
    expert_bias: bool = False  # gpt-oss: of both projections
    shared_width: int = 0  # intermediate size of the expert that sees every token; 0: none
    shared_gate: bool = False  # Qwen2-MoE: times a sigmoid of the token
    activation: str = "silu"  # silu | swiglu_oai (layers/moe.py)
    sparse_layers: tuple[bool, ...] = ()  # whether layer i is one of experts; others are dense

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the sparse ones."""
        return tuple(i for i, sparse in enumerate(self.sparse_layers) if sparse)

    @property
    def tallies(self) -> tuple[tuple[int, int], ...]:
        """Shapes of KVPool.tally."""
        return ((len(self.layers), self.num_experts),) if self.layers else ()
