"""Allegro models (nequip-allegro), eager.

Musaelian et al., Nature Communications 14, 579 (2023). Needs the ``models`` extra.
"""

from __future__ import annotations

from nvalchemi_distributed.models.nequip import NequIPWrapper


class AllegroWrapper(NequIPWrapper):
    """Energy, forces and stress of an ``AllegroModel``.

    Allegro is strictly local: the energy of an atom depends on the edges that it receives and on nothing else, so that
    no feature of a ghost is ever read and no exchange takes place inside the network.

    Arguments and errors as for :class:`NequIPWrapper`.
    """
