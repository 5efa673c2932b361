"""What velocity Verlet's time step does to the published point of the Lennard-Jones fluid, shown with LAMMPS (`slow`).

Verlet samples configurations as if at T (1 + Ω² dt² / 4), to lowest order and for a harmonic oscillator of frequency Ω
whose kinetic temperature is held at T. At T* = 1.4, ρ* = 0.9, dt = 0.005 τ that moves energy and pressure by several
times the published errors. BAOAB is exact for the oscillator (Leimkuhler and Matthews, J. Chem. Phys. 138, 174102
(2013)), so `test_physics.py` compares with the published point less this difference.
"""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_lammps import lammps_program, variables
from test_physics import PUBLISHED, STEP_ERROR

pytestmark = pytest.mark.slow


def verlet(folder: Path, dt: float, steps: int, seed: int) -> list[tuple[float, float]]:
    """U/N and P of 864 atoms with their errors, from blocks; Nosé–Hoover chains on velocity Verlet."""
    program, reason = lammps_program()
    if program is None:
        pytest.skip(reason)
    equilibrate, blocks = round(20 / dt), 30
    block = steps // blocks // 10 * 10
    script = f"""units lj
lattice fcc 0.9
region box block 0 6 0 6 0 6
create_box 1 box
create_atoms 1 box
mass 1 1.0
velocity all create 1.4 {seed}
pair_style lj/cut 2.5
pair_modify shift yes
pair_coeff 1 1 1.0 1.0
neighbor 0.4 bin
neigh_modify every 1 delay 5 check yes
timestep {dt}
fix integrate all nvt temp 1.4 1.4 0.5
run {equilibrate}
variable u equal pe
variable p equal press
fix blocks all ave/time 10 {block // 10} {block} v_u v_p file blocks.txt
run {block * blocks}
"""
    folder.mkdir()
    (folder / "in.fluid").write_text(script, encoding="utf-8")
    command = [program, "-in", "in.fluid", "-log", "none"]
    done = subprocess.run(
        command, cwd=folder, env=variables(), capture_output=True, text=True, check=False, timeout=3600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    table = np.loadtxt(folder / "blocks.txt")[:, 1:]
    assert len(table) >= blocks - 1
    return [(float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x)))) for x in table.T]


def test_published_point_holds_the_error_of_its_time_step(tmp_path: Path) -> None:
    whole = verlet(tmp_path / "whole", 0.005, 600_000, 11)
    half = verlet(tmp_path / "half", 0.0025, 900_000, 12)
    for (a, a_error), (b, b_error), published, step in zip(whole, half, PUBLISHED, STEP_ERROR, strict=True):
        assert abs(a - published[0]) < 3 * math.hypot(a_error, published[1])
        # The error goes with dt²: three quarters of it are gone at half the step.
        found, error = 4 / 3 * (a - b), 4 / 3 * math.hypot(a_error, b_error)
        assert abs(found - step[0]) < 3 * math.hypot(error, step[1])
