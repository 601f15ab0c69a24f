"""FlashInfer's and FlashMLA's kernels for MLA with absorbed projections, on a causal chain over the workload's cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.bench.peers import Peer, PeerCall
from kdgen.kernels import attention_plan, tree_attention
from kdgen.kernels.base import Workload
from kdgen.kernels.cache_layout import swizzled


class Chain:
    """The workload of `tree_attention` as a chain: row t sees the keys at positions 0 … start + t of its one sequence.

    Attributes:
        keys: `[pages, page_size, width]` bf16 torch tensor on the GPU, without swizzle.
        q: `[T, heads, width]`.
        table: pages of the sequence, in order; int32 on the GPU.
        length: keys of the last row.
    """

    def __init__(self, p: tree_attention.Params, workload: Workload):
        import torch

        self.p, inputs = p, workload.inputs
        record = next(attention_plan.tails(p, inputs))
        rows = len(inputs["q"])
        self.start = int(record[5])
        self.length = self.start + rows
        self.plain = swizzled(inputs["cache"]) if p.swizzle else inputs["cache"]
        self.queries = inputs["q"]
        self.pages = inputs["page_tables"][int(record[0]), : -(-self.length // p.page_size)]

        def on_gpu(values: npt.NDArray[Any]) -> Any:
            return torch.from_numpy(np.ascontiguousarray(values).view(np.int16)).cuda().view(torch.bfloat16)

        self.keys, self.q = on_gpu(self.plain), on_gpu(self.queries)
        self.table = torch.from_numpy(np.ascontiguousarray(self.pages)).cuda()

    def error(self, out: Any) -> float:
        """Error of `out` `[T, heads, latent]` in its first and last row, relative to the largest value."""
        got = out.float().cpu().numpy()
        keys = self.plain[self.pages].reshape(-1, self.p.width).astype(np.float64)
        worst = 0.0
        for row in {0, len(got) - 1}:
            seen = keys[: self.start + row + 1]
            scores = self.queries[row].astype(np.float64) @ seen.T * self.p.scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            want = weights @ seen[:, : self.p.latent] / weights.sum(axis=1, keepdims=True)
            worst = max(worst, float(np.abs(got[row] - want).max() / np.abs(want).max()))
        return worst


class FlashInfer:
    """`BatchMLAPagedAttentionWrapper`, which plans once for all layers, as the engines that use it do."""

    def __init__(self, backend: str, p: tree_attention.Params, workload: Workload):
        import flashinfer
        import torch

        self.chain = chain = Chain(p, workload)
        rows = len(chain.queries)
        self.q = chain.q[..., : p.latent].contiguous(), chain.q[..., p.latent :].contiguous()
        self.cache = chain.keys[..., : p.latent].contiguous(), chain.keys[..., p.latent :].contiguous()
        self.wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
            torch.empty(128 << 20, dtype=torch.int8, device="cuda"), backend=backend
        )
        counts = {"dtype": torch.int32, "device": "cuda"}
        self.wrapper.plan(
            torch.tensor([0, rows], **counts),
            torch.tensor([0, len(chain.pages)], **counts),
            chain.table,
            torch.tensor([chain.length], **counts),
            p.heads, p.latent, p.rope, p.page_size, True, p.scale, torch.bfloat16, torch.bfloat16,
        )  # fmt: skip
        self.out: Any = None

    def launch(self) -> None:
        """See `PeerCall`."""
        self.out = self.wrapper.run(*self.q, *self.cache, return_lse=False)

    def error(self) -> float:
        """See `PeerCall`."""
        return self.chain.error(self.out)


class FlashMla:
    """`flash_mla_with_kvcache`; pages of 64."""

    def __init__(self, p: tree_attention.Params, workload: Workload):
        import flash_mla
        import torch

        self.chain, self.p, self.module = Chain(p, workload), p, flash_mla
        self.lengths = torch.tensor([self.chain.length], dtype=torch.int32, device="cuda")
        self.metadata = flash_mla.get_mla_metadata(self.lengths, len(self.chain.queries) * p.heads, 1)
        self.out: Any = None

    def launch(self) -> None:
        """See `PeerCall`."""
        chain = self.chain
        self.out, _ = self.module.flash_mla_with_kvcache(
            chain.q[None], chain.keys[:, :, None], chain.table[None], self.lengths, self.p.latent, *self.metadata, self.p.scale, True
        )

    def error(self) -> float:
        """See `PeerCall`."""
        return self.chain.error(self.out[0])


def _flash_infer(backend: str, p: tree_attention.Params, workload: Workload) -> PeerCall:
    return FlashInfer(backend, p, workload)


def _flash_mla(p: tree_attention.Params, workload: Workload) -> PeerCall:
    return FlashMla(p, workload)


PEERS = (
    Peer("FlashInfer fa2", "tree_attention", "flashinfer", partial(_flash_infer, "fa2")),
    Peer("FlashInfer fa3", "tree_attention", "flashinfer", partial(_flash_infer, "fa3")),
    Peer("FlashMLA", "tree_attention", "flash_mla", _flash_mla),
)
