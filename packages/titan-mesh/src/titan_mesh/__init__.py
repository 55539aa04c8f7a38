"""Parallel degrees to named DeviceMesh axes and rank groups, with an explanation."""
