"""One file an operator, named as the vendor names it."""

from typing import Any

import torch


def refuse_empty(*tensors: Any) -> None:
    """Raise the vendor's words, which scripts match. pliant's own functions accept empties."""
    if any(isinstance(t, torch.Tensor) and t.numel() == 0 for t in tensors):
        raise Exception("Erorr! Input Tensor can not be a empty Tensor.\n")
