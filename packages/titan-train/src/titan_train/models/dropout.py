"""Which modules of any model drop something by chance in training."""

from collections import Counter
from collections.abc import Iterable

from torch import nn
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage] # the base of all of torch's


def active_dropout(parts: Iterable[nn.Module]) -> dict[str, int]:
    """Rates above 0 and how many modules have each, such as ``{"attn_dropout=0.1": 12}``.

    Found are torch's dropout layers, and numbers between 0 and 1 with "drop" in their name that a module keeps for
    ``F.dropout`` or its attention, as the models of transformers do.
    """
    found: Counter[str] = Counter()
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, _DropoutNd):
                if module.p > 0:
                    found[f"{name.rpartition('.')[2]}={module.p:g}"] += 1
                continue
            rates = ((key, value) for key, value in vars(module).items() if isinstance(value, float) and 0 < value <= 1)
            found.update(f"{key}={value:g}" for key, value in rates if "drop" in key.lower())
    return dict(found)
