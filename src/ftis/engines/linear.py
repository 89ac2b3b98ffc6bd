"""Linear layers for decoding steps: products of few rows with the same weights, many times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PACKED_FROM = 2**18
"""The fewest numbers of a weight that a CPU keeps in oneDNN's own layout. With it, products of 32 rows take half to
three quarters of the time; smaller weights stay in a cache anyway, and gain nothing."""


@dataclass(frozen=True)
class Linear:
    """y = x W + b.

    Attributes:
        weight: [in, out]; if ``packed``, [out, in] in oneDNN's layout.
    """

    weight: Tensor
    bias: Tensor | None
    packed: bool

    @staticmethod
    def of(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        """The layer of a weight as torch keeps it. Packing makes a copy."""
        if weight_OI.device.type != "cpu" or weight_OI.numel() < PACKED_FROM or not _packs(weight_OI.dtype):
            return Linear(weight_OI.t(), bias_O, packed=False)
        return Linear(torch.ops.mkldnn._reorder_linear_weight(weight_OI), bias_O, packed=True)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self.packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self.weight, self.bias, "none", [], "")
            return y
        return torch.mm(x_NI, self.weight) if self.bias is None else torch.addmm(self.bias, x_NI, self.weight)

    def added_to(self, base_NO: Tensor, x_NI: Tensor) -> Tensor:
        """``base + y``, in one operation if possible."""
        if not self.packed and self.bias is None and x_NI.dtype == base_NO.dtype:
            return torch.addmm(base_NO, x_NI, self.weight)
        return base_NO + self(x_NI)


def _packs(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN, and the operations that torch's own compiler packs weights with."""
    wanted = ["_reorder_linear_weight", "_linear_pointwise"]
    if dtype == torch.bfloat16:
        wanted.append("_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in wanted):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
