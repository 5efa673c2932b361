"""Boxes, who meets whom, and the vote on a rebuild: on paper, without ranks."""

from __future__ import annotations

import pytest
import torch

from nvalchemi_distributed.domain.epoch import Epoch, cast_vote
from nvalchemi_distributed.domain.geometry import make_boxes, within
from nvalchemi_distributed.domain.plan import build_plan
from nvalchemi_distributed.domain.reduce import LocalReducer

CUTOFF, SKIN = 5.0, 0.5


class OneOfMany:
    """A rank whose peers send as many rows as they get."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def counts(self, send, peers, name):
        return list(send)


def test_atoms_outside_the_cell_along_an_open_axis_belong_to_the_outermost_boxes_and_have_no_images():
    inside = torch.linspace(0.05, 0.95, 30, dtype=torch.float64)
    frac = torch.stack([inside, inside.roll(7), inside.roll(13)], dim=-1)
    idx = torch.zeros(30, dtype=torch.int64)
    cell = torch.diag(torch.tensor([30.0, 30.0, 30.0], dtype=torch.float64)).unsqueeze(0)
    boxes = make_boxes(frac, idx, torch.tensor([[False, True, True]]), (3, 1, 1))
    # Far outside, just outside, and where an image would lie in the middle box.
    along = torch.tensor([-3.0, 7.0, -0.02, 1.02, 1.45], dtype=torch.float64)
    out = torch.stack([along, along.new_full((5,), 0.5), along.new_full((5,), 0.5)], dim=-1)
    which = torch.zeros(5, dtype=torch.int64)
    assert boxes.owner(out, which).tolist() == [0, 2, 0, 2, 2]
    near = [within(out, which, boxes, cell, 3.0, rank).tolist() for rank in range(3)]
    assert near[0] == [True, False, True, False, False]
    assert near[1] == [False] * 5
    assert near[2] == [False, True, False, True, True]


def test_an_atom_that_lags_outside_its_box_reaches_ranks_that_the_box_does_not():
    """Slabs of 10 Å: rank 2 is 10 Å from rank 0's box, and 5.5 Å from an atom that rank 0 still owns."""
    uniform = torch.linspace(0.01, 0.99, 40, dtype=torch.float64)
    frac = torch.stack([uniform, uniform.roll(7), uniform.roll(13)], dim=-1)
    pbc = torch.tensor([[False, True, True]])
    boxes = make_boxes(frac, torch.zeros(40, dtype=torch.int64), pbc, (4, 1, 1))
    cell = torch.diag(torch.tensor([40.0, 30.0, 30.0], dtype=torch.float64)).unsqueeze(0)
    atoms = torch.tensor([[0.1, 0.5, 0.5], [14.5 / 40, 0.5, 0.5]], dtype=torch.float64)
    plan = build_plan(atoms, torch.zeros(2, dtype=torch.int64), boxes, cell, 6.0, OneOfMany(0, 4), 5.0)
    assert plan.peers.tolist() == [1, 2]
    assert plan.send_index.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("moved", "strain", "rebuild"),
    [
        (0.24, 0.0, False),  # two atoms may each have moved half the skin
        (0.26, 0.0, True),
        (0.0, 0.08, False),  # 0.08 · (cutoff + skin) = 0.44
        (0.0, 0.10, True),  # 0.55
        (0.10, 0.06, True),  # 0.20 + 0.33
        (0.08, 0.06, False),  # 0.16 + 0.33
    ],
)
def test_a_rebuild_comes_with_half_the_skin_of_displacement_and_strain(moved, strain, rebuild):
    x = torch.rand(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 20
    cell, pbc = 20 * torch.eye(3, dtype=torch.float64).unsqueeze(0), torch.tensor([[True, True, True]])
    idx = torch.zeros(20, dtype=torch.int64)
    epoch = Epoch(None, None, x.clone(), cell.clone(), cell.clone(), {}, idx, None, CUTOFF, SKIN, 0)
    stretched = cell * torch.tensor([1.0, 1.0 + strain, 1.0], dtype=torch.float64)
    now = x * torch.tensor([1.0, 1.0 + strain, 1.0], dtype=torch.float64)
    now[7, 2] += moved
    vote = cast_vote(epoch, now, stretched, pbc, LocalReducer())
    assert (vote.rebuild, vote.non_finite) == (rebuild, False)
    now[3, 1] = torch.nan
    assert cast_vote(epoch, now, stretched, pbc, LocalReducer()).non_finite
