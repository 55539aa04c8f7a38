"""Schedules and costs as plain data.

=============  =====================================================================
`schedule`     actions, what each waits for, and the `Schedule`: text, JSON, digest
`placement`    which rank holds which stage
`costs`        time and memory of every stage, links between ranks
`lower`        write sends and receives into a schedule
`csv`          the files of torch.distributed.pipelining
=============  =====================================================================
"""
