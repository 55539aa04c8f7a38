"""What a run reads: `source` is one corpus, `data` all of them and how they become samples, `tokenizer` how text becomes
ids; `vision` images with prompts and answers.
"""
