"""Make what the tests of composition share importable from every rank, without putting the folder on sys.path for others."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
