import pytest

plot = pytest.importorskip("chemtrain_mpi.plot", exc_type=ImportError)

HISTORY = [
    {"update": u, "loss": 1.0 / u, "recomputed": [0] if u % 2 else [], "n_eff": {"0": 9.0, "1": 8.0}} for u in (1, 2, 3)
]


def test_pictures_are_drawn(tmp_path):
    panels = {"P / MPa": ([1.0, 2.0], [1.1, 1.9], [0.1, 0.1]), "u": ([1.0, 2.0], [1.1, 1.9], None)}
    figures = [
        plot.loss_curve(HISTORY),
        plot.targets_against_predictions(["a", "b"], panels),
        plot.traces({"ε": [1.0, 2.0], "σ": [3.0, 4.0]}),
    ]
    for index, figure in enumerate(figures):
        figure.savefig(tmp_path / f"{index}.png")
        assert (tmp_path / f"{index}.png").stat().st_size > 5000
    assert [len(figure.axes) for figure in figures] == [2, 2, 2]
