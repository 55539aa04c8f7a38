"""The nearest number that would have worked, for error messages."""


def nearest_divisor(n: int, wanted: int) -> int:
    """The divisor of ``n`` nearest to ``wanted``; of two as near, the smaller."""
    return min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: (abs(d - wanted), d))
