"""cuBLAS, through torch, for the dense products: the product alone, without the residual and epilogues that ours has in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.bench.peers import Peer, PeerCall
from kdgen.kernels import gemm
from kdgen.kernels.base import Workload


class Matmul:
    """`torch.mm`, or `torch.bmm` over heads, into an array that is there already.

    An f32 result of bf16 operands is not to be had: the peer writes bf16, half of the bytes.
    """

    def __init__(self, p: gemm.Params, workload: Workload):
        import torch

        if p.w == "int4":
            raise ValueError("torch multiplies no INT4 weights")

        def on_gpu(values: npt.NDArray[Any]) -> Any:
            found = np.ascontiguousarray(values)
            if found.dtype == np.float32:
                return torch.from_numpy(found).cuda()
            return torch.from_numpy(found.view(np.int16)).cuda().view(torch.bfloat16)

        self.torch, self.p = torch, p
        x = workload.inputs["x"].reshape(-1, p.products, p.x_columns)[:, :, p.x_offset : p.x_offset + p.k]
        w = workload.inputs["w"].reshape(p.products, -1, p.k)
        self.want = np.einsum("thk,hnk->htn", x[:1].astype(np.float64), w.astype(np.float64))
        self.x, self.w = on_gpu(x.transpose(1, 0, 2)), on_gpu(w).transpose(1, 2)
        if p.products == 1:
            self.x, self.w = self.x[0], self.w[0]
        self.out = self._multiply(self.x, self.w)

    @property
    def _multiply(self) -> Any:
        return self.torch.mm if self.p.products == 1 else self.torch.bmm

    def launch(self) -> None:
        """See `PeerCall`."""
        self._multiply(self.x, self.w, out=self.out)

    def error(self) -> float:
        """See `PeerCall`."""
        got = self.out.float().cpu().numpy().reshape(self.p.products, len(self.x if self.p.products == 1 else self.x[0]), -1)[:, :1]
        return float(np.abs(got - self.want).max() / np.abs(self.want).max())


def _matmul(p: gemm.Params, workload: Workload) -> PeerCall:
    return Matmul(p, workload)


PEERS = (Peer("cuBLAS (torch)", "gemm", "torch", _matmul),)
