"""Write a small pipeline with images: `python -m tests.small NAME FOLDER`."""

import shlex
import sys
from pathlib import Path

from autotune.system.process import silence_libraries

silence_libraries()

from tests.small import write_small

sys.stdout.write(f"autotune plan {shlex.join(write_small(sys.argv[1], Path(sys.argv[2])))}\n")
