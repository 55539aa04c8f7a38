"""``python -m titan_mesh``: see `titan_mesh.cli`."""

import sys

from titan_mesh.cli import main

if __name__ == "__main__":
    sys.exit(main())
