"""Tokens on disk: what `titan-train data prepare` writes once and training memory-maps.

- `format`: the two files of one token shard, with a writer and a reader.
- `mapped`: files read through memory maps, few of them mapped at a time.
- `manifest`: what a prepared source contains. It is written last.
- `prepare`: tokenize a source into shards; continue after a kill.
- `token_source`: many shards read as one run of tokens.
- `megatron`: Megatron-LM's `.bin` and `.idx` files as a token source.
"""
