"""Tiny random-weight models for tests: the transformers oracle, its weights in our layout, and
hand-built batches.

The batch builder is the slow and obvious one: plain Python over rows of (first position, token
ids).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from jserve.batch import CallContext
from jserve.cache.pool import KVPool, pool_spec
from jserve.models.model import Model
from jserve.models.registry import build_model, parse_config
from pallas_kernels.attention import AttentionMeta
from sharding.experts import EP
from sharding.mesh import make_mesh
from sharding.ranks import Ranks, over_ranks
from sharding.rules import TP, Rules

PAGE = 4
NUM_PAGES = 64
WIDTH = 16  # pages a row can hold

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}


def oracle(config_class: str, **overrides):
    """A transformers causal LM in float32, every parameter random (biases and norms too)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**TINY, **overrides})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            spread = 0.3 if name.endswith("norm.weight") else 0.15
            centre = tensor.mean() if name.endswith("norm.weight") else 0.0
            tensor.copy_(torch.randn_like(tensor) * spread + centre)
    return model


def hf_dict(model) -> dict:
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def checkpoint_state(model) -> dict[str, torch.Tensor]:
    """The model's tensors as its checkpoints name them: transformers keeps all experts in one."""
    return revert_weight_conversion(model, model.state_dict())


def rules_of(tp: int = 1, ep: int = 1, dp: int = 1) -> Rules:
    """`dp` ranks of attention, each of tp · ep / dp devices: dealt out along tp, else along ep."""
    preset, along_tp = TP if ep == 1 else EP, tp % dp == 0
    sizes = {"tensor": tp // dp, "expert": ep} if along_tp else {"tensor": tp, "expert": ep // dp}
    mesh = make_mesh(jax.devices()[: tp * ep], data=dp, **sizes)
    split = over_ranks(preset, "expert_mlp" if along_tp else "expert")
    return Rules(mesh, preset) if dp == 1 else Rules(mesh, split, Ranks(mesh))


def empty_pool(model: Model, num_pages: int, page_size: int, dtype: str, rules: Rules) -> KVPool:
    spec = pool_spec(model.cache, num_pages, page_size, dtype, rules)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), spec)


def params_of(model: Model, state: dict[str, torch.Tensor], rules: Rules) -> dict[str, jax.Array]:
    """Every parameter through its pieces; a hole that no piece fills stays NaN and shows."""
    params = {}
    for spec in model.specs:
        target = np.full(spec.shape, np.nan, np.float32)
        for piece in spec.pieces:
            tensor = state[piece.name].numpy()
            assert tensor.shape == piece.shape, f"{piece.name}: {tensor.shape=} {piece.shape=}"
            piece.place(piece.part(target), tensor)
        params[spec.path] = jax.device_put(target.astype(spec.dtype), rules.sharding(spec.axes))
    return params


@dataclasses.dataclass
class Served:
    """Our side: model, sharded parameters, and a pool whose pages were dealt at random."""

    model: Model
    params: dict[str, jax.Array]
    kv: KVPool
    rules: Rules

    @classmethod
    def of(cls, hf_model, tp: int = 1, num_pages: int = NUM_PAGES, ep: int = 1) -> Served:
        rules = rules_of(tp, ep)
        model = build_model(
            parse_config(hf_dict(hf_model)),
            rules,
            dtype="float32",
            attention_backend=None,
            page_size=PAGE,
        )
        spec = pool_spec(model.cache, num_pages, PAGE, "float32", rules)
        junk = [np.full(leaf.shape, 7.0, leaf.dtype) for leaf in jax.tree.leaves(spec)]
        places = [leaf.sharding for leaf in jax.tree.leaves(spec)]
        kv = jax.tree.unflatten(jax.tree.structure(spec), jax.device_put(junk, places))
        served = cls(model, params_of(model, checkpoint_state(hf_model), rules), kv, rules)
        served.program = jax.jit(served._program, donate_argnums=1)
        return served

    def _program(self, params, kv, context, token_ids):
        hidden, kv = self.model.forward(params, kv, context, token_ids)
        head = {key: params[key] for key in self.model.head_params}
        return self.model.logits(head, hidden), kv

    def arguments(self, rows, tables, decode: bool = False, bucket: tuple[int, int] | None = None):
        context, token_ids = batch(rows, tables, decode=decode, bucket=bucket)
        put = jax.device_put((context, token_ids), self.rules.sharding())
        return self.params, self.kv, *put

    def step(self, rows, tables, decode: bool = False, bucket=None) -> np.ndarray:
        """Logits [real tokens, V] of rows of (first position, token ids)."""
        logits, self.kv = self.program(*self.arguments(rows, tables, decode, bucket))
        total = sum(len(ids) for _, ids in rows)
        assert np.isfinite(np.asarray(logits)).all(), "padding must stay finite"
        return np.asarray(logits)[:total, : self.model.vocab_size]


def random_tables(num_rows: int, seed: int = 0) -> np.ndarray:
    """Disjoint random pages for each row, page 0 (trash) never among them."""
    pages = np.random.default_rng(seed).permutation(np.arange(1, NUM_PAGES))[: num_rows * WIDTH]
    return pages.reshape(num_rows, WIDTH).astype(np.int32)


def batch(
    rows, tables, *, decode: bool, page: int = PAGE, bucket: tuple[int, int] | None = None
) -> tuple[CallContext, jnp.ndarray]:
    """CallContext and ids of `rows`, padded to `bucket` (tokens, rows); None: not at all."""
    num_rows = len(rows)
    ids, positions, token_rows, slots, offsets, lengths = [], [], [], [], [0], []
    for index, (start, row_ids) in enumerate(rows):
        for offset, token in enumerate(row_ids):
            position = start + offset
            ids.append(token)
            positions.append(position)
            token_rows.append(index)
            slots.append(tables[index, position // page] * page + position % page)
        offsets.append(len(ids))
        lengths.append(start + len(row_ids))
    num_tokens, all_rows = bucket or (len(ids), num_rows)
    table = np.zeros((all_rows, tables.shape[1]), np.int32)
    table[:num_rows] = tables[:num_rows]
    meta = AttentionMeta(
        cu_q_lens=padded(offsets, all_rows + 1, offsets[-1]),
        kv_lens=padded(lengths, all_rows),
        page_table=jnp.asarray(table),
        positions=padded(positions, num_tokens),
        token_rows=padded(token_rows, num_tokens, all_rows),
        write_slots=padded(slots, num_tokens),
        distribution=jnp.asarray([leading_decode_rows(rows), num_rows], jnp.int32),
        max_q_len=1 if decode else None,
    )
    real = jnp.arange(num_tokens) < len(ids)
    return CallContext(meta, real), padded(ids, num_tokens)


def padded(values: list[int], size: int, fill: int = 0) -> jnp.ndarray:
    return jnp.asarray(np.array(values + [fill] * (size - len(values)), np.int32))


def leading_decode_rows(rows) -> int:
    lengths = [len(ids) for _, ids in rows]
    return next((i for i, length in enumerate(lengths) if length > 1), len(lengths))


def oracle_logits(model, token_ids) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)])).logits[0].numpy()


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Within 1e-4 of the largest logit."""
    error = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert error < 1e-4, f"{error=}"
