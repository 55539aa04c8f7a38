"""titan-ckpt in other trainers. Each module imports its library, so import the one that you use.

- `transformers`: `TitanTrainer`, in place of ``transformers.Trainer``.
- `accelerate`: `AccelerateCheckpoint`, in place of ``accelerator.save_state`` and ``load_state``.
- `lightning`: `TitanIO`, a plugin of Lightning's ``Trainer``.
"""
