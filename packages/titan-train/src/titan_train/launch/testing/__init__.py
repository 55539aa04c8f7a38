"""Fault injection: `inject` carries out inside a rank the faults that `launch.faults` lists."""
