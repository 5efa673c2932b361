"""Models: the interface and the pair potentials."""

from nvalchemi_distributed.models.base import BaseModelMixin, ModelConfig
from nvalchemi_distributed.models.lj import LennardJonesModelWrapper
from nvalchemi_distributed.models.pair import PairPotentialWrapper

__all__ = ["BaseModelMixin", "LennardJonesModelWrapper", "ModelConfig", "PairPotentialWrapper"]
