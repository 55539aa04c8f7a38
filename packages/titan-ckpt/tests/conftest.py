"""Tests share `ckpt_loop`, a module beside them; there is no tests package to import it from."""

import os
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)
sys.path.insert(0, _HERE)
# Ranks are started from a server process that reads this.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_HERE, os.environ.get("PYTHONPATH")]))
