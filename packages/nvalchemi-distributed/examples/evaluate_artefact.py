"""Evaluate a potential artefact at given configurations with torch, in float64, on one process.

    python evaluate_artefact.py --potential DIR --configurations configurations.json --out result.json

Both files are JSON: ``{"configurations": [{"positions": (N, 3) Å, "cell": (3, 3) Å}, …]}`` in,
``{"configurations": [{"energy": eV, "forces": (N, 3) eV/Å, "virial": (3, 3) eV}, …]}`` out. One species, periodic.
"""

import argparse
import json
from pathlib import Path

import torch

from nvalchemi_distributed.data import AtomicData, Batch
from nvalchemi_distributed.data.masses import CHEMICAL_SYMBOLS
from nvalchemi_distributed.hooks import NeighborListHook
from nvalchemi_distributed.models import PairPotentialWrapper


def main() -> None:
    """Read, evaluate, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--potential", type=Path, required=True)
    parser.add_argument("--configurations", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = PairPotentialWrapper.from_artefact(options.potential)
    number = CHEMICAL_SYMBOLS.index(model.species[0])
    results = []
    for configuration in json.loads(options.configurations.read_text(encoding="utf-8"))["configurations"]:
        positions = torch.tensor(configuration["positions"], dtype=torch.float64)
        cell = torch.tensor(configuration["cell"], dtype=torch.float64)
        data = AtomicData(positions, torch.full((len(positions),), number), cell=cell, pbc=True)
        batch = Batch.from_data_list([data])
        NeighborListHook(model.neighbor_config).update(batch)
        out = model(batch)
        results.append(
            {
                "energy": float(out["energy"]),
                "forces": out["forces"].tolist(),
                "virial": out["virial"][0].tolist(),
            }
        )
    options.out.write_text(json.dumps({"configurations": results}), encoding="utf-8")


if __name__ == "__main__":
    main()
