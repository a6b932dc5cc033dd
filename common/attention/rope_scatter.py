"""q/k norm, rotation, and K and V into their slots, for attention backends on CUDA: one launch a layer of triton_rope.py's kernel."""

import torch

from common.attention.backend import AttentionBatch, AttentionSpec, HeadGeometry
from common.attention.triton_rope import rope_scatter_kernel
from common.kvcache.layout import KVPool
from common.layers.rope import RopeTable

HEADS = 8  # a program: 8 heads of 128 elements are 8 elements a thread


class RopeScatter:
    def __init__(self, geometry: HeadGeometry, pool: KVPool, rope: RopeTable) -> None:
        self._geometry, self._rope = geometry, rope
        layers = range(pool.layout.num_layers)
        self._keys, self._values = [pool.keys(layer) for layer in layers], [pool.values(layer) for layer in layers]
        page_stride, head_stride, slot_stride, _ = self._keys[0].stride()
        self._places = {"PAGE_SIZE": pool.page_size, "PAGE_STRIDE": page_stride, "HEAD_STRIDE": head_stride, "SLOT_STRIDE": slot_stride}

    def __call__(self, qkv: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec) -> torch.Tensor:
        """qkv [T, (num_heads + 2 * num_kv_heads) * head_dim], contiguous -> q, turned: [T, num_heads, head_dim]. Reads batch.positions and
        batch.slots on the device; may be captured."""
        geometry, q_norm, k_norm = self._geometry, spec.q_norm, spec.k_norm
        assert qkv.is_contiguous(), qkv.stride()
        assert (q_norm is None) == (k_norm is None), "one norm without the other"
        q = torch.empty(len(qkv), geometry.num_heads, geometry.head_dim, dtype=qkv.dtype, device=qkv.device)
        grid = (len(qkv), -(-(geometry.num_heads + 2 * geometry.num_kv_heads) // HEADS))
        rope_scatter_kernel[grid](
            qkv, q, self._keys[spec.layer], self._values[spec.layer], self._rope.cos, self._rope.sin, batch.positions, batch.slots,
            qkv if q_norm is None else q_norm.tensor, qkv if k_norm is None else k_norm.tensor,
            NUM_HEADS=geometry.num_heads, NUM_KV_HEADS=geometry.num_kv_heads, HEAD_DIM=geometry.head_dim,
            HALF_PAD=1 << (geometry.head_dim // 2 - 1).bit_length(), HEAD_BLOCK=HEADS, **self._places,
            Q_EPS=0.0 if q_norm is None else q_norm.eps, K_EPS=0.0 if k_norm is None else k_norm.eps, IS_NORMED=q_norm is not None,
            num_warps=4,
        )  # fmt: skip
        return q
