"""Make `tiny_run` importable, from every rank too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
