"""Fault injection: `inject` carries out inside a rank the faults that `titan_train.config.faults` lists."""
