"""Encoded images as training data: latents and text features in shards, read by sample number.

- `shard`: one shard of either form, read and written. `features`: all shards of a folder.
- `prepare`: from images and captions to shards: `images` reads them, `encoders` encodes them.
"""
