"""Which code a configuration or a run folder may make this process run.

``model.name = "package.module:callable"`` names code, so a configuration that somebody else wrote could name anything:

- `factory` imports the callable, from installed packages and from paths given with ``--code`` only, and takes it only if
  it is declared to build an `nn.Module`.
- `record` remembers, in the account of the user and not in the run's folder, which code a run was started with. A folder
  made elsewhere needs ``--trust-code``; the user's own does not, as long as the code has not changed. The same holds for
  the machine code in an exported folder.

- `without_working_directory`: processes that start in the block import nothing from the folder that they start in.

SECURITY.md says what this protects from, and what it does not. No torch until a factory is imported.
"""

import contextlib
import os
from collections.abc import Generator

from titan_train.trust.factory import import_factory, names_code, use_code
from titan_train.trust.record import (
    CodeRecord,
    admit_machine_code,
    admit_own_code,
    admit_run_code,
    remember_code,
    remember_machine_code,
)

__all__ = [
    "CodeRecord",
    "admit_machine_code",
    "admit_own_code",
    "admit_run_code",
    "import_factory",
    "names_code",
    "remember_code",
    "remember_machine_code",
    "use_code",
    "without_working_directory",
]


@contextlib.contextmanager
def without_working_directory() -> Generator[None]:
    """Keep Python processes that start in the block from importing what lies in the working directory.

    multiprocessing starts ``python -c``, which looks there first: a ``random.py`` beside a configuration would be run.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before
