"""Put one version of the built documentation beside the others: ``python .github/publish_docs.py BUILT SITE VERSION``.

``SITE/VERSION`` is replaced. A release (``1.2.3``) that is the newest is copied to ``SITE/latest``. ``SITE/index.html`` leads to
it, and ``SITE/versions.html`` lists all.
"""

import argparse
import re
import shutil
from html import escape
from pathlib import Path


def publish(built: Path, site: Path, version: str) -> None:
    """Copy ``built`` to its place in ``site`` and write the lists.

    Raises:
        ValueError: ``version`` is not a release or ``main``, or nothing was built.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?|main", version):
        raise ValueError(
            f"version {version!r} is neither of the form 1.2.3 nor main. Tag the release like titan-train-v1.2.3."
        )
    if not (built / "index.html").is_file():
        raise ValueError(f"{built} holds no index.html. Build the documentation first: uvx nox -s docs.")
    _replace(built, site / version)
    (site / ".nojekyll").touch()  # folders that begin with an underscore are served
    releases = sorted((path.name for path in site.iterdir() if re.match(r"\d+\.\d+\.\d+", path.name)), key=_order)
    if releases and releases[-1] == version:
        _replace(built, site / "latest")
    first = "latest" if (site / "latest").is_dir() else version
    (site / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={first}/">\n')
    names = [*reversed(releases), *(["main"] if (site / "main").is_dir() else [])]
    items = "".join(f'<li><a href="{escape(name)}/">{escape(name)}</a></li>' for name in names)
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>titan: versions</title>'
    (site / "versions.html").write_text(f"{head}<h1>Versions of the documentation</h1><ul>{items}</ul></html>\n")


def _replace(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(".doctrees"))


def _order(version: str) -> tuple[list[int], bool, str]:
    """Numbers as numbers; a pre-release comes before its release."""
    numbers, rest = re.match(r"([\d.]+)(.*)", version).groups()  # type: ignore[union-attr]
    rest = rest or ""
    parts = [int(part) for part in numbers.strip(".").split(".")]
    return parts, not rest, rest


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("built", type=Path)
    parser.add_argument("site", type=Path)
    parser.add_argument("version")
    arguments = parser.parse_args()
    try:
        publish(arguments.built, arguments.site, arguments.version)
    except ValueError as err:
        parser.error(str(err))


if __name__ == "__main__":
    main()
