"""Train the tutorial's potential on one process, with chemtrain-mpi's wheel and neither MPI nor torch."""

import runpy
import sys
from pathlib import Path

out, tutorial = Path(sys.argv[1]), Path(sys.argv[2])
sys.argv = ["train.py", str(out)]
runpy.run_path(str(tutorial / "train.py"), run_name="__main__")
assert (out / "potential" / "manifest.json").is_file()
