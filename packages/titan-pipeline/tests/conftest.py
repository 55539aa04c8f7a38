"""Make `boundary_types` importable, from every rank too: what crosses between processes is found by its module's name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
