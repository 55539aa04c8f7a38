"""The version, as the installed distribution says it; written into every manifest."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("titan-ckpt")
except PackageNotFoundError:  # the sources on the Python path, not installed
    VERSION = "0+source"
