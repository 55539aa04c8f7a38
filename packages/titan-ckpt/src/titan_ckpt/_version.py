"""The version, as the installed distribution says it; written into every manifest."""

from importlib.metadata import version

VERSION = version("titan-ckpt")
