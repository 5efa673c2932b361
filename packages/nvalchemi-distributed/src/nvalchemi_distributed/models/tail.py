"""Long-range corrections of a truncated pair potential, with g(r) = 1 beyond the cutoff.

U_tail/N = 2πρ Σ x_a x_b ∫_rc^∞ φ_ab r² dr and P_tail = −(2/3)πρ² Σ x_a x_b ∫_rc^∞ φ'_ab r³ dr
(Allen and Tildesley, Computer Simulation of Liquids, 2nd ed., eqs 2.144 and 2.148). With an energy shifted to zero at
the cutoff, U_tail also gives back 2πρ Σ x_a x_b φ_ab(rc) rc³/3.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from nvalchemi_distributed.errors import InputError


def tail_integrals(family: str, parameters: Mapping[str, np.ndarray], cutoff: float) -> tuple[np.ndarray, np.ndarray]:
    """∫φ r² dr and ∫φ' r³ dr from the cutoff to infinity, (S, S) each, in eV·Å³.

    By parts, ∫φ' r³ dr = −φ(rc) rc³ − 3 ∫φ r² dr.

    Raises:
        InputError: a family without a tail, or a Mie attraction with m ≤ 3, whose tail diverges.
    """
    p = {k: np.asarray(v, dtype=np.float64) for k, v in parameters.items()}
    rc = cutoff
    if family == "lennard_jones":
        family, p = "mie", {**p, "n": np.full_like(p["epsilon"], 12.0), "m": np.full_like(p["epsilon"], 6.0)}
    if family == "mie":
        n, m, eps, sigma = p["n"], p["m"], p["epsilon"], p["sigma"]
        if (m <= 3).any():
            raise InputError(f"a Mie attraction with m = {m.min()} ≤ 3 has no finite tail; switch tail_correction off")
        c = n / (n - m) * (n / m) ** (m / (n - m)) * eps
        energy = c * rc**3 * ((sigma / rc) ** n / (n - 3) - (sigma / rc) ** m / (m - 3))
        at_cutoff = c * ((sigma / rc) ** n - (sigma / rc) ** m)
    elif family == "morse":
        eps, r0, alpha = p["epsilon"], p["r0"], p["alpha"]

        def part(k: float) -> np.ndarray:
            """∫_rc^∞ e^{−kα(r−r0)} r² dr."""
            a = k * alpha
            return np.exp(-a * (rc - r0)) * (rc**2 / a + 2 * rc / a**2 + 2 / a**3)

        energy = eps * (part(2.0) - 2.0 * part(1.0))
        q = np.exp(-alpha * (rc - r0))
        at_cutoff = eps * q * (q - 2.0)
    else:
        raise InputError(f"family {family!r} has no tail beyond its cutoff; switch tail_correction off")
    return energy, -at_cutoff * rc**3 - 3.0 * energy


def tail_per_system(counts: Tensor, volume: Tensor, energy: Tensor, virial: Tensor) -> tuple[Tensor, Tensor]:
    """Whole-system tail energy (S,) eV and the isotropic virial P_tail·V (S,) eV.

    Args:
        counts: (S, T) atoms of each species.
        volume: (S,) Å³.
        energy: (T, T) ∫φ r² dr, shift give-back included.
        virial: (T, T) ∫φ' r³ dr.
    """
    pairs = counts.unsqueeze(-1) * counts.unsqueeze(-2) / volume.reshape(-1, 1, 1)
    two_pi = 2.0 * np.pi
    return two_pi * (pairs * energy).sum((-1, -2)), -two_pi / 3.0 * (pairs * virial).sum((-1, -2))
