from __future__ import annotations

import pytest
import torch

from workbench.estimate.attention import choose_kernel

T4, A100 = (7, 5), (8, 0)


def _query(dtype: torch.dtype, heads: int = 8, size: int = 64) -> torch.Tensor:
    return torch.empty((2, heads, 128, size), dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "masked", "shared_heads", "kernel"),
    [
        (A100, torch.bfloat16, 64, False, False, "flash"),
        (A100, torch.bfloat16, 64, False, True, "flash"),
        (A100, torch.bfloat16, 64, True, False, "efficient"),
        (A100, torch.bfloat16, 288, False, False, "efficient"),
        (A100, torch.float32, 64, False, False, "efficient"),
        (T4, torch.float16, 64, False, False, "efficient"),
        (T4, torch.float16, 64, False, True, "math"),
        (T4, torch.bfloat16, 64, False, False, "math"),
        (T4, torch.float16, 60, False, False, "math"),
        (T4, torch.float32, 60, False, False, "efficient"),
    ],
)
def test_the_kernel_follows_the_dispatchers_rules(
    capability: tuple[int, int], dtype: torch.dtype, size: int, masked: bool, shared_heads: bool, kernel: str
) -> None:
    query = _query(dtype, size=size)
    key = _query(dtype, heads=2 if shared_heads else 8, size=size)
    mask = torch.empty((2, 1, 128, 128), dtype=dtype, device="meta") if masked else None
    assert choose_kernel(query, key, key, mask, capability=capability, enable_gqa=shared_heads) == kernel
