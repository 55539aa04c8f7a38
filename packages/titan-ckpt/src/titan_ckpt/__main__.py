"""``python -m titan_ckpt`` is ``titan-ckpt``."""

import sys

from titan_ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
