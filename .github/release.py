"""Check a release tag, and take the notes of its version from the package's changelog.

``python .github/release.py titan-cp-v0.2.0 --notes notes.md`` prints ``package=`` and ``version=`` lines for the workflow.
It refuses a tag whose version is not the one in ``pyproject.toml`` and at the head of ``CHANGELOG.md``.
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


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tag")
    parser.add_argument("--notes", type=Path, required=True, help="file to write the release notes to")
    arguments = parser.parse_args()
    try:
        package, version, notes = read_tag(arguments.tag)
    except ValueError as err:
        parser.error(str(err))
    arguments.notes.write_text(notes)
    print(f"package={package}\nversion={version}")


if __name__ == "__main__":
    main()
