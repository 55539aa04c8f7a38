"""What the fork server imports once for all ranks. Imported there only, never by a rank or the command line.

A module that cannot be imported is left to the ranks, whose error names it.

A signal sent to the whole process group (a batch system, Ctrl-C) must reach the ranks and the launcher, which act on
it; the server between them must live on, or the ranks' exit codes are lost. That a terminal was closed (SIGHUP) is for the
launcher alone: the ranks, which inherit from the server, save when it says so or is gone.

What was imported lives as long as the server, so it is hidden from the garbage collector. Otherwise the first collection in
every rank would walk all of torch and copy the pages that the rank shares with the server.
"""

import atexit
import contextlib
import gc
import importlib
import os
import signal

for _module in (
    "torch._dynamo",  # what the first optimizer imports, seconds in every rank otherwise
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "titan_train.train.trainer",
    "titan_train.launch.rank.monitor",
):
    with contextlib.suppress(Exception):
        importlib.import_module(_module)
for _number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)
# torch's extensions report objects that live until the end as leaked, in dozens of lines after the run's own: end before
atexit.register(os._exit, 0)
gc.collect()
gc.freeze()
