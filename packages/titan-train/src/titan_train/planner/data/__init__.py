"""The published measurements, with their sources, as CSV tables."""
