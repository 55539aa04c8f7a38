"""Which code a configuration or a run folder may make this process run.

``model.name = "package.module:callable"`` names code, so a configuration that somebody else wrote could name anything:

- `factory` imports the callable, from folders and packages given with ``--code`` only, and takes it only if it is defined
  there, at the top level of a module, and declared to build an `nn.Module`.
- `owner` tells whose code raised an error: the user's, ours, torch's or another library's.
- `published` refuses code that a folder's ``config.json`` asks transformers to fetch or to run.
- `record` remembers, in the account of the user and not in the run's folder, which code a run was started with. A folder
  made elsewhere needs ``--trust-code``; the user's own does not, as long as the code has not changed. The same holds for
  the machine code in an exported folder.

SECURITY.md says what this protects from, and what it does not. No torch until a factory is imported.
"""

from titan_train.trust.factory import import_factory, names_code, use_code
from titan_train.trust.published import refuse_foreign_code
from titan_train.trust.record import (
    CodeRecord,
    admit_machine_code,
    admit_own_code,
    admit_run_code,
    remember_code,
    remember_machine_code,
    remember_named_code,
)

__all__ = [
    "CodeRecord",
    "admit_machine_code",
    "admit_own_code",
    "admit_run_code",
    "import_factory",
    "names_code",
    "refuse_foreign_code",
    "remember_code",
    "remember_machine_code",
    "remember_named_code",
    "use_code",
]
