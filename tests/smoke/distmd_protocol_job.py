"""Save and load a checkpoint and a potential, with the protocol's wheel alone."""

import sys
from pathlib import Path

import numpy as np

from distmd_protocol import Potential, Units, latest, load_checkpoint, load_potential, save_checkpoint, save_potential

out = Path(sys.argv[1])
arrays = {"x": np.arange(6.0).reshape(2, 3)}
save_checkpoint(out / "checkpoints" / "step-7", arrays, kind="dynamics", step=7).wait()
found = load_checkpoint(latest(out / "checkpoints"), kind="dynamics")
assert found.step == 7
assert np.array_equal(found.arrays["x"], arrays["x"])

argon = Potential(
    family="lennard_jones",
    species=("Ar",),
    masses=np.array([39.948]),
    parameters={"epsilon": np.array([[0.98]]), "sigma": np.array([[0.34]])},
    cutoff=0.85,
    smoothing="none",
    tail_correction=True,
    units=Units("nm", "kJ/mol", "amu", "ps"),
)
save_potential(out / "potential", argon)
assert abs(load_potential(out / "potential", units=Units.METAL).cutoff - 8.5) < 1e-12
