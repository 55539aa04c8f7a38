"""`python -m titan_train` is the command `titan-train`; torchrun wants the module form."""

import sys
from pathlib import Path

from titan_train.cli import main

# `python -m` puts the working directory first: a module there must not be imported without being asked for
if not sys.flags.safe_path and sys.path and sys.path[0] in ("", str(Path.cwd())):
    del sys.path[0]

if __name__ == "__main__":
    raise SystemExit(main())
