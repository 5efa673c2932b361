"""Shared type names."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

ModelOutputs: TypeAlias = dict[str, Tensor]
"""Model outputs by name: ``energy`` (S, 1) eV, ``forces`` (N, 3) eV/Å, ``virial`` (S, 3, 3) eV, ``stress`` (S, 3, 3)
eV/Å³."""
