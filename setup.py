"""A shim for those who still run it; everything is in pyproject.toml."""

from importlib.metadata import PackageNotFoundError, distribution

from setuptools import setup

try:
    distribution("verl")
except PackageNotFoundError:
    setup()
else:
    raise SystemExit(
        "chatr1 provides the import package `verl`, and the upstream distribution `verl` is installed here: the two "
        "would overwrite each other. Use an environment of its own (`make setup` makes one), or: pip uninstall verl"
    )
