"""JAX's switches, lent to the protocol's ``pin_fp32`` and ``PrecisionPolicy``."""

from __future__ import annotations

import os
from typing import Any

import jax
from jax.extend import backend as jax_backend

from distmd_protocol import register_backend

_FULL = ("highest", "float32", "F32_F32_F32")


def _pin() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")


def _report() -> dict[str, Any]:
    return {
        "x64": bool(jax.config.jax_enable_x64),
        "matmul_precision": str(jax.config.jax_default_matmul_precision or "default"),
        "platform": jax.default_backend(),
        "device_kind": jax.local_devices()[0].device_kind,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _reduced() -> list[str]:
    setting = jax.config.jax_default_matmul_precision
    # Left alone, only accelerators multiply float32 in fewer bits.
    full = (*_FULL, None, "default") if jax.default_backend() == "cpu" else _FULL
    return [] if setting in full else [f"jax_default_matmul_precision is {setting or 'default'}"]


def _context_exists() -> bool:
    # Asking for the platform of a backend would make one; only a cached client counts.
    clients = getattr(jax_backend.get_backend, "cache_info", None)
    return bool(clients and clients().currsize and jax.default_backend() != "cpu")


def register() -> None:
    """Lend JAX's switches to the protocol."""
    register_backend("jax", pin=_pin, report=_report, reduced=_reduced, context_exists=_context_exists)
