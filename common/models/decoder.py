"""The decoder all supported architectures share: one residual stream, two fused steps and four linears a layer.

    residual = embed(ids)
    each layer:  residual += o(attention(qkv(norm(residual))))
                 residual += down(silu(gate) * up)  of  norm(residual)
    logits = head(norm(residual))

Each "add, then norm" is one op, so the norm of a layer's input is taken at the end of the layer before. q, k and v are one GEMM, gate
and up another; the checkpoint's tensors are slices of these weights. What differs between architectures is data (architectures.py).
"""

import torch
from torch.nn import functional as F

from common.attention.backend import AttentionBackend, AttentionSpec, HeadGeometry
from common.layers.linear import Linear, Quantizer
from common.layers.ops import LayerOps, NormWeight
from common.models.config import ModelConfig


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device, quantizer: Quantizer | None) -> None:
        heads = HeadGeometry(config.num_heads, config.num_kv_heads, config.head_dim)
        hidden, intermediate = config.hidden_size, config.intermediate_size
        q_norm, k_norm = (NormWeight.empty(config.head_dim, config.rms_norm_eps, dtype, device) if config.qk_norm else None for _ in range(2))
        self.input_norm = NormWeight.empty(hidden, config.rms_norm_eps, dtype, device)
        self.qkv = Linear(hidden, heads.qkv_size, config.qkv_bias, dtype, device, quantizer)
        self.attention = AttentionSpec(layer, config.sliding_window[layer], q_norm, k_norm)
        self.o = Linear(config.num_heads * config.head_dim, hidden, config.o_bias, dtype, device, quantizer)
        self.post_norm = NormWeight.empty(hidden, config.rms_norm_eps, dtype, device)
        self.gate_up = Linear(hidden, 2 * intermediate, config.mlp_bias, dtype, device, quantizer)
        self.down = Linear(intermediate, hidden, config.mlp_bias, dtype, device, quantizer)


class Decoder:
    def __init__(self, config: ModelConfig, ops: LayerOps, dtype: torch.dtype, device: torch.device, quantizer: Quantizer | None = None) -> None:
        """Weights are allocated, not filled: the loader writes into tensors() and then calls pack()."""
        self.config = config
        self._ops = ops
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer(config, layer, dtype, device, quantizer) for layer in range(config.num_layers)]
        self.final_norm = NormWeight.empty(config.hidden_size, config.rms_norm_eps, dtype, device)
        self._next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        self.head = Linear(config.hidden_size, config.vocab_size, False, dtype, device, quantizer.head if quantizer is not None else None)
        if config.tie_word_embeddings:
            self.head.weight = self.embedding  # what Linear allocated was never touched, so it never took memory
        self._norm_nbytes = sum(tensor.nbytes for name, tensor in self.tensors().items() if "norm" in name)

    @property
    def nbytes(self) -> int:
        """Memory of the weights as they are held now: after pack(), in their final form."""
        embedding_nbytes = 0 if self.config.tie_word_embeddings else self.embedding.nbytes
        return self._norm_nbytes + embedding_nbytes + sum(linear.nbytes for linear in self.linears())

    def __call__(self, ids: torch.Tensor, attn: AttentionBackend, rows: torch.Tensor | None = None) -> torch.Tensor:
        """ids: int64 [T], laid out as the batch `attn` has planned. rows: int64 [S], which of them are asked for (None: all).

        Returns the normed hidden states [S, hidden]; KV of all T is written. Past the last attention only the asked rows are computed.
        """
        ops = self._ops
        residual = self.head.embed(ids) if self.config.tie_word_embeddings else F.embedding(ids, self.embedding)
        x = ops.rms_norm(residual, self.layers[0].input_norm)
        for layer, next_norm in zip(self.layers, self._next_norms, strict=True):
            attended = attn.forward(layer.qkv(x), layer.attention)
            if next_norm is self.final_norm and rows is not None:
                if len(rows) == 0:  # no prompt ends here: its KV is all that was wanted
                    return x.new_empty(0, self.config.hidden_size)
                attended, residual = attended[rows], residual[rows]
            x = ops.add_rms_norm(layer.o(attended), residual, layer.post_norm)
            x = ops.add_rms_norm(layer.down(ops.silu_mul(layer.gate_up(x))), residual, next_norm)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [S, hidden] as returned by a call -> [S, vocab], of the same type: to widen them would only move more bytes."""
        if len(hidden) == 0:
            return hidden.new_empty(0, self.config.vocab_size)
        logits = self.head(hidden)
        if self.config.tie_word_embeddings and logits.device.type == "cpu" and logits.dtype == torch.bfloat16:
            from common.layers.ties import break_ties  # loads numba, which other devices do without

            break_ties(logits, hidden, self.head.embed)
        return logits

    def linears(self) -> list[Linear]:
        """Every GEMM of a step, in order."""
        return [linear for layer in self.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)] + [self.head]

    def pack(self) -> None:
        """The weights are all written: bring the linears into their final form."""
        for linear in self.linears():
            linear.pack(keep_plain=linear is self.head and self.config.tie_word_embeddings)
        if self.config.tie_word_embeddings:
            self.embedding = self.head.weight  # empty when the head's final form gives rows itself

    def tensors(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> where its tensor goes (a view; shapes are the checkpoint's)."""
        named = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm.tensor}
        if not self.config.tie_word_embeddings:
            named["lm_head.weight"] = self.head.weight
        for index, layer in enumerate(self.layers):
            named |= {f"model.layers.{index}.{name}": tensor for name, tensor in self._layer_tensors(layer).items()}
        return named

    def row_scales(self) -> dict[str, torch.Tensor]:
        """Checkpoint name of a linear's weight -> where the scales of its rows go: float32, one a row. Before pack()."""
        named = {} if self.config.tie_word_embeddings else {"lm_head.weight": self.head.row_scale}
        for index, layer in enumerate(self.layers):
            for linear, sizes in self._parts(layer):
                places = torch.split(linear.row_scale, list(sizes.values()))
                named |= dict(zip((f"model.layers.{index}.{name}.weight" for name in sizes), places, strict=True))
        return named

    def _layer_tensors(self, layer: DecoderLayer) -> dict[str, torch.Tensor]:
        named = {"input_layernorm.weight": layer.input_norm.tensor, "post_attention_layernorm.weight": layer.post_norm.tensor}
        for linear, sizes in self._parts(layer):
            named |= _tensors_of(linear, sizes)
        for name, norm in (("q_norm", layer.attention.q_norm), ("k_norm", layer.attention.k_norm)):
            if norm is not None:
                named[f"self_attn.{name}.weight"] = norm.tensor
        return named

    def _parts(self, layer: DecoderLayer) -> list[tuple[Linear, dict[str, int]]]:
        """Each linear with the checkpoint's linears that are stacked in it, in their order, and their outputs."""
        config = self.config
        q_size, kv_size, intermediate = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
        return [
            (layer.qkv, {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}),
            (layer.o, {"self_attn.o_proj": config.hidden_size}),
            (layer.gate_up, {"mlp.gate_proj": intermediate, "mlp.up_proj": intermediate}),
            (layer.down, {"mlp.down_proj": config.hidden_size}),
        ]


def _tensors_of(linear: Linear, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
    """The checkpoint's linears that are stacked in this one, in this order."""
    named = dict(zip((f"{name}.weight" for name in sizes), torch.split(linear.weight, list(sizes.values())), strict=True))
    if linear.bias is not None:
        named |= dict(zip((f"{name}.bias" for name in sizes), torch.split(linear.bias, list(sizes.values())), strict=True))
    return named
