"""What a person reads: the table, one rank's place, the drawing, the command."""

import xml.etree.ElementTree as ET

import pytest
from titan_mesh import Layout, MeshSpec, Topology, draw_svg, megatron, megatron_experts
from titan_mesh.cli import main

SVG = "{http://www.w3.org/2000/svg}"


def words(text: str, name: str) -> list[str]:
    """The row of a table that begins with ``name``, split into words."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_table_tells_size_stride_groups_crossing_link_and_ranks():
    text = Layout(MeshSpec.parse("pp3 dp4 tp8"), topology=Topology(gpus_per_node=8)).explain()
    assert "96 ranks · 12 nodes of 8" in text
    assert words(text, "pp") == ["pp", "3", "32", "32", "yes,", "3", "network", "0", "32", "64"]
    assert words(text, "tp") == ["tp", "8", "1", "12", "no", "nvlink", "0-7"]
    assert words(text, "dp")[-2:] == ["(=", "dp_shard)"]
    assert "off (size 1): dp_replicate, cp, ep" in text
    assert "communicators: 3 per rank, 68 in total" in text


def test_table_tells_a_rack_sized_nvlink_domain_and_experts():
    topology = Topology(gpus_per_node=4, nvlink_domain=72)
    text = Layout(MeshSpec.parse("dp_replicate2 dp9 cp2 tp4 ep8"), topology=topology).explain()
    assert "NVLink domains of 72" in text
    assert words(text, "fsdp")[4:7] == ["yes,", "18", "nvlink"]
    assert words(text, "ep") == ["ep", "8", "1", "18", "yes,", "2", "nvlink", "0-7"]
    assert "efsdp x ep = dp_shard x cp x tp" in text


def test_stride_of_a_flatten_over_axes_that_are_apart_is_mixed():
    text = Layout(MeshSpec.parse("dp3 cp2 tp2 order=pp-dp_replicate-dp_shard-tp-cp")).explain()
    assert words(text, "fsdp")[2] == "mixed"


def test_one_rank_is_told_its_place_and_the_ranks_it_meets():
    text = Layout(MeshSpec.parse("pp3 dp4 tp8")).explain(rank=37)
    assert text.startswith("rank 37 of 96 · node 4, GPU 5 · pp=1 dp_replicate=0 dp_shard=0 cp=0 tp=5")
    assert words(text, "pp") == ["pp", "1", "3", "3", "network", "5", "37", "69"]
    assert words(text, "dp_shard") == ["dp_shard", "0", "4", "4", "network", "37", "45", "53", "61"]
    assert words(text, "tp") == ["tp", "5", "8", "1", "nvlink", "32-39"]


def test_a_single_rank_is_explained_too():
    layout = Layout(MeshSpec())
    assert "one rank · 1 rank · 1 node of 8" in layout.explain()
    assert "rank 0 of 1" in layout.explain(0)
    ET.fromstring(draw_svg(layout))


@pytest.mark.parametrize("text", ["pp3 dp4 tp8", "pp2 dp_replicate2 dp2 cp2 tp2 ep4", "dp4 tp2 order=tp-pp-dp-cp"])
def test_drawing_shows_every_rank_once_a_panel_in_the_colour_of_its_group(text):
    layout = Layout(MeshSpec.parse(text))
    rank = layout.num_ranks // 2
    root = ET.fromstring(draw_svg(layout, rank=rank))
    rects = [rect.attrib for rect in root.iter(f"{SVG}rect") if rect.get("height") == "34"]
    cells = [rect for rect in rects if "fill" in rect]
    outlines = [rect for rect in rects if rect.get("class") == "mine"]
    labels = {
        (float(t.get("x", "0")), float(t.get("y", "0"))): t.text
        for t in root.iter(f"{SVG}text")
        if t.get("font-weight") == "600"
    }
    rows = [row for row in layout.table() if row.same_as is None]
    assert len(cells) == len(labels) == len(rows) * layout.num_ranks

    def rank_of(rect: dict[str, str]) -> int:
        return int(labels[float(rect["x"]) + 21, float(rect["y"]) + 17] or "")

    for i, row in enumerate(rows):
        panel = cells[i * layout.num_ranks : (i + 1) * layout.num_ranks]
        colour = {rank_of(cell): cell["fill"] for cell in panel}
        assert sorted(colour) == list(range(layout.num_ranks))
        groups = layout.groups(row.name)
        assert all(len({colour[r] for r in group}) == 1 for group in groups)
        assert len({colour[group[0]] for group in groups}) == len(groups)
    outlined = sorted(rank_of(rect) for rect in outlines)
    assert outlined == sorted(r for row in rows for r in layout.group_of(rank, row.name))


@pytest.mark.parametrize("gpus", [1, 4, 8, 72])
def test_drawing_of_a_large_world_has_a_cell_for_every_rank_in_the_colour_of_its_group(gpus):
    layout = Layout(MeshSpec.parse("pp8 dp18 tp8"), topology=Topology(gpus_per_node=gpus))
    root = ET.fromstring(draw_svg(layout, rank=100))
    paths = [path.attrib for path in root.iter(f"{SVG}path")]
    rows = [row for row in layout.table() if row.same_as is None]
    places = []
    for row in rows:
        groups, cells = layout.groups(row.name), []
        for i, group in enumerate(groups):
            drawn = [d.split("h")[0] for d in paths[i]["d"].split("M")[1:]]
            assert len(drawn) == len(group)
            cells += drawn
        chosen = groups.index(layout.group_of(100, row.name))
        assert paths[len(groups)]["d"] == paths[chosen]["d"]
        assert paths[len(groups)]["class"] == "mine"
        assert len({path["fill"] for path in paths[: len(groups)]}) == len(groups)
        assert len(set(cells)) == layout.num_ranks
        places += cells
        paths = paths[len(groups) + 1 :]
    assert paths == []
    assert len(set(places)) == len(places)
    view = [float(n) for n in root.attrib["viewBox"].split()]
    for place in places:
        x, y = map(float, place.split())
        assert 0 < x < view[2] - 9
        assert 0 < y < view[3] - 12


def test_drawing_of_a_very_large_world_stays_small_and_says_what_it_leaves_out():
    text = draw_svg(Layout(MeshSpec.parse("pp16 dp128 tp8")))
    assert "the first 4,096 of 16,384 ranks" in text
    assert len(text) < 1_000_000


def test_command_prints_the_table_and_draws(tmp_path, capsys):
    file = tmp_path / "grid.svg"
    assert main(["explain", "pp3 dp4 tp8", "--gpus-per-node", "8", "--svg", str(file)]) == 0
    out = capsys.readouterr().out
    assert words(out, "tp")[0] == "tp"
    assert str(file) in out
    ET.fromstring(file.read_text())


def test_command_explains_one_rank_in_another_order(capsys):
    arguments = ["explain", "pp3 dp4 tp8", "--rank", "37"]
    assert main(arguments) == 0
    assert "pp=1 dp_replicate=0 dp_shard=0 cp=0 tp=5" in capsys.readouterr().out
    assert main([*arguments, "--megatron-order", "tp-pp-cp-dp"]) == 0
    assert "pp=1 tp=5" in capsys.readouterr().out
    assert main([*arguments, "--order", "tp-cp-dp-pp"]) == 0
    assert "pp=1" in capsys.readouterr().out


@pytest.mark.parametrize("order", ["tp-cp-dp-ep-pp", "tp-cp-ep-dp-pp", "tp-cp-dp-pp"])
def test_megatrons_order_is_that_of_its_experts_too(order, capsys):
    assert main(["explain", "dp4 tp2 ep2", "--megatron-order", order]) == 0
    spec = MeshSpec(dp_shard=4, tp=2, ep=2, order=megatron(order), expert_order=megatron_experts(order))
    assert capsys.readouterr().out.startswith(Layout(spec).explain())


def test_command_infers_and_warns(capsys):
    assert main(["explain", "dp-1 tp16", "--world-size", "32", "--nvlink-domain", "8"]) == 0
    out = capsys.readouterr().out
    assert words(out, "dp_shard")[1] == "2"
    assert "warning: tp=16 leaves the NVLink domain of 8 ranks" in out


@pytest.mark.parametrize("arguments", [["tp3 dp-1", "--world-size", "8"], ["tp8", "--rank", "8"], ["tq8"]])
def test_command_refuses_with_one_line_and_status_2(arguments, capsys):
    assert main(["explain", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_a_browser_shows_the_drawing_without_a_complaint(tmp_path, browser):
    file = tmp_path / "grid.svg"
    file.write_text(draw_svg(Layout(MeshSpec.parse("pp2 dp2 tp2"))))
    page = browser.open(file.as_uri())
    assert page.ask("document.documentElement.getBoundingClientRect().width") > 100
    assert "tp" in page.ask("document.documentElement.textContent")
    assert page.errors == []
    page.close()
