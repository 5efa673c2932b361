r"""Free-energy and entropy differences along a training.

Each new trajectory is joined to the one before by Bennett's acceptance ratio, J. Comput. Phys. 22, 245 (1976), which
evaluates both potentials on both trajectories; from the last trajectory to the present potential the weights do the
rest. With ``β = 1/kT``, ``x_i`` the exponents of the weights, and ``θ_n`` the potential of trajectory ``n``,

    F(θ) − F(θ_0) = Σ_n ΔF_BAR(θ_{n−1} → θ_n) − kT ln (1/T Σ_i exp x_i),        ∂F/∂θ = ⟨∂U/∂θ⟩.

In the NPT ensemble the same numbers are Gibbs free energies. The entropy follows from the energy ``U``, in NPT from the
enthalpy ``U + PV``: ``ΔS = (ΔU − ΔF)/T``, here in units of ``k_B``. Momenta do not enter: they contribute nothing as
long as temperature and masses are unchanged. ``T`` snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from chemtrain_mpi.errors import ArgumentError, NonFiniteError
from chemtrain_mpi.reweighting import log_mean_exp

FREE_ENERGY = "free_energy"
ENTROPY = "entropy"
RESERVED = (FREE_ENERGY, ENTROPY)
"""Names of the predictions."""


@dataclass(frozen=True)
class FreeEnergyRecord:
    """What of a state point's past its free energy needs.

    Attributes
    ----------
    params
        Parameters of the potential that sampled the trajectory.
    values
        float64 ``(3,)``: free energy of that potential since training began, the variance of this number, and the
        mean energy (NPT: enthalpy) of the first trajectory; in the energy unit and its square.
    """

    params: Any
    values: np.ndarray


def acceptance_ratio(forward: np.ndarray, reverse: np.ndarray) -> tuple[float, float]:
    """Free-energy difference ``β(F_1 − F_0)`` by Bennett's acceptance ratio, and its standard error.

    The root of Bennett's eq. 12 is bracketed by the energy differences and found by bisection, to the last bit.

    Parameters
    ----------
    forward, reverse
        ``β(U_1 − U_0)`` on snapshots sampled under ``U_0``, ``(T_0,)``, and under ``U_1``, ``(T_1,)``.

    Returns
    -------
    The difference, and its standard error for independent snapshots (Bennett's eq. 10 at the root).

    Raises
    ------
    ArgumentError
        If there are no snapshots on one side.
    NonFiniteError
        If an energy difference is not finite.
    """
    forward, reverse = (np.asarray(values, np.float64).reshape(-1) for values in (forward, reverse))
    if not (forward.size and reverse.size):
        raise ArgumentError(f"{forward.size} snapshots of one potential and {reverse.size} of the other; both need one")
    if not (np.all(np.isfinite(forward)) and np.all(np.isfinite(reverse))):
        raise NonFiniteError("an energy difference between two successive potentials is not finite")
    offset = np.log(forward.size / reverse.size)

    def excess(difference: float) -> float:
        return float(np.sum(_fermi(offset + forward - difference)) - np.sum(_fermi(difference - offset - reverse)))

    low = min(forward.min(), reverse.min()) - abs(offset)
    high = max(forward.max(), reverse.max()) + abs(offset)
    middle = (low + high) / 2
    while low < middle < high:
        low, high = (middle, high) if excess(middle) < 0.0 else (low, middle)
        middle = (low + high) / 2
    accepted = _fermi(offset + forward - middle), _fermi(middle - offset - reverse)
    return float(middle), float(np.sqrt(sum(_relative_variance(one) for one in accepted)))


def first_record(params: Any, enthalpy: np.ndarray) -> FreeEnergyRecord:
    """The record of a trajectory that training begins with.

    Parameters
    ----------
    enthalpy
        ``U``, in NPT ``U + PV``, of its snapshots ``(T,)``.
    """
    return FreeEnergyRecord(params, np.array([0.0, 0.0, np.mean(enthalpy, dtype=np.float64)]))


def next_record(
    before: FreeEnergyRecord, params: Any, kT: float, forward: np.ndarray, reverse: np.ndarray
) -> FreeEnergyRecord:
    """The record of the trajectory that follows.

    Parameters
    ----------
    forward, reverse
        Energy of the new potential less that of the old one, on the old snapshots and on the new ones.
    """
    difference, error = acceptance_ratio(np.asarray(forward, np.float64) / kT, np.asarray(reverse, np.float64) / kT)
    values = before.values + np.array([kT * difference, (kT * error) ** 2, 0.0])
    return replace(before, params=params, values=values)


def predictions(
    values: jax.Array, exponent: jax.Array, weights: jax.Array, enthalpy: jax.Array, kT: jax.Array
) -> dict[str, jax.Array]:
    """Free energy (energy unit) and entropy (``k_B``) since training began. Traced and differentiable.

    Parameters
    ----------
    values
        Those of the record.
    exponent, weights
        Of the snapshots, ``(T,)``.
    enthalpy
        ``U``, in NPT ``U + PV``, of the snapshots under the present potential, ``(T,)``.
    """
    free_energy = values[0] - kT * log_mean_exp(exponent)
    # Around the start's mean: the difference of two large means would lose its digits.
    change = (weights * (enthalpy - values[2])).sum()
    return {FREE_ENERGY: free_energy, ENTROPY: (change - free_energy) / kT}


def _fermi(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, x))


def _relative_variance(acceptance: np.ndarray) -> float:
    mean = np.mean(acceptance)
    return float(np.var(acceptance) / mean**2 / acceptance.size) if mean > 0.0 else np.inf
