"""MACE (mace-torch): eager modules and TorchScript files.

Batatia et al., NeurIPS 35 (2022), arXiv:2206.07697. Needs the ``mace`` extra.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi_distributed.data.batch import Batch
from nvalchemi_distributed.errors import ModelError
from nvalchemi_distributed.models._ghost_exchange import GhostExchange, NoGhosts, ghost_exchange
from nvalchemi_distributed.models._graph import Graph, GraphPotential


class MACEWrapper(GraphPotential):
    """Energy, forces and stress of a MACE model.

    Eager models use the seam that MACE has for programs that decompose space: its layers then work on owned rows, and
    ghost features are exchanged before every layer but the first. A TorchScript model has no such seam; its parts are
    called one by one, with the same exchange between them.

    Args:
        model: a ``MACE`` or ``ScaleShiftMACE``, eager or scripted.
        head: name of the head of a multi-head model; the only one, or the last, when left out.

    Raises:
        ModelError: a model that needs charges or spins of the whole system, or an unknown head.
    """

    def __init__(self, model: nn.Module, *, head: str | None = None) -> None:
        scripted = isinstance(model, torch.jit.ScriptModule)
        # The module that MACE writes for LAMMPS holds the network as `model`.
        core = getattr(model, "model", model)
        if hasattr(core, "joint_embedding"):
            raise ModelError(
                "this MACE model embeds charges or spins of the whole system, which a batch does not carry; use one "
                "without embedding_specs"
            )
        reference = core.atomic_energies_fn.atomic_energies
        super().__init__(float(core.r_max), reference.dtype, core.atomic_numbers.clone())
        self.model, self.scripted = core, scripted
        self._head = _head_index(core, head)
        self._one_hot: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_checkpoint(
        cls,
        name_or_path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        head: str | None = None,
    ) -> MACEWrapper:
        """Load a checkpoint from a file, or one that mace-torch has put into its cache folder.

        A checkpoint of MACE is a pickle: reading it runs what its author wrote. Read only what you trust. A TorchScript
        file is not.

        Args:
            name_or_path: a file, or a name such as ``"medium-0b2"``. Nothing is downloaded.
            device: where to put it.
            dtype: convert parameters to it; as stored when left out.
            head: see the class.

        Raises:
            ModelError: mace-torch is missing, no such file, or a file that holds no MACE model.
        """
        path = _find(name_or_path)
        model = _load(path, device)
        if dtype is not None:
            model = model.to(dtype)
        # One by one: a TorchScript module has no requires_grad_.
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return cls(model.eval(), head=head)

    def network_input(self, data: Batch, graph: Graph) -> dict[str, Any]:
        """The arguments of MACE's forward: vectors from sender to receiver, one-hot elements of all rows."""
        m, n = graph.n_receivers, graph.n_rows
        exchange = ghost_exchange(data)
        return {
            "vectors": -graph.vectors,
            "node_attrs": self._node_attributes(data),
            "edge_index": torch.stack([graph.senders, graph.receivers]),
            # Energies are summed by system outside, so that all atoms are one graph here.
            "batch": torch.zeros(m, dtype=torch.int64, device=data.device),
            "head": torch.full((1,), self._head, dtype=torch.int64, device=data.device),
            "natoms": (m, n - m),
            "lammps_class": None if isinstance(exchange, NoGhosts) else exchange,
        }

    def node_energies(self, inputs: dict[str, Any]) -> Tensor:
        """(M,) eV, float64 where MACE sums in it."""
        if self.scripted:
            return self._scripted_energies(inputs)
        return self.model(inputs, compute_force=False, compute_virials=False, compute_stress=False, lammps_mliap=True)[
            "node_energy"
        ]

    def _node_attributes(self, data: Batch) -> Tensor:
        types = self.types(data)
        if self._one_hot is None or self._one_hot[0] is not types:
            n = int(self.model.atomic_numbers.shape[0])
            self._one_hot = (types, nn.functional.one_hot(types, n).to(self._dtype))
        return self._one_hot[1]

    def _scripted_energies(self, inputs: dict[str, Any]) -> Tensor:
        """The forward of MACE, part by part."""
        net, attributes, edge_index = self.model, inputs["node_attrs"], inputs["edge_index"]
        vectors: Tensor = inputs["vectors"]
        exchange: GhostExchange | None = inputs["lammps_class"]
        m, _ = inputs["natoms"]
        owned = attributes[:m]
        heads = inputs["head"].expand(m)
        rows = torch.arange(m, device=vectors.device)
        lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        reference = net.atomic_energies_fn(owned)[rows, heads]
        features = net.node_embedding(attributes)
        angular = net.spherical_harmonics(vectors)
        radial, weight = net.radial_embedding(lengths, attributes, edge_index, net.atomic_numbers)
        parts = []
        if hasattr(net, "pair_repulsion_fn"):
            parts.append(net.pair_repulsion_fn(lengths, attributes, edge_index, net.atomic_numbers)[:m])
        kept = []
        # children(): the list of a loaded TorchScript file cannot be iterated itself.
        layers = zip(net.interactions.children(), net.products.children(), strict=True)
        for layer, (interaction, product) in enumerate(layers):
            if layer and exchange is not None:
                features = exchange.refresh(features)
            message, skip = interaction(
                attributes, features, angular, radial, edge_index, weight, first_layer=(layer == 0)
            )
            features = product(message[:m], None if skip is None else skip[:m], owned)
            kept.append(features)
        readouts = list(net.readouts.children())
        for k, readout in enumerate(readouts):
            parts.append(readout(kept[-1 if len(readouts) == 1 else k], heads)[rows, heads])
        interaction_energy = torch.stack(parts).sum(0)
        if hasattr(net, "scale_shift"):
            interaction_energy = net.scale_shift(interaction_energy, heads)
        return reference.double() + interaction_energy.double()


def _head_index(core: nn.Module, head: str | None) -> int:
    names = list(getattr(core, "heads", ["Default"]))
    if head is None:
        return len(names) - 1
    if head not in names:
        raise ModelError(f"head {head!r} is not one of this model's: {names}")
    return names.index(head)


def _find(name_or_path: str | Path) -> Path:
    """The checkpoint's file."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    try:
        from mace.calculators import foundations_models as known
        from mace.tools.utils import get_cache_dir
    except ImportError as error:
        raise ModelError("mace-torch is not installed; install nvalchemi-distributed[mace]") from error
    name, cache = str(name_or_path), Path(get_cache_dir())
    url = known.mace_mp_urls.get(name)
    # As mace-torch names the file that it has downloaded.
    stored = "".join(c for c in os.path.basename(url or name) if c.isalnum() or c == "_")
    for candidate in (cache / stored, cache / name):
        if candidate.is_file():
            return candidate
    hint = (
        f"download it once with mace.calculators.mace_mp({name!r}) on a machine that has a network, or copy it there"
        if url
        else f"give a file, or one of {sorted(known.mace_mp_urls)}"
    )
    raise ModelError(
        f"no MACE checkpoint {name!r}: neither a file, nor {cache / stored}. Nothing is downloaded here; {hint}"
    )


def _load(path: Path, device: torch.device | str) -> nn.Module:
    if _is_torchscript(path):
        return torch.jit.load(str(path), map_location=device)
    try:
        model = torch.load(path, map_location=device, weights_only=False)
    except ImportError as error:
        raise ModelError(f"{path} needs {error.name}; install nvalchemi-distributed[mace]") from error
    if not isinstance(model, nn.Module) or not hasattr(model, "interactions"):
        raise ModelError(f"{path} holds a {type(model).__name__}, not a MACE model (a module with `interactions`)")
    return model


def _is_torchscript(path: Path) -> bool:
    """Both kinds of file are zip archives; only TorchScript holds code."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.split("/", 1)[-1].startswith("code/") for name in archive.namelist())
