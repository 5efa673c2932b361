"""SevenNet models (sevenn), eager; SevenNet-0 comes with its weights.

Park et al., J. Chem. Theory Comput. 20, 4857 (2024). Needs the ``models`` extra.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.models._ghost_exchange import ghost_exchange
from nvalchemi_distributed.models._graph import Graph, GraphPotential

_NODE_KEYS = ("x", "node_attr", "atom_type", "atomic_numbers", "self_cont_tmp")


class SevenNetWrapper(GraphPotential):
    """Energy, forces and stress of an ``AtomGraphSequential``.

    SevenNet is a sequence of modules on one dictionary. They are called one by one: ghost features are exchanged before
    every convolution but the first, and all rows of ghosts are dropped after each, so that they cost no node-wise work.

    Args:
        model: the network. It may be converted with ``.double()``.
        modal: which modality of a multi-modal model.

    Raises:
        ModelError: a network without a map of elements, or a modality that is missing or unknown.
    """

    def __init__(self, model: nn.Module, *, modal: str | None = None) -> None:
        types = getattr(model, "type_map", None)
        if types is None:
            raise ModelError(f"{type(model).__name__} has no type_map of elements; give an AtomGraphSequential")
        known = getattr(model, "modal_map", None)
        if (modal is None) != (known is None) or (known is not None and modal not in known):
            raise ModelError(f"modal={modal!r}, but the model's modalities are {sorted(known or [])}; give one of them")
        numbers = torch.tensor(sorted(types, key=lambda z: types[z]))
        super().__init__(float(model.cutoff), next(model.parameters()).dtype, numbers)
        model.set_is_batch_data(False)
        if modal is not None:
            model.prepare_modal_deploy(modal)
        self.model = model.eval()

    @classmethod
    def from_checkpoint(
        cls, name_or_path: str | Path = "SevenNet-0", *, dtype: torch.dtype | None = None, modal: str | None = None
    ) -> SevenNetWrapper:
        """Load a checkpoint from a file, or one whose weights the installed package holds.

        Args:
            name_or_path: a file, or a name such as ``"SevenNet-0"``. Nothing is downloaded.
            dtype: convert parameters to it; float32, as stored, when left out.
            modal: see the class.

        Raises:
            ModelError: sevenn is missing, or no such file.
        """
        model = _build(name_or_path)
        model = model.requires_grad_(False)
        return cls(model if dtype is None else model.to(dtype), modal=modal)

    def network_input(self, data: Batch, graph: Graph) -> dict[str, Any]:
        """SevenNet's dictionary: vectors from receiver to sender, elements of all rows, the exchange."""
        self.types(data)
        return {
            "edge_index": torch.stack([graph.receivers, graph.senders]),
            "edge_vec": graph.vectors,
            "atomic_numbers": data.atomic_numbers,
            "lammps_data": ghost_exchange(data),
        }

    def node_energies(self, inputs: dict[str, Any]) -> Tensor:
        """(M,) eV."""
        exchange, data = inputs["lammps_data"], self.model._preprocess(dict(inputs))
        first = True
        for name, module in self.model.named_children():
            convolution = name.endswith("_convolution")
            if convolution and not first:
                data["x"] = exchange.refresh(data["x"])
            data = module(data)
            if name == "onehot_idx_to_onehot":
                # One-hot rows are made in float32 whatever the network's dtype.
                for key in ("x", "node_attr"):
                    if key in data:
                        data[key] = data[key].to(self._dtype)
            if convolution:
                first = False
                for key in _NODE_KEYS:
                    if key in data:
                        data[key] = data[key][: exchange.nlocal]
            if "atomic_energy" in data:
                return data["atomic_energy"].reshape(-1)
        raise ModelError("this SevenNet model gives no energies of atoms; it cannot be decomposed")


def _build(name_or_path: str | Path) -> nn.Module:
    try:
        from sevenn import _const
        from sevenn.checkpoint import SevenNetCheckpoint
    except ImportError as error:
        raise ModelError("sevenn is not installed; install nvalchemi-distributed[models]") from error
    shipped = {
        "sevennet-0": _const.SEVENNET_0_11Jul2024,
        "sevennet-0_11jul2024": _const.SEVENNET_0_11Jul2024,
        "sevennet-0_22may2024": _const.SEVENNET_0_22May2024,
        "sevennet-l3i5": _const.SEVENNET_l3i5,
        "sevennet-mf-0": _const.SEVENNET_MF_0,
    }
    path = Path(shipped.get(str(name_or_path).lower().replace("7net", "sevennet"), name_or_path))
    if not path.is_file():
        raise ModelError(
            f"no SevenNet checkpoint {str(name_or_path)!r}: neither a file nor one of {sorted(shipped)}. Nothing is "
            "downloaded here; sevenn keeps what it has downloaded in ~/.cache/sevennet: give the file"
        )
    return SevenNetCheckpoint(path).build_model()
