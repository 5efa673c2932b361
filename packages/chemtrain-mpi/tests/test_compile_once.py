"""Nothing is compiled after the first epoch but one program of each kind for a new capacity rung.

Counted twice: by the trainer's own counters, and by JAX, which reports every compilation of the process, also those of
single operations between the programs.
"""

from itertools import pairwise

import jax
import problems
import pytest

from chemtrain_mpi import process_printouts

pytestmark = pytest.mark.once

SHORT = process_printouts(0.005, 0.25, 0.05, 0.05)
KINDS = ("simulate", "lists", "energies", "gradient")
UPDATES = 20


class CompileLog:
    """Names of what JAX lowers and compiles while it is open; JAX has no public way to take a listener off again."""

    def __init__(self):
        self.open = True
        self.events = []
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event, duration, **attributes):
        if self.open and event.startswith("/jax/core/compile/"):
            self.events.append((event, attributes.get("fun_name")))


@pytest.fixture(scope="module")
def run():
    """A trainer after its first epoch and 20 more updates, and what was compiled in each."""
    log = CompileLog()
    trainer = problems.trainer(4, timings=SHORT, reweight_ratio=0.97)
    trainer.initialize_trajstates()
    trainer.train(1)
    steps = [(list(log.events), trainer.compilations, rungs(trainer))]
    for _ in range(UPDATES):
        log.events.clear()
        trainer.train(1)
        steps.append((list(log.events), trainer.compilations, rungs(trainer)))
    log.open = False
    return trainer, steps


def rungs(trainer):
    return {trajectory.capacity for trajectory in trainer.trajectories}


def test_the_number_of_stale_state_points_varies(run):
    trainer, _ = run
    counts = {len(entry["recomputed"]) for entry in trainer.history[1:]}
    assert len(counts) > 2, "with the same number at every update the other tests would say little"


def test_the_first_epoch_compiles_one_program_of_each_kind_for_each_rung(run):
    _, steps = run
    events, counters, seen = steps[0]
    # JAX's reports reach this test; else an empty list below would mean nothing.
    assert len(events) > sum(counters.values())
    assert len(seen) > 1
    assert {kind: counters[kind] for kind in KINDS} == dict.fromkeys(KINDS, len(seen))


def test_later_updates_compile_nothing_but_new_rungs(run):
    _, steps = run
    known = set(steps[0][2])
    for (_, before, _), (events, after, seen) in pairwise(steps):
        new = len(seen - known)
        known |= seen
        assert all(after[kind] - before[kind] <= new for kind in KINDS)
        assert new or not events
