"""The order of samples as pure functions of an index: no state, no index file, the same on every rank.

- `permutation`: shuffle ``0 .. n-1`` by a Feistel network.
- `mixture`: mix weighted sources with exact counts in every block.
"""
