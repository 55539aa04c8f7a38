"""What the fork server imports once for all ranks. Imported there only, never by a rank or the command line.

A signal sent to the whole process group (a batch system, Ctrl-C) must reach the ranks and the launcher, which act on
it; the server between them must live on, or the ranks' exit codes are lost.
"""

import signal

import torch._dynamo  # noqa: F401  # what the first optimizer imports, seconds in every rank otherwise
import torch.distributed.fsdp  # noqa: F401
import torch.distributed.tensor  # noqa: F401

import titan_train.train  # noqa: F401

for _number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(_number, signal.SIG_IGN)
