"""Commands on what a run reads: text, tokens, tokenizers."""
