"""Models, tokenizers and data sets from the Hugging Face hub, or a server that speaks its protocol.

- `choose`: which files of a repository are needed, and which are never loaded.
- `download`: load them, resumed and checked.
"""

from titan_train.hub.download import Downloaded, download

__all__ = ["Downloaded", "download"]
