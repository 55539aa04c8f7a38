"""Any decoder of the transformers library as a model of a run: ``model.name = "hf:DIR"``.

The module is transformers' own, built from the folder's ``config.json`` on the meta device; code in the folder is never
executed. What parallelism must know about a family is one value in a table, as it is for the families here.

- `plans`: the table: one `HFPlan` for each ``model_type``. Start reading here. Plain data, without torch. Packages add plans
  by entry points.
- `folder`: read ``config.json``, and change it by ``model.args``.
- `configuration`: transformers' configuration of them, and what a run asks of it.
- `build`: the model from the folder.
- `decoder`: what transformers' module is given so that it looks like a model here: its forward, its pipeline stages.
- `device`: kernels of other packages run on GPUs only, whatever transformers decided when it was imported.
- `ahead`: modules that predict tokens further ahead, made of its last layer.
- `attention`: how its attention reaches `titan_train.models.CausalAttention`.
- `family`: the model as a family of its own, for import and export.
- `lora`: adapters of the peft library.
- `names`: its tensors' names in files, and linears and experts that files hold in another way.
- `shape`: the shape that ``config.json`` describes, for the planner. No torch.
- `probe`, `cut`: whether a tiny model of the same kind computes what the trainer takes for granted.
- `stage_layers`: the layers of one pipeline stage, and what the last one was called with.
"""
