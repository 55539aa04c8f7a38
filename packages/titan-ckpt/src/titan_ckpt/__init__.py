"""Sharded safetensors checkpoints: atomic, checksummed, resharding, free of pickle."""
