"""The files around the code: workflows, recipes, image, release script. They run elsewhere; here they are read."""

import ast
import itertools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
YAML = sorted([*ROOT.glob(".github/**/*.yml"), *ROOT.glob("deploy/*.yaml"), ROOT / ".pre-commit-config.yaml"])


@pytest.mark.parametrize("path", YAML, ids=lambda path: str(path.relative_to(ROOT)))
def test_yaml_files_are_yaml(path: Path) -> None:
    assert yaml.safe_load(path.read_text())


def _noxfile(*names: str) -> dict[str, Any]:
    """Tables of the noxfile, which imports what is not installed here."""
    found: dict[str, Any] = {"PACKAGES": PACKAGES}
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names:
            exec(compile(ast.Module([node], []), "noxfile.py", "exec"), found)
    return found


def _sessions_called(job: dict[str, Any]) -> set[str]:
    """The nox sessions of a workflow's job, with the values of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    called: set[str] = set()
    for values in itertools.product(*(matrix[name] for name in matrix)):
        words = job["steps"][-1]["run"]
        words = words.replace("${{ format(matrix.session, matrix.package) }}", "${{ matrix.session }}")
        for name, value in zip(matrix, values, strict=True):
            filled = str(value).format(values[[*matrix].index("package")]) if "package" in matrix else str(value)
            words = words.replace(f"${{{{ matrix.{name} }}}}", filled)
        match = re.search(r'nox -s (?:"([^"]+)"|([^-]+))', words)
        called |= {match[1]} if match[1] else set(match[2].split())
    return called


def test_workflows_call_sessions_that_exist_for_every_package() -> None:
    tables = _noxfile("_ENDS", "_PORTABLE")
    plain = set(re.findall(r"^def ([a-z]\w*)\(session: nox.Session\)", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    minimums = {f"minimums({package})" for package in PACKAGES}
    ranges = {f"ranges({package}, {end})" for package in PACKAGES for end in tables["_ENDS"]}
    portability = {f"portability({kernels})" for kernels in tables["_PORTABLE"]}
    ci, nightly = (yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text()) for name in ("ci", "nightly"))
    assert _sessions_called(ci["jobs"]["checks"]) <= plain
    assert _sessions_called(ci["jobs"]["tests"]) == {f"tests({package})" for package in (*PACKAGES, "titan-testing")}
    assert _sessions_called(nightly["jobs"]["packages"]) == minimums | ranges
    assert _sessions_called(nightly["jobs"]["portability"]) == portability
    assert (
        _sessions_called(nightly["jobs"]["slow"]) | _sessions_called(nightly["jobs"]["fuzz"])
        == {"slow", "fuzz"}
        <= plain
    )
    shards = nightly["jobs"]["slow"]["strategy"]["matrix"]["shard"]
    assert nightly["jobs"]["slow"]["steps"][-1]["run"].endswith(f"/{len(shards)}")
    assert shards == [*range(1, len(shards) + 1)]


def test_the_tests_that_other_kernels_run_exist() -> None:
    sums = _noxfile("_SUMS")["_SUMS"]
    paths = [ROOT / "packages" / package / "tests" / name for package, names in sums.items() for name in names]
    assert [str(path) for path in paths if not path.exists()] == []


def _commands() -> list[tuple[str, str]]:
    kuberay = yaml.safe_load((ROOT / "deploy/kuberay.yaml").read_text())["spec"]["entrypoint"]
    sky = yaml.safe_load((ROOT / "deploy/skypilot.yaml").read_text())["run"]
    sky = sky[sky.index("titan-train") :].replace("\\\n", " ")
    values = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_NODE_RANK": "0",
        "head": "10.0.0.1",
    }
    sky = re.sub(r"\$(\w+)", lambda match: values[match[1]], sky)
    guide = (ROOT / "docs/guides/many_nodes.md").read_text()
    typed = [line for line in guide.splitlines() if line.startswith("titan-train run")]
    return [("kuberay", kuberay), ("skypilot", sky), *((f"guide {i}", line) for i, line in enumerate(typed))]


@pytest.mark.parametrize("command", [text for _, text in _commands()], ids=[name for name, _ in _commands()])
def test_the_recipes_settings_are_valid(command: str) -> None:
    from titan_train.config import load_config
    from titan_train.parallel.layout.run import plan_run

    words = shlex.split(command)
    assert words[:2] == ["titan-train", "run"]
    config = load_config(words[2], ["--launch.launcher" if word == "--launcher" else word for word in words[3:]])
    world_size = config.launch.nnodes * config.launch.nproc
    assert plan_run(config, world_size).layout.world_size == world_size


def test_the_image_and_the_recipe_install_every_package() -> None:
    for name in ("Dockerfile", "deploy/skypilot.yaml", ".devcontainer/devcontainer.json"):
        text = (ROOT / name).read_text()
        assert [package for package in PACKAGES if not re.search(rf"/{package}\b", text)] == [], name
    json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())


def test_the_release_script_reads_a_good_tag_and_refuses_others(tmp_path: Path) -> None:
    name = PACKAGES[0]
    given, root = ROOT / "packages" / name, tmp_path / "repository"
    version = tomllib.loads((given / "pyproject.toml").read_text())["project"]["version"]
    (root / ".github").mkdir(parents=True)
    (root / "packages" / name).mkdir(parents=True)
    shutil.copy(ROOT / ".github/release.py", root / ".github")
    shutil.copy(given / "pyproject.toml", root / "packages" / name)
    before, unreleased, released = (given / "CHANGELOG.md").read_text().partition("## Unreleased")
    changelog = before + f"## {version} (2026-12-01)" + released if unreleased else before  # ready for a release
    (root / "packages" / name / "CHANGELOG.md").write_text(changelog)
    read_tag = runpy.run_path(str(root / ".github/release.py"))["read_tag"]
    package, found, notes = read_tag(f"{name}-v{version}")
    assert (package, found) == (name, version)
    assert notes.strip()
    assert "## " not in notes
    for tag, words in {
        "v0.1.0": "not of the form",
        "titan-none-v0.1.0": "does not exist",
        f"{name}-v99.0.0": f"says {version}",
    }.items():
        with pytest.raises(ValueError, match=words):
            read_tag(tag)
    command = [
        sys.executable,
        str(root / ".github/release.py"),
        f"{name}-v{version}",
        "--notes",
        str(tmp_path / "n.md"),
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"package={name}\nversion={version}\n"
    assert (tmp_path / "n.md").read_text() == notes


@pytest.mark.parametrize("package", PACKAGES)
def test_a_released_package_stands_alone_on_an_index(package: str, tmp_path: Path) -> None:
    """Every link of its README is absolute and leads to a file of the repository, and project.urls are there."""
    folder, given = tmp_path / "packages" / package, ROOT / "packages" / package
    folder.mkdir(parents=True)
    for name in ("README.md", "pyproject.toml"):
        (folder / name).write_text((given / name).read_text())
    targets = re.findall(r"\]\((?![a-z]+:|#)([^)\s#]+)", (given / "README.md").read_text())
    for target in targets:
        copy = (folder / target).resolve()
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.mkdir(exist_ok=True) if (given / target).is_dir() else copy.exists() or copy.touch()
    stand_alone = runpy.run_path(str(ROOT / ".github/release.py"))["stand_alone"]
    stand_alone(package, f"{package}-v1.2.3", "https://example.org/owner/titan/", tmp_path)
    prose = re.sub(r"^```.*?^```", "", (folder / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", prose)
    assert [link for link in links if not re.match(r"https?://|#", link)] == []
    start = re.compile(rf"https://example.org/owner/titan/(?:blob|tree|raw)/{package}-v1\.2\.3/([^#]+)")
    ours = [match[1] for link in links if (match := start.match(link))]
    assert len(ours) >= len(set(targets)) > 0
    assert [path for path in ours if not (ROOT / path).exists()] == []
    urls = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Repository"] == "https://example.org/owner/titan"
    with pytest.raises(ValueError, match="prepared before"):
        stand_alone(package, f"{package}-v1.2.3", "https://example.org/owner/titan", tmp_path)


def test_a_dead_link_stops_a_release(tmp_path: Path) -> None:
    folder = tmp_path / "packages/titan-x"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("[gone](../nothing.md)")
    (folder / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(ValueError, match="does not exist"):
        runpy.run_path(str(ROOT / ".github/release.py"))["stand_alone"](
            "titan-x", "t", "https://example.org/o/n", tmp_path
        )


def test_documentation_of_every_version_stays_and_the_newest_release_is_latest(tmp_path: Path) -> None:
    publish = runpy.run_path(str(ROOT / ".github/publish_docs.py"))["publish"]
    site = tmp_path / "site"
    site.mkdir()
    for version in ("0.9.0", "0.10.0", "main", "0.10.0rc1", "0.9.1"):
        built = tmp_path / "built"
        built.mkdir(exist_ok=True)
        (built / "index.html").write_text(version)
        publish(built, site, version)
    assert (site / "latest/index.html").read_text() == "0.10.0"
    assert (site / "0.9.0/index.html").read_text() == "0.9.0"
    listed = re.findall(r'href="([^"]+)/"', (site / "versions.html").read_text())
    assert listed == ["0.10.0", "0.10.0rc1", "0.9.1", "0.9.0", "main"]
    assert "url=latest/" in (site / "index.html").read_text()
    with pytest.raises(ValueError, match="neither of the form"):
        publish(built, site, "../x")
    with pytest.raises(ValueError, match=r"holds no index\.html"):
        publish(tmp_path, site, "1.0.0")
