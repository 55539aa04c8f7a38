"""What the arguments of several families have in common: sizes, and the checks that relate two of them. No torch."""

from titan_train.values import nearest_divisor


def check_heads(dim: int, num_heads: int, *, remedy: str = "") -> None:
    """Raise ValueError unless heads of equal width make up ``dim``; ``remedy`` is what else could be set."""
    if dim % num_heads:
        near = max(1, round(dim / num_heads)) * num_heads
        raise ValueError(
            f"model.args.dim={dim} is not a multiple of num_heads={num_heads}. The nearest valid choice is dim={near}{remedy}."
        )


def check_key_heads(num_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless every key head serves the same number of query heads."""
    if num_heads % num_kv_heads:
        raise ValueError(
            f"model.args.num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}: every key head serves the same "
            f"number of query heads. The nearest valid choice is {nearest_divisor(num_heads, num_kv_heads)}."
        )


def check_rotary_channels(name: str, channels: int) -> None:
    """Raise ValueError unless RoPE can turn pairs of these channels."""
    if channels < 2 or channels % 2:
        raise ValueError(
            f"model.args.{name}={channels} must be a positive even number: RoPE turns pairs of channels. The nearest valid "
            f"choice is {max(2, channels + channels % 2)}."
        )
