"""Reductions of one's own through ``self.reduce``, the same on one rank and on several."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict

import pytest
import torch
from systems import fcc, lj

from distmd_protocol.testkit import run_ranks
from nvalchemi_distributed import DomainConfig, DomainParallel
from nvalchemi_distributed.data import Batch
from nvalchemi_distributed.domain.reduce import LocalReducer, MeshReducer
from nvalchemi_distributed.domain.transport import Transport
from nvalchemi_distributed.dynamics import NVE, maxwell_boltzmann
from nvalchemi_distributed.errors import ConfigError
from nvalchemi_distributed.hooks import NeighborListHook

pytestmark = pytest.mark.gloo


class SpeedLimit(NVE):
    """Slows all atoms down while the slowest one is below a limit; keeps two reduced numbers of every step.

    Written for one process: it registers what it needs, and knows nothing of ranks.
    """

    def __init__(self, model, dt, **common):
        super().__init__(model, dt, **common)
        self.reduce.register("smallest", lambda rows: rows.amin(0))
        # A sum that ranks may not simply add: the logarithm of a sum of exponentials.
        self.reduce.register("log_sum", lambda rows: rows.logsumexp(0))
        self.seen = []

    def post_update(self, batch):
        super().post_update(batch)
        speed = batch.velocities.norm(dim=-1)
        local = torch.full((2,), float("inf"), dtype=torch.float64)
        log = torch.full((1,), -float("inf"), dtype=torch.float64)
        if batch.num_nodes:
            local = torch.stack([speed.min(), batch.positions[:, 0].min()])
            log = speed.double().logsumexp(0).reshape(1)
        slowest = self.reduce.apply("smallest", local)
        total = self.reduce.apply("log_sum", log)
        self.seen.append([*slowest.tolist(), float(total)])
        batch.velocities.mul_(1.0 - 0.05 * float(slowest[0] < 0.005))


def limited(comm):
    model = lj(smoothing="shift")
    batch = Batch.from_data_list([fcc(repeat=(6, 3, 3), a=5.5)])
    maxwell_boltzmann(batch, 300.0, seed=5)
    integrator = SpeedLimit(model, 2.0, hooks=[NeighborListHook(model.neighbor_config, skin=0.5)])
    parallel = DomainParallel(integrator, DomainConfig(cutoff=5.0, skin=0.5), n_steps=25)
    owned = parallel.partition(batch if comm.rank == 0 else None)
    counts = [owned.n_owned, owned.n_ghost, batch.num_nodes]
    parallel.run(owned)
    parallel.close()
    # What was registered stays with the integrator.
    after = float(integrator.reduce.apply("smallest", torch.ones(1)))
    return [integrator.seen, counts, after]


def test_a_registered_reduction_equals_one_rank():
    one = torch.tensor(run_ranks(limited, 1, launcher="gloo")[0][0])
    # Both branches were taken, so the scaling is part of what is compared.
    assert 0 < int((one[:, 0] < 0.005).sum()) < len(one)
    for size in (2, 4):
        for seen, (owned, ghosts, total), after in run_ranks(limited, size, launcher="gloo"):
            assert owned + ghosts < total
            assert float((torch.tensor(seen) - one).abs().max()) < 1e-10
            assert after == 1.0


def test_registered_reductions_are_checked():
    reduce = LocalReducer()
    with pytest.raises(ConfigError, match=r"'flux'.*none is registered"):
        reduce.apply("flux", torch.zeros(2))
    reduce.register("flux", lambda rows: rows.sum(0))
    assert reduce.apply("flux", torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert reduce.apply("flux", torch.tensor([3], dtype=torch.int64)).dtype is torch.int64
    for name in ("flux", "sum"):
        with pytest.raises(ConfigError, match="exists already"):
            reduce.register(name, lambda rows: rows.sum(0))
    reduce.register("total", lambda rows: rows.sum())
    with pytest.raises(ConfigError, match="must reduce the first dimension"):
        reduce.apply("total", torch.zeros(3))
    assert LocalReducer(reduce.registered).apply("flux", torch.ones(1)).tolist() == [1.0]


class Threads(Transport):
    """Ranks as threads of one process: the pairs of a reduction on numbers of ranks that are not worth processes."""

    def __init__(self, rank, size, queues, messages):
        super().__init__(None)
        self.rank, self.size, self._queues, self._messages = rank, size, queues, messages

    def _swap(self, mine, out, peer):
        if mine is not None:
            self._messages[self.rank] += 1
            self._queues[self.rank, peer].put(mine.clone())
        return mine if out is None else out.copy_(self._queues[peer, self.rank].get(timeout=20))


@pytest.mark.parametrize("size", [*range(1, 18), 31, 64])
def test_any_number_of_ranks_reduces_to_the_same_bits_in_few_messages(size):
    values = torch.rand(size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) - 0.3
    queues, messages, results = defaultdict(queue.SimpleQueue), defaultdict(int), {}
    for pair in ((a, b) for a in range(size) for b in range(size)):
        queues[pair]

    def work(rank):
        transport = Threads(rank, size, queues, messages)
        total, most = transport.all_reduce(values[rank], torch.add), transport.all_reduce(values[rank], torch.maximum)
        results[rank] = (total, most)

    ranks = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert len(results) == size
    for total, most in results.values():
        assert torch.equal(total, results[0][0])
        assert torch.equal(most, values.amax(0))
    assert torch.allclose(results[0][0], values.sum(0), rtol=0, atol=1e-15 * size)
    # Two reductions: log2 W each, and two more where W is no power of two.
    assert max(messages.values(), default=0) <= 2 * ((size.bit_length() - 1) + 1)


def reduced(comm):
    reducer = MeshReducer(Transport(torch.distributed.group.WORLD))
    mine = torch.tensor([comm.rank + 1.0, -comm.rank], dtype=torch.float32)
    whole = torch.tensor(2**40 + comm.rank)
    return [
        reducer.sum(mine).tolist(),
        reducer.max(mine).tolist(),
        int(reducer.sum(whole)),
        reducer.sum(mine[:0]).tolist(),
        [int(reducer.sum(torch.tensor(k))) for k in range(50)],
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_and_maxima_of_real_ranks(size):
    n = size * (size + 1) / 2
    expected = [[n, size - n], [size, 0], size * 2**40 + size * (size - 1) // 2, [], [size * k for k in range(50)]]
    assert run_ranks(reduced, size, launcher="gloo") == [expected] * size
