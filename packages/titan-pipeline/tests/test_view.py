"""Drawings: the time axis and its unit, and what ran below its plan."""

import re
import xml.etree.ElementTree as ET

import pytest
from titan_pipeline import Costs, Measurement, Slot, build_schedule, draw_executed_svg, draw_svg, fit_costs, simulate
from titan_pipeline.cli import main

SVG = "{http://www.w3.org/2000/svg}"


def run_of(name="1f1b", *, scale=0.01, slow=1.0):
    """A measurement in seconds: the plan, with every action of rank 1 ``slow`` times as long."""
    schedule = build_schedule(name, 2, 4)
    costs = Costs.uniform(schedule.num_stages, num_chunks=schedule.num_chunks)
    longer = [slow if schedule.placement[stage] == 1 else 1.0 for stage in range(schedule.num_stages)]
    fields = {
        kind: tuple(scale * t * s for t, s in zip(getattr(costs, kind), longer, strict=True))
        for kind in ("forward", "input_grad", "weight_grad")
    }
    plan = simulate(schedule, Costs(**fields, activation=costs.activation, weight_context=costs.weight_context))
    return Measurement(
        plan.schedule, tuple(tuple(Slot(s.action, s.start, s.end) for s in slots) for slots in plan.timeline)
    )


def axis(svg):
    """Positions and labels of the ticks, and what the axis is labelled."""
    texts = [(float(t.get("x")), t.text) for t in ET.fromstring(svg).iter(f"{SVG}text") if t.get("class") == "soft"]
    ticks = [(x, float(text)) for x, text in texts if re.fullmatch(r"[\d.]+", text) and x > 60]
    (label,) = [text for _, text in texts if text.startswith("time, ")]
    return ticks, label


@pytest.mark.parametrize(
    ("unit", "scale", "label", "times"),
    [
        ("time units", 1.0, "time, time units", 1.0),
        ("s", 3.0, "time, s", 1.0),
        ("s", 0.01, "time, ms", 1e3),
        ("s", 1e-5, "time, µs", 1e6),
    ],
)
def test_ticks_stand_where_their_times_are_and_the_unit_is_named(unit, scale, label, times):
    plan = run_of(scale=scale).timeline()
    ticks, named = axis(draw_svg(plan, unit=unit, width=1000))
    assert named == label
    assert 6 <= len(ticks) <= 17
    for x, value in ticks:
        assert x == pytest.approx(64 + value / times / plan.makespan * (1000 - 64 - 16), abs=0.01)


def test_what_ran_is_below_its_plan_on_one_axis():
    measured = run_of(slow=3.0)
    plan = simulate(measured.schedule, fit_costs([run_of()]))
    svg = draw_executed_svg(measured.timeline(), plan)
    heights = [float(r.get("height")) for g in ET.fromstring(svg).iter(f"{SVG}g") for r in g.iter(f"{SVG}rect")]
    actions = sum(len(program) for program in measured.schedule.ranks)
    assert heights.count(9) == heights.count(26) == actions
    assert axis(svg)[1] == "time, ms"
    right = max(
        float(r.get("x")) + float(r.get("width"))
        for g in ET.fromstring(svg).iter(f"{SVG}g")
        for r in g.iter(f"{SVG}rect")
    )
    assert right == pytest.approx(1200 - 16, abs=0.1)  # the longer of the two fills the width
    assert "Thin rows: the plan" in svg


def test_a_plan_of_another_schedule_is_refused():
    with pytest.raises(ValueError, match="another schedule"):
        draw_executed_svg(run_of().timeline(), run_of("zbv").timeline())


def test_the_command_draws_a_measurement_below_its_plan(tmp_path, capsys):
    measured = run_of()
    measured.save(tmp_path / "m.json")
    measured.schedule.save(tmp_path / "s.json")
    words = ["draw", str(tmp_path / "s.json"), "--measured", str(tmp_path / "m.json")]
    assert main([*words, "-o", str(tmp_path / "out.svg")]) == 0
    assert re.search(r"took [\d.]+ ms, planned [\d.]+ ms", (tmp_path / "out.svg").read_text())
    assert main([*words, "-o", str(tmp_path / "out.html")]) == 2
    assert "drawn as .svg" in capsys.readouterr().err
