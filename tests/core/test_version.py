"""One version: of the package, and of what is installed."""

from importlib.metadata import version

import suture


def test_the_package_and_its_distribution_agree() -> None:
    assert suture.__version__ == version("suture")
