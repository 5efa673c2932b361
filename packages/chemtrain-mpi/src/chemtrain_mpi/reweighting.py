r"""Statistical weights that turn a trajectory of one thermodynamic state into averages of another.

A snapshot ``S_i`` sampled at potential ``U_ref``, inverse temperature ``β`` and pressure ``P`` stands for the state
``U, β', P'`` with weight ``w_i ∝ exp(x_i)``,

    x_i = −β'(U(S_i) + P'V_i) + β(U_ref(S_i) + PV_i),

with ``V`` taken as 0 in the NVT ensemble. At an unchanged state this is ``−β(U − U_ref)``: Thaler and Zavadlav,
Nature Communications 12, 6884 (2021), eq. 4. The effective sample size ``exp(−Σ w ln w)`` is their eq. 6.

``T`` is the number of snapshots.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def exponents(
    energy: jax.Array,
    reference_energy: jax.Array,
    kT: jax.Array | float,
    reference_kT: jax.Array | float,
    volume: jax.Array | float = 0.0,
    pressure: jax.Array | float = 0.0,
    reference_pressure: jax.Array | float = 0.0,
) -> jax.Array:
    """Exponents ``x_i`` of the weights.

    Parameters
    ----------
    energy, reference_energy
        ``U(S_i)`` under the wanted and the sampled potential, shape ``(T,)``.
    kT, reference_kT
        Thermal energy wanted and sampled, in the energy unit.
    volume
        Shape ``(T,)``; 0 in NVT.
    pressure, reference_pressure
        Energy unit over volume unit.

    Returns
    -------
    Shape ``(T,)``, dimensionless.
    """
    # β'U − βU_ref is written around the difference, so that an unchanged state does not subtract two large numbers.
    enthalpy_change = (energy - reference_energy) + (pressure - reference_pressure) * volume
    reference_enthalpy = reference_energy + reference_pressure * volume
    return -enthalpy_change / kT - reference_enthalpy * (1.0 / kT - 1.0 / reference_kT)


def log_weights(exponent: jax.Array) -> jax.Array:
    """Logarithms of the normalised weights, shape ``(T,)``; all NaN if any exponent is not finite.

    A softmax would turn one infinite exponent into a harmless looking weight of 0 or 1.
    """
    poisoned = jnp.where(jnp.all(jnp.isfinite(exponent)), 0.0, jnp.nan)
    return jax.nn.log_softmax(exponent) + poisoned


def weights(exponent: jax.Array) -> jax.Array:
    """Normalised weights ``w_i``, shape ``(T,)``; all NaN if any exponent is not finite."""
    return jnp.exp(log_weights(exponent))


def effective_samples(exponent: jax.Array) -> jax.Array:
    """Effective sample size ``exp(−Σ w ln w)``, between 1 and ``T``; NaN if any exponent is not finite."""
    log_w = log_weights(exponent)
    return jnp.exp(-jnp.sum(jnp.exp(log_w) * log_w))


def log_mean_exp(exponent: jax.Array) -> jax.Array:
    """``ln (1/T Σ exp x_i)``: logarithm of the ratio of the wanted partition function to the sampled one.

    Exponential averaging, in one direction: Zwanzig, J. Chem. Phys. 22, 1420 (1954), eq. 16. NaN if any exponent is
    not finite.
    """
    poisoned = jnp.where(jnp.all(jnp.isfinite(exponent)), 0.0, jnp.nan)
    return jax.nn.logsumexp(exponent) - jnp.log(exponent.shape[0]).astype(exponent.dtype) + poisoned
