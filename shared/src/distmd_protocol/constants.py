"""Physical constants (CODATA 2018; the four defining constants are exact since the SI of 2019)."""

from __future__ import annotations

BOLTZMANN_J_PER_K = 1.380649e-23
"""k_B in J/K, exact."""
AVOGADRO_PER_MOL = 6.02214076e23
"""N_A in 1/mol, exact."""
ELEMENTARY_CHARGE_C = 1.602176634e-19
"""e in C, exact."""
ATOMIC_MASS_KG = 1.66053906660e-27
"""Atomic mass constant in kg (CODATA 2018)."""
BOHR_M = 5.29177210903e-11
"""Bohr radius in m (CODATA 2018)."""
HARTREE_J = 4.3597447222071e-18
"""Hartree energy in J (CODATA 2018)."""
CALORIE_J = 4.184
"""Thermochemical calorie in J, exact."""

BOLTZMANN_EV_PER_K = BOLTZMANN_J_PER_K / ELEMENTARY_CHARGE_C
"""k_B in eV/K: 8.617333262…e-5."""
BOLTZMANN_KJ_PER_MOL_K = BOLTZMANN_J_PER_K * AVOGADRO_PER_MOL / 1000.0
"""k_B in kJ/mol/K: 0.00831446261815324."""
EV_IN_KJ_PER_MOL = ELEMENTARY_CHARGE_C * AVOGADRO_PER_MOL / 1000.0
"""One eV in kJ/mol: 96.48533…"""
