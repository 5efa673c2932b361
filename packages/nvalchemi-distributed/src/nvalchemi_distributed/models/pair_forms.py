"""Pair energies φ(r) and w = −φ'(r)/r of the four families, as functions of r². Force on i is w·(x_i − x_j).

Parameters are float64 arrays (S, S) over species pairs; here they arrive already looked up, one value a pair or one
for all. Formulas: Lennard-Jones; Mie (Mie 1903); Morse (Morse 1929); natural cubic spline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvalchemi_distributed.errors import InputError

PairFunction = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, Tensor]]


def lennard_jones(r2: Tensor, p: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """4ε[(σ/r)¹² − (σ/r)⁶]; ``p`` = (4ε, σ²)."""
    four_eps, sigma2 = p
    inv = r2.reciprocal()
    s2 = inv * sigma2
    s6 = (s2 * s2).mul_(s2)
    e6 = s6 * four_eps
    energy = (s6 - 1.0).mul_(e6)
    return energy, s6.mul_(12.0).sub_(6.0).mul_(e6).mul_(inv)


def mie(r2: Tensor, p: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Cε[(σ/r)ⁿ − (σ/r)ᵐ], C = n/(n−m)·(n/m)^{m/(n−m)}; ``p`` = (Cε, σ², n, m)."""
    c_eps, sigma2, n, m = p
    half_log = 0.5 * torch.log(sigma2 / r2)
    a = c_eps * torch.exp(n * half_log)
    b = c_eps * torch.exp(m * half_log)
    return a - b, (n * a - m * b) / r2


def morse(r2: Tensor, p: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """ε[(1 − e^{−α(r−r₀)})² − 1]; ``p`` = (ε, r₀, α)."""
    eps, r0, alpha = p
    r = torch.sqrt(r2)
    q = torch.exp(-alpha * (r - r0))
    return eps * q * (q - 2.0), -2.0 * alpha * eps * q * (1.0 - q) / r


def tabulated(r2: Tensor, p: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Natural cubic spline, linear below its first knot; ``p`` = (pair, knots (M,), coefficients (P, M − 1, 4)).

    ``pair`` is the species pair of each r², or a scalar 0.
    """
    pair, knots, coefficients = p
    r = torch.sqrt(r2)
    k = (torch.searchsorted(knots, r.contiguous(), right=True) - 1).clamp(0, knots.shape[0] - 2)
    c = coefficients[pair.expand_as(k), k]
    t = r - knots[k]
    value = c[..., 0] + t * (c[..., 1] + t * (c[..., 2] + t * c[..., 3]))
    slope = c[..., 1] + t * (2.0 * c[..., 2] + t * 3.0 * c[..., 3])
    below = r < knots[0]
    value = torch.where(below, c[..., 0] + t * c[..., 1], value)
    slope = torch.where(below, c[..., 1], slope)
    return value, -slope / r


@dataclass(frozen=True)
class PairForm:
    """A family with its parameters ready for lookup.

    Attributes:
        name: family name of the potential artefact.
        function: φ and w from r².
        by_pair: tensors (S·S, …) looked up by species pair before ``function`` is called.
        shared: tensors passed on as they are (the spline's knots and coefficients).
    """

    name: str
    function: PairFunction
    by_pair: tuple[Tensor, ...]
    shared: tuple[Tensor, ...] = ()
    uses_pair_index: bool = False


def make_form(family: str, parameters: Mapping[str, np.ndarray]) -> PairForm:
    """The form of one family; ``parameters`` in Å and eV, as in the potential artefact.

    Raises:
        InputError: an unknown family, a missing or left-over parameter, one that is not symmetric or not positive.
    """
    required = {
        "lennard_jones": ("epsilon", "sigma"),
        "mie": ("epsilon", "sigma", "n", "m"),
        "morse": ("epsilon", "r0", "alpha"),
        "tabulated_pair": ("r", "energy"),
    }
    if family not in required:
        raise InputError(f"family {family!r} has no torch form; known: {sorted(required)}")
    if set(parameters) != set(required[family]):
        raise InputError(f"{family} needs the parameters {required[family]}, got {sorted(parameters)}")
    p = {k: np.asarray(v, dtype=np.float64) for k, v in parameters.items()}
    for name, value in p.items():
        if not np.isfinite(value).all():
            raise InputError(f"{family} parameter {name} is not finite")
        if name != "r" and (value.ndim < 2 or not np.array_equal(value, np.swapaxes(value, 0, 1))):
            raise InputError(f"{family} parameter {name} must be a symmetric table over species pairs")
    if family == "tabulated_pair":
        return _tabulated_form(p["r"], p["energy"])
    for name in required[family]:
        if not (p[name] > 0).all() and not (name == "epsilon" and (p[name] >= 0).all()):
            raise InputError(f"{family} parameter {name} must be positive, got {p[name].tolist()}")
    t = {k: torch.from_numpy(v.reshape(-1).copy()) for k, v in p.items()}
    if family == "lennard_jones":
        return PairForm(family, lennard_jones, (4.0 * t["epsilon"], t["sigma"] ** 2))
    if family == "morse":
        return PairForm(family, morse, (t["epsilon"], t["r0"], t["alpha"]))
    n, m = t["n"], t["m"]
    if not bool((n > m).all()):
        raise InputError(f"mie needs n > m, got n = {p['n'].tolist()}, m = {p['m'].tolist()}")
    c = n / (n - m) * (n / m) ** (m / (n - m))
    return PairForm(family, mie, (c * t["epsilon"], t["sigma"] ** 2, n, m))


def _tabulated_form(knots: np.ndarray, energy: np.ndarray) -> PairForm:
    if knots.ndim != 1 or len(knots) < 2 or not (np.diff(knots) > 0).all() or knots[0] <= 0:
        raise InputError("tabulated_pair needs two or more ascending positive knots r")
    if energy.shape[2:] != knots.shape:
        raise InputError(
            f"tabulated_pair energy has {energy.shape[2:]} values a pair, but there are {len(knots)} knots"
        )
    flat = energy.reshape(-1, len(knots))
    coefficients = torch.from_numpy(natural_spline(knots, flat))
    index = torch.arange(flat.shape[0])
    return PairForm("tabulated_pair", tabulated, (index,), (torch.from_numpy(knots.copy()), coefficients), True)


def natural_spline(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Coefficients (P, M − 1, 4) of the natural cubic splines through (x, y[p]): y = Σ c_k (r − x_k)^k.

    Args:
        x: (M,) ascending.
        y: (P, M).
    """
    h = np.diff(x)
    slope = np.diff(y, axis=1) / h
    m = len(x)
    second = np.zeros_like(y)
    if m > 2:
        # Thomas algorithm for the second derivatives; the end ones are zero.
        diagonal = 2.0 * (h[:-1] + h[1:])
        rhs = 6.0 * np.diff(slope, axis=1)
        upper = np.zeros(m - 2)
        work = np.zeros((y.shape[0], m - 2))
        upper[0] = h[1] / diagonal[0]
        work[:, 0] = rhs[:, 0] / diagonal[0]
        for k in range(1, m - 2):
            pivot = diagonal[k] - h[k] * upper[k - 1]
            upper[k] = h[k + 1] / pivot
            work[:, k] = (rhs[:, k] - h[k] * work[:, k - 1]) / pivot
        second[:, m - 2] = work[:, -1]
        for k in range(m - 4, -1, -1):
            second[:, k + 1] = work[:, k] - upper[k] * second[:, k + 2]
    b = slope - h * (2.0 * second[:, :-1] + second[:, 1:]) / 6.0
    d = np.diff(second, axis=1) / (6.0 * h)
    return np.stack([y[:, :-1], b, second[:, :-1] / 2.0, d], axis=-1)
