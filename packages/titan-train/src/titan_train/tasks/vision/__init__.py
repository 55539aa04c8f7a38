"""Vision-language: images with prompts and answers, packed whole into rows; the answers are learned.

- `task`: the `titan_train.Task`: data, loss, context parallelism, scored answers.
- `images`: files to patches, with bounded sizes. `rows`: documents, their tokens, and which row holds which.
- `batches`: microbatches of packed rows.
- `shapes`: rendered shapes with questions, in closed form. `jsonl`: JSONL files with images beside them or in tar shards.
- `answers`: how many held-out answers are right, with their images and with shuffled ones.
- `processor`: what transformers needs to make the same patches.
- `show`: a trained model continues a prompt about images.
- `context`: context parallelism.
"""
