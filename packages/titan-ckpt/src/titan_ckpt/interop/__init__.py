"""Other formats: Hugging Face folders and torch's distributed checkpoints (DCP).

`hf`: export and import. `key_map`: names and layouts of a model family on both sides. `translate`: apply a key map.
`views`: tensors that are read box by box, through stacking, cutting and scaling. `float8`: matrices as float8 with scales.
`safetensors_folder`: files of any writer. `stream`: write views as a step. `dcp_import`: make a step from a DCP checkpoint
without running its code. `dcp_storage`: ``dcp.save`` and ``dcp.load`` with this format.
"""
