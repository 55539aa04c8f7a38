"""``python -m titan_cp``: see `titan_cp.cli`."""

import sys

from titan_cp.cli import main

if __name__ == "__main__":
    sys.exit(main())
