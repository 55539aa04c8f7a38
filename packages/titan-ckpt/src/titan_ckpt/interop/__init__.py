"""Other formats: Hugging Face folders and torch's distributed checkpoints (DCP).

`hf`: export and import. `key_map`: how a family's tensors are named and cut on both sides. `translate`: apply a key map.
`views`: tensors read a box at a time, through stacking, cutting and scaling. `safetensors_folder`: files that anyone
wrote. `stream`: write views as a step. `dcp_import`: turn a DCP checkpoint into a step without running code from it.
`dcp_storage`: let ``dcp.save`` and ``dcp.load`` use this format.
"""
