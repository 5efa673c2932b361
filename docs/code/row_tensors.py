"""Row tensors on one rank, for the page about them; a test runs it."""

from __future__ import annotations

import torch

from nvalchemi_distributed import ShardTensor
from nvalchemi_distributed.context import NOT_DISTRIBUTED
from nvalchemi_distributed.errors import UnsupportedRowOp
from nvalchemi_distributed.ops import RowInfo, RowKind

# --8<-- [start:keeps]
x = ShardTensor.wrap(torch.rand(4, 3), RowInfo(RowKind.NODE), NOT_DISTRIBUTED)
receivers = ShardTensor.wrap(
    torch.tensor([0, 0, 1, 2]), RowInfo(RowKind.EDGE, refers=RowKind.NODE, owned=True), NOT_DISTRIBUTED
)
senders = ShardTensor.wrap(torch.tensor([1, 3, 0, 1]), RowInfo(RowKind.EDGE, refers=RowKind.NODE), NOT_DISTRIBUTED)

messages = torch.tanh(x[senders] - x[receivers]) @ torch.ones(3, 2)
out = torch.zeros(4, 2)
out.index_add_(0, receivers, messages)

assert messages.row_info.kind is RowKind.EDGE
assert isinstance(out, ShardTensor)
assert out.row_info.kind is RowKind.NODE
assert not out.row_info.fresh
assert out.norm(dim=-1).row_info.kind is RowKind.NODE
assert out.sum().row_info.partial
try:
    torch.cdist(x, x)
except UnsupportedRowOp as error:
    print(error)
# --8<-- [end:keeps]
