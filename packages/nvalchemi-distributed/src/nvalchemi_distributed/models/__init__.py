"""Models: the interface, the pair potentials, and wrappers of model packages, each of which needs its extra."""

from nvalchemi_distributed.models.allegro import AllegroWrapper
from nvalchemi_distributed.models.base import BaseModelMixin, ModelConfig
from nvalchemi_distributed.models.lj import LennardJonesModelWrapper
from nvalchemi_distributed.models.mace import MACEWrapper
from nvalchemi_distributed.models.nequip import NequIPWrapper
from nvalchemi_distributed.models.orb import ORBWrapper
from nvalchemi_distributed.models.orb_direct import ORBDirectWrapper
from nvalchemi_distributed.models.pair import PairPotentialWrapper
from nvalchemi_distributed.models.sevennet import SevenNetWrapper

__all__ = [
    "AllegroWrapper",
    "BaseModelMixin",
    "LennardJonesModelWrapper",
    "MACEWrapper",
    "ModelConfig",
    "NequIPWrapper",
    "ORBDirectWrapper",
    "ORBWrapper",
    "PairPotentialWrapper",
    "SevenNetWrapper",
]
