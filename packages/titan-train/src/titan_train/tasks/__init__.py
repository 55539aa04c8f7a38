"""The kinds of models that a run can train, each as a `titan_train.Task`.

- `text`: decoders on packed tokens, with the cross-entropy of the next token.
- ``diffusion/``: flow matching on packed latents, guided by text.
- ``vision/``: answers to prompts about images, packed whole into rows.
- `image_files`: JSON lines, tar files and images, as diffusion and vision read them.
"""
