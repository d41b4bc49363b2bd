"""The methods that installed packages register by entry point; nothing here imports one of them."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "suture.methods"
"""The entry points by which another package names its methods."""


def registered() -> dict[str, list[EntryPoint]]:
    """The entry points of methods by name: several where packages register different ones of one name."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        if point not in found.setdefault(point.name, []):  # a folder may be on the path twice
            found[point.name].append(point)
    return found


def package_of(point: EntryPoint) -> str:
    """The name and version of the package that registers an entry point."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"
