"""A trained model leaves complete and proven, for every library that runs models.

- `run`: export to one target or several; nothing appears before every check has passed. `job`: what is exported.
- `gate`: compare an artefact with the model of the run. `load` loads an artefact with the library of its users.
- `hf_folder`, `hf_model`: a Hugging Face folder, by transformers. `tokenizer_json`: our tokenizers in its format.
- `diffusers_folder`: a diffusion model as a folder of diffusers.
- `step_model`: the model as one function with the caches as arguments; `onnx_folder`, `aoti_folder` export it.
- `gguf/`: a file for llama.cpp, and the reference that reads it back. `float8`: what is stored with block scales.
- `dcp_folder`: a checkpoint of torch's distributed checkpointing.
- `card`: the model card.
"""
