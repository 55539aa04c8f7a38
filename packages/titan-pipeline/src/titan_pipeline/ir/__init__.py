"""Schedules and costs as plain data.

=============  =====================================================================
`schedule`     actions and the `Schedule`: text, JSON, digest
`placement`    which rank holds which stage
`costs`        time and memory of every stage, links between ranks
`graph`        what each action waits for
`lower`        write sends and receives into a schedule
`csv`          the files of torch.distributed.pipelining
=============  =====================================================================
"""
