"""Parallelism and memory: each transforms a plain model in place, on the meta device, before its weights exist."""
