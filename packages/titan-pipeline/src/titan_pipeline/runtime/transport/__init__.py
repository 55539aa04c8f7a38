"""How messages move between ranks.

=============  =====================================================================
`base`         what the executor asks of a transport
`messages`     headers, payloads, the news of a failure
`tree`         stage outputs of any structure as tensors and back
`packed`       messages of shapes that both ranks know, without a header
`plain`        the structure around them: plain values as JSON
`threads`      ranks as threads of one process
`connect`      sockets between the ranks of one machine: `host_transport`
`sockets`      messages over them, which wake nobody but their receiver
`outbox`       what the kernel does not take at once
`gloo`         a torch.distributed process group
`device`       tensors stay on their accelerator
=============  =====================================================================
"""
