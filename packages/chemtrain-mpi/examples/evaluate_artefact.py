"""Evaluate a potential artefact at given configurations with JAX, in float64 and with every image.

    python evaluate_artefact.py --potential DIR --configurations configurations.json --out result.json

Both files are JSON: ``{"configurations": [{"positions": (N, 3) Å, "cell": (3, 3) Å}, …]}`` in,
``{"configurations": [{"energy": eV, "forces": (N, 3) eV/Å, "virial": (3, 3) eV}, …]}`` out. One species.
"""

import argparse
import json
from pathlib import Path

from chemtrain_mpi.potentials import evaluate
from distmd_protocol import Units, load_potential


def main() -> None:
    """Read, evaluate, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--potential", type=Path, required=True)
    parser.add_argument("--configurations", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    potential = load_potential(options.potential, units=Units.METAL)
    results = []
    for configuration in json.loads(options.configurations.read_text(encoding="utf-8"))["configurations"]:
        value = evaluate(potential, configuration["positions"], configuration["cell"])
        results.append({"energy": value.energy, "forces": value.forces.tolist(), "virial": value.virial.tolist()})
    options.out.write_text(json.dumps({"configurations": results}), encoding="utf-8")


if __name__ == "__main__":
    main()
