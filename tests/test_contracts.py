"""What the repository promises about itself."""

import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
by_name = pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)


def project(package: Path) -> dict:
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


@by_name
def test_folder_distribution_and_import_names_agree(package):
    assert project(package)["name"] == package.name
    assert (package / "src" / package.name.replace("-", "_") / "__init__.py").is_file()


@by_name
def test_the_version_heads_the_changelog(package):
    heads = re.findall(r"^## (\S+)", (package / "CHANGELOG.md").read_text(), re.M)
    released = [head for head in heads if head != "Unreleased"]
    assert released[0] == project(package)["version"]
    assert "Unreleased" not in heads[1:]


@by_name
def test_the_package_has_what_every_package_has(package):
    module = package / "src" / package.name.replace("-", "_")
    for file in (package / "README.md", package / "LICENSE", module / "py.typed"):
        assert file.is_file(), file
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert list((package / "tests").rglob("test_*.py"))
    assert len((package / "README.md").read_text().splitlines()) > 20


@by_name
def test_the_wheel_carries_its_type_marker_its_license_and_no_tests(package, tmp_path):
    subprocess.run(
        ["uv", "build", "--quiet", "--wheel", "--package", package.name, "--out-dir", tmp_path], check=True, cwd=ROOT
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    module = package.name.replace("-", "_")
    assert f"{module}/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {module}


def test_members_accept_each_others_versions():
    from packaging.requirements import Requirement

    versions = {package.name: project(package)["version"] for package in PACKAGES}
    for package in PACKAGES:
        for text in project(package)["dependencies"]:
            requirement = Requirement(text)
            if requirement.name in versions:
                assert requirement.specifier.contains(versions[requirement.name]), f"{package.name} needs {text}"


def test_no_address_of_a_registry_and_no_path_of_a_machine_is_committed():
    # Built from parts, so that this file does not match itself.
    hosts = ["py" + "pi.org", "python" + "hosted.org", "npm" + "js.org", "deb." + "debian.org"]
    homes = ["/" + "root/", "/" + "home/"]
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    for name in files:
        file = ROOT / name
        data = file.read_bytes() if file.is_file() else b""
        for forbidden in hosts + homes:
            assert forbidden.encode() not in data, f"{name} names {forbidden}"
