"""Encoded images as training data: latents and text features in shards, read by sample number.

- `fields`: what a sample holds. `tensors` and `tar`: the two forms of a shard. `features`: all shards of a folder.
- `prepare`: from images and captions to shards: `images` reads them, `encoders` encodes, `write` writes.
"""
