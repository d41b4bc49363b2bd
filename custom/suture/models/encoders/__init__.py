"""Encoders of other libraries: a name is ``FAMILY:NAME``, and another package has the families.

Nothing is downloaded, and nothing that a file holds is run: a file or folder gives tensors and a
configuration of plain values, from which the library's own classes are built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from suture.core.entry_points import Registry
from suture.core.errors import ConfigError, as_word, unknown
from suture.models.encoders.backbone import Backbone
from suture.models.encoders.described import Description


@dataclass(frozen=True)
class Family:
    """Encoders of one library, or of one kind of file.

    Attributes:
        form: how they are named, ``timm:NAME``.
        text: what `suture list` says of them.
        named: the encoder of a name, where the library knows its networks by name.
        read: the name and the description of the network of a file or folder, where it comes from one.
        described: the encoder of such a name and description.
    """

    form: str
    text: str
    named: Callable[[str], Backbone] | None = None
    read: Callable[[Path], tuple[str, Description]] | None = None
    described: Callable[[str, Description], Backbone] | None = None


FAMILIES: Registry[Family] = Registry(
    "suture.encoder_families",
    "family of models",
    {},
    "a Family of suture.models.encoders",
    lambda family: isinstance(family, Family),
)
"""Those of this distribution: parties must run the same code."""


def family_of(name: str) -> str:
    """Return the family of a name ``FAMILY:NAME``; empty for a name of the registry.

    Raises:
        ConfigError: there is no such family (names the nearest), or nothing follows it.
    """
    family, colon, network = name.partition(":")
    if colon and family not in FAMILIES:
        raise unknown("family of models", family, tuple(FAMILIES))
    if colon and not network.strip():
        raise ConfigError(f"model.name={name} names no encoder; write {FAMILIES[family].form}")
    return family if colon else ""


def is_stored(name: str) -> bool:
    """Whether the encoder of a name comes from a file or folder."""
    family, colon, _ = name.partition(":")
    return bool(colon) and family in FAMILIES and FAMILIES[family].read is not None


@lru_cache(maxsize=64)
def family_encoder(name: str, config: str | None) -> Backbone:
    """Return the encoder of a name ``FAMILY:NAME``.

    Args:
        config: description of an encoder that comes from a file or folder; see `Description`.

    Raises:
        ConfigError: there is no such network (names the nearest), its library is not installed, or its
            description is missing or faulty.
    """
    word, _, network = name.partition(":")
    family = FAMILIES[word]
    if family.named:
        return family.named(network)
    assert family.described is not None
    return family.described(
        network, Description.read(config or "", f"model.encoder_config of {as_word(name)}")
    )
