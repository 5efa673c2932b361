"""Small random-weight networks of each package, the same on every rank, and systems for them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings

import numpy as np
import pytest
import torch

from nvalchemi_distributed.data import AtomicData

NUMBERS = (14, 32)
CUTOFF = 4.0

THIRD_PARTY_WARNINGS = [
    # e3nn 0.4.4 reads its constants with torch.load; mace-torch allows it through a variable.
    pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD:UserWarning"),
    # e3nn and MACE build their tensor products with TorchScript.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where a model's package is not installed; each has an environment of its own."""
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed here; see tools/dev.py test")


@contextlib.contextmanager
def building(dtype: torch.dtype, seed: int):
    """Packages read the default dtype while they build; their import and scripting warnings are not ours."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


def mace_network(dtype=torch.float64, *, interaction="RealAgnosticResidualInteractionBlock", channels=8, **settings):
    with building(dtype, 0):
        # mace first: it lets this e3nn read its own constants.
        import mace.modules.blocks as blocks
        from e3nn import o3
        from mace.modules.models import ScaleShiftMACE

        chosen = {
            "r_max": CUTOFF,
            "num_bessel": 5,
            "num_polynomial_cutoff": 5,
            "max_ell": 2,
            "interaction_cls": getattr(blocks, interaction),
            "interaction_cls_first": getattr(blocks, interaction),
            "num_interactions": 2,
            "num_elements": 2,
            "hidden_irreps": o3.Irreps(f"{channels}x0e+{channels}x1o"),
            "MLP_irreps": o3.Irreps("8x0e"),
            "atomic_energies": np.array([-3.0, -5.0]),
            "avg_num_neighbors": 12.0,
            "atomic_numbers": list(NUMBERS),
            "correlation": 2,
            "gate": torch.nn.functional.silu,
            "atomic_inter_scale": 0.8,
            "atomic_inter_shift": 0.1,
            **settings,
        }
        return ScaleShiftMACE(**chosen).eval()


def scripted_mace(dtype=torch.float64, **settings):
    network = mace_network(dtype, **settings)
    with building(dtype, 0):
        from e3nn.util.jit import compile as script

        return script(network)


def cueq_mace(dtype=torch.float64):
    """The same network with cuEquivariance's operations; without its CUDA part they are plain torch."""
    network = mace_network(dtype)
    with building(dtype, 0):
        from mace.cli.convert_e3nn_cueq import run

        return run(network, device="cpu", return_model=True).eval()


def nequip_network(dtype=torch.float64, **settings):
    with building(torch.float32, 0):
        from nequip.model import NequIPGNNModel
        from nequip.utils.global_state import set_global_state

        set_global_state()
        return NequIPGNNModel(
            **common_of_nequip(dtype), **{"num_layers": 3, "l_max": 1, "num_features": 8, **settings}
        ).eval()


def allegro_network(dtype=torch.float64):
    with building(torch.float32, 0):
        from allegro.model import AllegroModel
        from nequip.utils.global_state import set_global_state

        set_global_state()
        radial = {"_target_": "allegro.nn.TwoBodyBesselScalarEmbed", "num_bessels": 4}
        return AllegroModel(
            **common_of_nequip(dtype),
            l_max=1,
            num_layers=2,
            num_scalar_features=8,
            num_tensor_features=4,
            radial_chemical_embed=radial,
        ).eval()


def orb_network(dtype=torch.float64, most_neighbors=300):
    with building(dtype, 0):
        from orb_models.forcefield.atomic_system import SystemConfig
        from orb_models.forcefield.pretrained import orb_v3_conservative_architecture

        return orb_v3_conservative_architecture(
            latent_dim=16,
            base_mlp_hidden_dim=32,
            head_mlp_hidden_dim=16,
            num_message_passing_steps=3,
            device="cpu",
            system_config=SystemConfig(radius=6.0, max_num_neighbors=most_neighbors),
        ).eval()


def orb_direct_network(dtype=torch.float64, most_neighbors=300, *, has_stress=True):
    """Heads that scale and shift what they give, each in its own way."""
    with building(dtype, 0):
        from orb_models.forcefield.atomic_system import SystemConfig
        from orb_models.forcefield.pretrained import orb_v3_direct_architecture

        network = orb_v3_direct_architecture(
            latent_dim=16,
            base_mlp_hidden_dim=32,
            head_mlp_hidden_dim=16,
            num_message_passing_steps=3,
            has_stress=has_stress,
            device="cpu",
            system_config=SystemConfig(radius=6.0, max_num_neighbors=most_neighbors),
        ).eval()
        scales = {"forces.normalizer": (0.02, 0.3)}
        if has_stress:
            scales |= {"stress.diag_normalizer": (-0.01, 0.04), "stress.offdiag_normalizer": (0.003, 0.01)}
        for name, (mean, variance) in scales.items():
            bn = network.heads.get_submodule(name).bn
            bn.running_mean.fill_(mean)
            bn.running_var.fill_(variance)
        return network


def common_of_nequip(dtype):
    return {
        "seed": 1,
        "model_dtype": str(dtype).removeprefix("torch."),
        "r_max": CUTOFF,
        "type_names": ["Si", "Ge"],
        "avg_num_neighbors": 12.0,
        "compile_mode": "eager",
        "per_type_energy_scales": {"Si": 1.1, "Ge": 0.9},
        "per_type_energy_shifts": {"Si": -3.0, "Ge": -5.0},
    }


def mace_settings(kind):
    if kind == "mace-density":
        return {"interaction": "RealAgnosticDensityInteractionBlock", "pair_repulsion": True}
    return {"num_interactions": 3} if kind == "mace-three" else {}


@functools.cache
def wrapper(kind: str, dtype: torch.dtype = torch.float64):
    """The wrapper of a small network of that kind, made once a process."""
    if kind.startswith("mace"):
        from nvalchemi_distributed.models.mace import MACEWrapper

        make = {"mace-script": scripted_mace, "mace-cueq": cueq_mace}.get(kind, mace_network)
        return MACEWrapper(make(dtype, **mace_settings(kind)))
    if kind == "nequip":
        from nvalchemi_distributed.models.nequip import NequIPWrapper

        return NequIPWrapper(nequip_network(dtype))
    if kind == "allegro":
        from nvalchemi_distributed.models.allegro import AllegroWrapper

        return AllegroWrapper(allegro_network(dtype))
    if kind == "sevennet":
        from nvalchemi_distributed.models.sevennet import SevenNetWrapper

        with building(torch.float32, 0):
            return SevenNetWrapper.from_checkpoint("SevenNet-0", dtype=dtype)
    if kind == "orb":
        from nvalchemi_distributed.models.orb import ORBWrapper

        return ORBWrapper(orb_network(dtype))
    if kind == "orb-direct":
        from nvalchemi_distributed.models.orb_direct import ORBDirectWrapper

        return ORBDirectWrapper(orb_direct_network(dtype))
    raise KeyError(kind)


LAYERS = {
    "mace": 2,
    "mace-script": 2,
    "mace-three": 3,
    "mace-density": 2,
    "mace-cueq": 2,
    "nequip": 3,
    "allegro": 1,
    "orb": 3,
    "orb-direct": 3,
    "sevennet": 5,
}
"""Message-passing layers of each kind: what one evaluation may exchange."""


def two_elements(data: AtomicData) -> AtomicData:
    """Every third atom is of the second element."""
    third = torch.arange(data.num_nodes) % 3 == 0
    return AtomicData(
        data.positions,
        torch.where(third, NUMBERS[1], NUMBERS[0]),
        cell=data.cell[0],
        pbc=data.pbc[0],
        velocities=data.velocities,
    )
