"""What follows from a schedule: proof, timeline, memory, bounds.

=============  =====================================================================
`verify`       prove that a schedule runs: complete, in order, no deadlock, in memory
`simulate`     when everything runs, both bubbles, where idle time comes from, memory
`bounds`       what no schedule can beat
`measure`      steps as they ran, and the costs that explain them
`balance`      cut layers into stages of equal cost
=============  =====================================================================
"""
