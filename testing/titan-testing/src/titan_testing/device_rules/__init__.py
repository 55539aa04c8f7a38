"""NCCL's and CUDA's rules on the CPU: programs of several ranks run as they would on devices, and what breaks a rule is found.

Problem: what hangs a cluster is an order: a device-wide wait while a message cannot leave, a first use that not every rank
comes to. gloo has none of these rules, so tests on the CPU pass.

Idea: ranks are threads of one process. `torch.cuda` and `torch.distributed` are stand-ins for as long as `run_on_devices`
lasts; tensors "on cuda" are real ones in host memory, so values flow and can be compared. The rules:

- operations run in the order of their stream; events and `wait_stream` order streams; nothing else does;
- a message leaves when its send and its receive have both come to the head of their streams; messages of one directed pair keep
  their order; a batch ends as one;
- the first use of a group blocks the host until all its ranks come, and a directed pair's first message until its peer comes;
- a device sync waits for every stream, a stream sync for its own; reading a value on the host is a sync of the current stream;
- making a group waits for all ranks, or with ``use_local_synchronization`` for its own;
- a thread starts on device 0, and switching a thread to a device opens a context there;
- memory that was used on a second stream must not be freed before its own stream waits for that, without `record_stream`; two
  streams must not touch the same memory unordered. Both are found by clocks of streams, whatever the times were.

Nothing waits for a time-out: when no thread of any rank can go on, `Hang` names the ranks that wait for each other, and for
what. Waits with a limit end at once when nothing else can.

Limits: a kernel on a stream that waits holds its host too, which on a device would run ahead: such a host is as far behind as its
data. NCCL's small messages, which may leave before their receive, do not. gloo sends are buffered. What a CUDA graph
captures is not modelled.

`hosts`: threads and who waits for whom · `streams`: streams, events, memory · `nccl`: groups and what travels ·
`cuda`: the stand-ins for `torch.cuda` · `collectives`: those for `torch.distributed` · `job`: all of it together.
"""

from titan_testing.device_rules.hosts import Hang
from titan_testing.device_rules.job import Outcome, host_syncs, on_device, run_on_devices

__all__ = ["Hang", "Outcome", "host_syncs", "on_device", "run_on_devices"]
