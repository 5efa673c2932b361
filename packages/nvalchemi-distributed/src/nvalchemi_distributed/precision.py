"""torch's part of the precision policy, lent to the protocol when this package is imported."""

from __future__ import annotations

from typing import Any

import torch

from distmd_protocol import pin_fp32, register_backend, warn_if_reduced

__all__ = ["pin_fp32", "warn_if_reduced"]


def _pin() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def _report() -> dict[str, Any]:
    return {
        "version": torch.__version__,
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": bool(torch.backends.cudnn.allow_tf32),
        "threads": torch.get_num_threads(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }


def _reduced() -> list[str]:
    lines = []
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        lines.append(f"torch float32 matmul precision is {precision!r} (full float32 is 'highest')")
    if torch.cuda.is_available() and torch.backends.cudnn.allow_tf32:
        lines.append("torch.backends.cudnn.allow_tf32 is on")
    return lines


def _context_exists() -> bool:
    return bool(torch.cuda.is_initialized())


register_backend("torch", pin=_pin, report=_report, reduced=_reduced, context_exists=_context_exists)
