"""The hardware file that doctor --bench and plan calibrate --device write: the planner gets out of it what was measured."""

import tomllib
from importlib import resources

import pytest
import tomli_w
from titan_train.cli import main
from titan_train.planner import Machine, Setup, estimate, find_shape, load_machine
from titan_train.planner.cost.constants import prior
from titan_train.planner.cost.links import gather_seconds, span
from titan_train.planner.hardware import measure
from titan_train.planner.hardware.links import LinkSpeed
from titan_train.planner.hardware.measure import MeasuredRates, gpu_lines, hardware_table
from titan_train.planner.hardware.tables import OperatorTable

SHARE = prior("compile")


def written(tmp_path, rates: MeasuredRates, links=()) -> Machine:
    file = tmp_path / "machine.toml"
    file.write_text(tomli_w.dumps(hardware_table(rates, links)))
    return load_machine(str(file))


def test_a_device_that_no_file_describes_gets_the_rates_of_which_kernels_reach_what_was_measured(tmp_path) -> None:
    rates = MeasuredRates("NVIDIA Z900", 1.4e15, 2.4e15, 6e12, 1e11, 2**37)
    machine = written(tmp_path, rates)
    assert machine.bf16 * SHARE.matmul == pytest.approx(1.4e15)
    assert machine.fp8 * SHARE.matmul8 == pytest.approx(2.4e15)
    assert machine.bandwidth * SHARE.bandwidth == pytest.approx(6e12)
    assert machine.name == "nvidia_z900"


def test_a_known_device_keeps_its_data_sheet_and_the_clock_that_it_holds(tmp_path) -> None:
    shipped = load_machine("h100")
    full = written(tmp_path, MeasuredRates("NVIDIA H100 80GB HBM3", 0.72 * shipped.peak, 1.2e15, 2.9e12, 5e10, 2**36))
    assert (full.name, full.peak, full.fp8, full.vector) == ("h100", shipped.peak, shipped.fp8, shipped.vector)
    assert full.bf16 == full.peak  # no device runs above its nominal clock
    capped = written(tmp_path, MeasuredRates("NVIDIA H100 80GB HBM3", 0.56 * shipped.peak, 1.0e15, 2.9e12, 5e10, 2**36))
    assert capped.peak == shipped.peak  # of MFU
    assert capped.bf16 == pytest.approx(0.8 * shipped.bf16)
    assert capped.fp8 == pytest.approx(0.8 * shipped.fp8)


def test_a_gpu_that_is_slower_than_the_others_is_named() -> None:
    first, slow = gpu_lines([6.1e14, 6.0e14, 4.2e14, 6.2e14])
    assert first == "products of each GPU: 610, 600, 420, 620 TFLOP/s"
    assert slow.startswith("slow    cuda:2 makes 69% of the others' products")
    assert gpu_lines([6.1e14, 6.0e14]) == ["products of each GPU: 610, 600 TFLOP/s"]
    assert gpu_lines([]) == []


def test_links_between_ranks_here_replace_those_of_the_file(tmp_path) -> None:
    rates = MeasuredRates("NVIDIA H100 80GB HBM3", 7e14, 1.2e15, 2.9e12, 5e10, 2**36)
    speeds = [LinkSpeed("all-gather", 48.0, 312.0, 8, "cuda"), LinkSpeed("all-reduce", 90.0, 300.0, 8, "cuda")]
    machine = written(tmp_path, rates, speeds)
    assert machine.local.bytes_per_s * SHARE.local == pytest.approx(312e9)
    assert machine.local.latency_s == pytest.approx(12e-6)
    shipped = load_machine("h100")
    assert machine.network.bytes_per_s == shipped.network.bytes_per_s
    assert written(tmp_path, rates).local.bytes_per_s == shipped.local.bytes_per_s


def test_a_measured_ring_gives_the_latency_of_gathers_until_the_ranks_here_are_measured(tmp_path) -> None:
    ring = span(load_machine("b200"), 4, 1, 1.0, 1.0)
    assert gather_seconds(4e9, ring, calls=2) == pytest.approx(3e9 / 900e9 + 2 * (23e-6 + 3 * 9.2e-6))
    assert span(load_machine("b200"), 16, 1, 1.0, 1.0).ring is None  # between nodes
    rates = MeasuredRates("NVIDIA B200", 1.5e15, 3e15, 7e12, 5e10, 2**37)
    assert written(tmp_path, rates).local.ring_s == pytest.approx((23e-6, 9.2e-6))
    speed = LinkSpeed("all-gather", 48.0, 600.0, 8, "cuda")
    assert written(tmp_path, rates, [speed]).local.ring_s is None
    file = tmp_path / "other.toml"
    text = (resources.files("titan_train.planner.hardware") / "b200.toml").read_text()
    for wrong in ("23", "[23]", "[23, -1]", "['a', 'b']"):
        file.write_text(text.replace("[23, 9.2]", wrong))
        with pytest.raises(ValueError, match="must be two microseconds"):
            load_machine(str(file))


def test_between_its_points_a_table_follows_powers_of_the_sizes_and_outside_it_has_no_answer() -> None:
    axes = ((64.0, 512.0, 4096.0), (32.0, 128.0))
    table = OperatorTable(axes, tuple(3e-9 * m**0.9 * k**1.1 for m in axes[0] for k in axes[1]))
    for m, k in ((64, 32), (100, 50), (4096, 128), (777, 127.5)):
        assert table.at(m, k) == pytest.approx(3e-9 * m**0.9 * k**1.1)
    assert table.at(63, 64) is None
    assert table.at(64, 129) is None


def test_calibrate_measures_shapes_and_the_estimate_says_which_it_used(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(measure._GRID, "cpu", ((32, 256), (16, 256), (32, 128)))
    collective = tuple((n, 1e-4 + n * 1e-9) for n in (128, 2**24))
    links = [LinkSpeed(name, 90.0, 1.0, 2, "cpu", collective) for name in ("all-gather", "all-reduce")]
    monkeypatch.setattr("titan_train.planner.hardware.links.measure_links", lambda: links)
    rates = MeasuredRates("CPU", 5e10, 0.0, 1e10, 5e9, 2**34)
    monkeypatch.setattr(measure, "measure_rates", lambda _: rates)
    monkeypatch.setattr("titan_train.kernels.measure.measure_kernels", lambda _: {})
    file = tmp_path / "my.toml"
    assert main(["plan", "calibrate", "--device", "--out", str(file)]) == 0
    assert "product fp32" in capsys.readouterr().out
    machine = load_machine(str(file))
    assert machine.tables.ranks == 2
    shape = find_shape("llama3_debug")
    small = Setup(seq_len=128, global_batch=4, microbatch=2, dp_shard=2, precision="fp32", stack="eager", loss="eager")
    found = estimate(shape, machine, small)
    assert "collectives measured" in found.measured
    assert "products" in found.measured
    # twice as slow products in the table are twice as slow in the estimate
    content = tomllib.loads(file.read_text())
    content["tables"]["product"]["fp32"]["seconds"] = [1.0] * 8
    file.write_text(tomli_w.dumps(content))
    assert estimate(shape, load_machine(str(file)), small).time.terms["products"] > 10 * found.time.terms["products"]
    content["tables"]["product"]["fp32"]["seconds"] = [1.0] * 7
    file.write_text(tomli_w.dumps(content))
    with pytest.raises(
        ValueError, match="needs ascending positive sizes on each axis and 8 positive seconds; it has 7"
    ):
        load_machine(str(file))
    assert main(["plan", "calibrate"]) == 2
    assert "--device to measure" in capsys.readouterr().err
