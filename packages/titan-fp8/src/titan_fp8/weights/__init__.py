"""A weight as float8 layers meet it, and how long its cast is used.

- `cache`: the cast of one weight, kept while someone has declared that the weight does not change.
- `sharded`: a shard that FSDP2 gathers in float8.
- `gathered`: the weight that FSDP2 made of gathered shards.
"""
