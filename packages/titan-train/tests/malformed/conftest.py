"""Make the table of cases importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
