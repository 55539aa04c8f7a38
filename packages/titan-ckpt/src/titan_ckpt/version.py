"""The version, as the installed distribution says it; written into every manifest."""

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("titan-ckpt")
    except PackageNotFoundError:  # the sources are on the Python path, not installed
        return "0+source"


VERSION = _installed()
