"""The figure of the README: what the fitted potential gives against the reference, trained states and the held-out one.

python tools/demo_figure.py build/demo/result.json docs/assets/demo.png
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PANELS = (
    ("pressure", "MPa", "pressure (MPa)"),
    ("energy", "kJ_per_mol", "residual internal energy (kJ/mol)"),
)


def draw(result: dict[str, Any], path: Path) -> None:
    """Write one panel a quantity: prediction against reference, with error bars."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(9.6, 3.8), constrained_layout=True)
    for axis, (name, unit, label) in zip(axes, PANELS, strict=True):
        for rows, style in (
            (result["states"], {"fmt": "o", "color": "#1f5fa8", "label": "trained over MPI (JAX)"}),
            ([result["held_out"]], {"fmt": "D", "color": "#c2410c", "label": held_out_label(result)}),
        ):
            reference = [row[f"{name}_reference_{unit}"] for row in rows]
            value = [row[f"{name}_{unit}"] for row in rows]
            error = [2 * row[f"{name}_error_{unit}"] for row in rows]
            axis.errorbar(reference, value, yerr=error, capsize=3, markersize=6, linestyle="none", **style)
        ends = axis.get_xlim()
        axis.plot(ends, ends, color="0.6", linewidth=1, zorder=0)
        axis.set_xlim(ends)
        axis.set_xlabel(f"reference {label}")
        axis.set_ylabel(f"predicted {label}")
    axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    fit = result["fit"]
    figure.suptitle(
        f"liquid argon: ε/k_B {fit['epsilon_over_kB']:.1f} K, σ {fit['sigma']:.3f} Å (bars: two standard errors)",
        fontsize=10,
    )
    figure.savefig(path, dpi=140)
    plt.close(figure)


def held_out_label(result: dict[str, Any]) -> str:
    """Name the state that the training never saw."""
    row = result["held_out"]
    temperature, pressure = row["temperature_K"], row["pressure_reference_MPa"]
    return f"held out: {temperature:.0f} K, {pressure:.0f} MPa, {result['atoms']:,} atoms decomposed (torch)"


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
