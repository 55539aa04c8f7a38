"""Make the helpers importable, from the ranks' processes too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
