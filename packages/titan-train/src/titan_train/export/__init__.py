"""A trained model leaves complete and proven, as a Hugging Face folder.

- `hf_folder`: write the folder: weights, configuration, tokenizer, model card.
- `tokenizer_json`: our tokenizers in the format of Hugging Face's tokenizers library.
- `gate`: load the folder with transformers and compare it with the model of the run.
"""
