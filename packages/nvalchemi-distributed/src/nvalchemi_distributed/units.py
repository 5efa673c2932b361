"""Units of this package, as plain numbers.

Lengths in Å, energies in eV, masses in amu, time steps in fs. Velocities are in √(eV/amu), ASE's convention,
so that ``0.5 * m * v**2`` is in eV. Values derive from CODATA 2018.
"""

from __future__ import annotations

import math

ELEMENTARY_CHARGE = 1.602176634e-19
"""C (exact)."""

ATOMIC_MASS_CONSTANT = 1.66053906660e-27
"""kg (CODATA 2018)."""

BOLTZMANN = 1.380649e-23 / ELEMENTARY_CHARGE
"""k_B in eV/K (exact)."""

FEMTOSECOND = 1.0e-15 * math.sqrt(ELEMENTARY_CHARGE / ATOMIC_MASS_CONSTANT) * 1.0e10
"""One fs in the internal unit of time Å·√(amu/eV); a velocity in √(eV/amu) times this is in Å/fs."""

EV_PER_CUBIC_ANGSTROM_IN_MPA = ELEMENTARY_CHARGE * 1.0e30 * 1.0e-6
"""MPa in one eV/Å³."""

KJ_PER_MOL = 1.0e3 / 6.02214076e23 / ELEMENTARY_CHARGE
"""One kJ/mol in eV (per particle)."""
