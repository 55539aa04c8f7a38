import pytest
from titan_train.observe import device_peak_flops
from titan_train.planner.hardware.machine import load_machine


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "fp8", 5000),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
    ],
)
def test_peak_of_a_known_device_is_its_dense_data_sheet_figure(name, dtype, tflops):
    assert device_peak_flops(name, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "H100",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 64GB HBM2",
        "NVIDIA H900",
        "AMD Instinct MI300A",
        "Apple M3 Max",
    ],
)
def test_a_device_that_is_not_known_for_certain_has_no_peak(name):
    assert device_peak_flops(name, "bf16") is None


def test_a_dtype_the_device_has_no_units_for_has_no_peak():
    assert device_peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert device_peak_flops("Tesla V100-SXM2-16GB", "bf16") is None


def test_an_unknown_dtype_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"bfloat16.*fp32, tf32, bf16, fp16, fp8"):
        device_peak_flops("NVIDIA H200", "bfloat16")


@pytest.mark.parametrize(
    ("machine", "device"),
    [
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("h200", "NVIDIA H200"),
        ("b200", "NVIDIA B200"),
        ("b300", "NVIDIA B300 SXM6 AC"),
        ("gb200", "NVIDIA GB200"),
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("a100_40", "NVIDIA A100-SXM4-40GB"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_the_planners_machines_have_the_peaks_of_the_table(machine, device):
    known = load_machine(machine)
    for dtype, flops in (("bf16", known.peak), ("fp8", known.fp8)):  # the planner's are rounded to whole TFLOP/s
        assert flops == pytest.approx(device_peak_flops(device, dtype) or 0.0, rel=2e-3)
