"""Check a release tag, take the notes of its version from the changelog, and make the package stand alone on an index.

``python .github/release.py titan-cp-v0.2.0 --notes notes.md`` prints ``package=`` and ``version=`` lines for the workflow.
It refuses a tag whose version is not the one in ``pyproject.toml`` and at the head of ``CHANGELOG.md``.

With ``--repository https://HOST/OWNER/NAME`` it also prepares the checkout for building: links of the package's README
become links to that repository at the tag, and ``pyproject.toml`` gets ``project.urls``. A checkout names no address
itself, so that a fork releases under its own.
"""

import argparse
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def read_tag(tag: str, root: Path = ROOT) -> tuple[str, str, str]:
    """The package, the version and the release notes that a tag stands for.

    Raises:
        ValueError: No such package, another version than the package's, or no changelog entry.
    """
    match = re.fullmatch(r"(titan-[a-z0-9]+)-v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)", tag)
    if match is None:
        raise ValueError(f"tag {tag!r} is not of the form titan-NAME-vX.Y.Z. Tag the release like titan-cp-v0.2.0.")
    package, version = match.groups()
    folder = root / "packages" / package
    if not folder.is_dir():
        known = ", ".join(sorted(path.name for path in (root / "packages").iterdir()))
        raise ValueError(f"tag {tag!r} names the package {package!r}, which does not exist. The packages are {known}.")
    declared = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
    if declared != version:
        raise ValueError(
            f"tag {tag!r}, but {package}'s pyproject.toml says {declared}. Tag {package}-v{declared}, or change it."
        )
    heads = re.split(r"^## +(\S+).*$", (folder / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    if len(heads) < 3 or heads[1] != version:
        raise ValueError(
            f"tag {tag!r}, but {package}'s CHANGELOG.md does not begin with {version}. Write its entry first."
        )
    return package, version, heads[2].strip() + "\n"


def stand_alone(package: str, tag: str, repository: str, root: Path = ROOT) -> None:
    """Rewrite a package's README and pyproject.toml for an index, where relative links lead nowhere.

    Raises:
        ValueError: The README links to a file that does not exist, or ``project.urls`` are there already.
    """
    folder, repository = root / "packages" / package, repository.rstrip("/")

    def absolute(match: re.Match[str]) -> str:
        target, _, part = match[1].partition("#")
        file = (folder / target).resolve()
        if not file.is_relative_to(root.resolve()) or not file.exists():
            raise ValueError(f"{package}/README.md links to {target}, which does not exist. Correct the link.")
        kind = "tree" if file.is_dir() else "raw" if file.suffix in (".svg", ".png") else "blob"
        path = file.relative_to(root.resolve()).as_posix()
        return f"]({repository}/{kind}/{tag}/{path}{'#' + part if part else ''})"

    readme, project = folder / "README.md", folder / "pyproject.toml"
    pieces = re.split(r"(^```.*?^```)", readme.read_text(), flags=re.MULTILINE | re.DOTALL)
    for i in range(0, len(pieces), 2):  # what is between blocks of code
        pieces[i] = re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", absolute, pieces[i])
    if "urls" in tomllib.loads(project.read_text())["project"]:
        raise ValueError(f"{package}/pyproject.toml has project.urls already: this checkout was prepared before.")
    readme.write_text("".join(pieces))
    here = f"{repository}/blob/{tag}/packages/{package}"
    urls = f'Repository = "{repository}"\nDocumentation = "{here}/README.md"\nChangelog = "{here}/CHANGELOG.md"\n'
    text = f'\n[project.urls]\n{urls}Issues = "{repository}/issues"\n'
    project.write_text(project.read_text().rstrip("\n") + "\n" + text)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tag")
    parser.add_argument("--notes", type=Path, required=True, help="file to write the release notes to")
    parser.add_argument(
        "--repository", help="address of the repository: prepares README and pyproject.toml for an index"
    )
    arguments = parser.parse_args()
    try:
        package, version, notes = read_tag(arguments.tag)
        if arguments.repository:
            stand_alone(package, arguments.tag, arguments.repository)
    except ValueError as err:
        parser.error(str(err))
    arguments.notes.write_text(notes)
    print(f"package={package}\nversion={version}")


if __name__ == "__main__":
    main()
