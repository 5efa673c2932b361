"""NequIP models (nequip), eager.

Batzner et al., Nature Communications 13, 2453 (2022). Needs the ``models`` extra.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.data.masses import CHEMICAL_SYMBOLS
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.models._ghost_exchange import ghost_exchange
from nvalchemi_distributed.models._graph import Graph, GraphPotential


class NequIPWrapper(GraphPotential):
    """Energy, forces and stress of a ``NequIPGNNModel``.

    Its interaction blocks work on owned rows; the exchange of ghost features that they have for LAMMPS is switched on
    here (``enable_LAMMPSMLIAPGhostExchange``), and ours answers it.

    Args:
        model: a ``GraphModel``, built with ``compile_mode="eager"``. NequIP computes geometry in float64 whatever the
            dtype of its parameters is; so does the wrapper.
        atomic_numbers: of each of the model's ``type_names``; read from the names when they are chemical symbols.

    Raises:
        ModelError: no eager ``GraphModel``, type names that are no symbols, or a pair potential inside the model.
    """

    def __init__(self, model: nn.Module, *, atomic_numbers: list[int] | None = None) -> None:
        if not getattr(model, "is_graph_model", False):
            raise ModelError(
                f"a nequip GraphModel is needed (compile_mode='eager'), got {type(model).__name__}; a compiled or "
                "packaged model has no parts between which ghosts can be exchanged"
            )
        from nequip.nn._ghost_exchange_base import NoOpGhostExchangeModule

        names = list(model.type_names)
        if atomic_numbers is None:
            strangers = [name for name in names if name not in CHEMICAL_SYMBOLS]
            if strangers:
                raise ModelError(f"type names {strangers} are no chemical symbols; give atomic_numbers")
            atomic_numbers = [CHEMICAL_SYMBOLS.index(name) for name in names]
        if len(atomic_numbers) != len(names):
            raise ModelError(f"{len(atomic_numbers)} atomic_numbers for {len(names)} types {names}")
        energy = _energy_part(model.model)
        if type(getattr(energy, "pair_potential", None)).__name__ == "LennardJones":
            raise ModelError(
                "nequip's LennardJones term sums over ghost rows as well, unlike its ZBL; take it out of the model"
            )
        super().__init__(float(model.metadata["r_max"]), None, torch.tensor(atomic_numbers))
        self.energy = NoOpGhostExchangeModule.enable_LAMMPSMLIAPGhostExchange(energy)

    def network_input(self, data: Batch, graph: Graph) -> dict[str, Any]:
        """NequIP's dictionary: vectors from receiver to sender in float64, types of all rows, the exchange."""
        return {
            "edge_index": torch.stack([graph.receivers, graph.senders]),
            "edge_vectors": graph.vectors.to(torch.float64),
            "atom_types": self.types(data),
            "lmp_mliap_data": ghost_exchange(data),
        }

    def node_energies(self, inputs: dict[str, Any]) -> Tensor:
        """(M,) eV, float64."""
        return self.energy(dict(inputs))["atomic_energy"][: inputs["lmp_mliap_data"].nlocal]


def _energy_part(model: nn.Module) -> nn.Module:
    """The network without its derivatives, which the framework takes."""
    while type(model).__name__ in ("ForceStressOutput", "PartialForceOutput", "StressOutput"):
        model = model.func
    return model
