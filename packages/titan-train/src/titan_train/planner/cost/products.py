"""Seconds of one matrix product, of attention and of streaming kernels.

A product of ``rows x inner x columns`` takes the sum of its arithmetic at a fixed rate and of its bytes at the memory's
rate. The sum, not the maximum: small and narrow products lose efficiency without a table of measured shapes.
"""

from dataclasses import dataclass

from titan_train.planner.cost.constants import Constants
from titan_train.planner.hardware.machine import Machine
from titan_train.planner.hardware.tables import OperatorTables
from titan_train.planner.setup import Precision

_PENALTY = {"tensorwise": 1.0, "delayed": 1.0, "rowwise": 1.04, "mxfp8": 1.04, "blockwise": 1.12}


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What one device does in a second, for one precision."""

    products: float
    """FLOP/s of products in the run's precision."""
    plain: float
    """FLOP/s of products that stay in bf16."""
    attention: float
    stream: float
    """Bytes per second."""
    operand_bytes: float
    cast_bytes: float
    """Bytes per operand element that casting moves; 0 without float8."""
    tables: OperatorTables | None = None
    precision: str = "bf16"
    """Of the measured products; those that stay ``plain`` are bf16, or fp32 in a run of fp32."""


def rates(machine: Machine, constants: Constants, precision: Precision) -> DeviceRates:
    """DeviceRates of a machine.

    Raises:
        ValueError: The machine has no units for the precision.
    """
    plain = machine.bf16 * constants.matmul
    attention = machine.bf16 * constants.attention
    stream = machine.bandwidth * constants.bandwidth
    if precision in ("bf16", "fp32"):
        half = 2.0 if precision == "fp32" and machine.name != "cpu" else 1.0
        each = 4.0 if precision == "fp32" else 2.0
        return DeviceRates(plain / half, plain / half, attention / half, stream, each, 0.0, machine.tables, precision)
    blocks_of_32 = precision in ("mxfp8", "nvfp4")  # units that scale blocks came with those of fp4
    peak = machine.fp4 if precision == "nvfp4" else machine.fp8
    if not peak or (blocks_of_32 and not machine.fp4):
        raise ValueError(
            f"{machine.title} has no units for precision {precision!r}. Use 'bf16', or a machine that has them."
        )
    if precision == "nvfp4":
        return DeviceRates(
            peak * constants.matmul4, plain, attention, stream, 0.6, constants.cast_bytes, machine.tables, precision
        )
    products = peak * constants.matmul8 / _PENALTY[precision]
    return DeviceRates(products, plain, attention, stream, 1.0, constants.cast_bytes, machine.tables, precision)


def product_seconds(r: DeviceRates, rows: float, inner: float, columns: float, *, plain: bool = False) -> float:
    """Forward: ``[rows, inner] @ [inner, columns]``."""
    if r.tables is not None:
        measured = r.tables.find(f"product.{plain_precision(r) if plain else r.precision}", rows, inner, columns)
        if measured is not None:
            return measured
    flops = 2.0 * rows * inner * columns
    if plain or r.cast_bytes == 0:
        each = 2.0 if r.cast_bytes else r.operand_bytes
        return flops / r.plain + each * (rows * inner + inner * columns + rows * columns) / r.stream
    operands = r.operand_bytes * (rows * inner + inner * columns) + 2.0 * rows * columns
    return flops / r.products + operands / r.stream


def cast_seconds(r: DeviceRates, elements: float) -> float:
    """Casting an operand to float8."""
    measured = r.tables.find(f"cast.{r.precision}", elements) if r.tables is not None and r.cast_bytes else None
    if measured is not None:
        return measured
    return r.cast_bytes * elements / r.stream


def plain_precision(r: DeviceRates) -> str:
    """The precision of what is not in float8: attention, the head."""
    return r.precision if r.precision == "fp32" else "bf16"
