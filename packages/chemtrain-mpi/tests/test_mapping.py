import jax.numpy as jnp
import numpy as np
import pytest

from chemtrain_mpi.mapping import OneByOne, Together


def program(shared, x, extra):
    """Shapes decide what is together: the traces are counted."""
    program.traces += 1
    return {"sum": shared * jnp.sum(x) + extra["a"], "x": x}


@pytest.mark.parametrize("mapping", [OneByOne, Together])
def test_results_come_in_the_order_of_the_items_whatever_their_shapes(mapping):
    items = [(jnp.arange(float(n)), {"a": jnp.asarray(float(i))}) for i, n in enumerate([3, 2, 3, 3, 2, 5])]
    program.traces = 0
    results = mapping(program)(2.0, items)
    for (x, extra), result in zip(items, results, strict=True):
        assert float(result["sum"]) == 2.0 * float(np.sum(x)) + float(extra["a"])
        np.testing.assert_array_equal(result["x"], x)
    assert program.traces == 3
    assert mapping(program)(2.0, []) == []


def test_programs_are_few_however_many_items_there_are():
    together = Together(program)
    program.traces = 0
    for count in range(1, 17):
        results = together(1.0, [(jnp.full(2, float(i)), {"a": jnp.zeros(())}) for i in range(count)])
        assert [float(result["sum"]) for result in results] == [2.0 * i for i in range(count)]
    # 1, 2, 4, 8, 16.
    assert program.traces == 5
