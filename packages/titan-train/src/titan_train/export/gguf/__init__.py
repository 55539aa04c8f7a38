"""GGUF, the format of llama.cpp.

- `folder`: write the file. `tokenizer`: our tokenizers in its metadata.
- `model`: read the file back with gguf's own reader, and with llama.cpp where it is installed.
"""
