"""A checkpoint's optimizer state in the optimizer of another configuration.

Settings are the configuration's: a checkpoint is restored with ``TrainState(own_settings=True)``. So weight decay and betas may
change at a resume, parameters may be frozen or thawed, and tables of patterns may come and go. The kind must stay.
"""

import torch

_KINDS = {"exp_avg": "adamw", "momentum_buffer": "sgd"}


def check_restored(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuse the restored state of another kind of optimizer than ``name`` ("adamw" or "sgd").

    Raises:
        ValueError: The checkpoint was saved with it.
    """
    saved = {kind for state in optimizer.state.values() for key, kind in _KINDS.items() if key in state} - {name}
    if saved:
        raise ValueError(
            f"optimizer.name={name!r}, and the checkpoint holds the state of {min(saved)!r}, which {name!r} cannot use. Resume "
            f"with optimizer.name={min(saved)!r}, or start another run from the weights: titan-train export RUN --to hf, then "
            "model.init='hf:DIR'."
        )
