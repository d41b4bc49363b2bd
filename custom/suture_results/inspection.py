"""What the file of an image holds, and how it looks to a model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from suture.core.errors import DataError
from suture.core.escaping import number_of
from suture.data.decoding import needed_bits, open_image, readable
from suture.data.images import ImageSource

SAMPLE = 32
"""Images of a site that are opened to guess at their depth, colour and size."""

_NEARLY_ALL = 0.9

_DARK = 32
"""Images whose brightest pixel lies below this are nearly black to a model."""

_ENLARGED = 2
"""How many times an image is enlarged to what a model reads, from which on it is told."""

_LONG = 4
"""How many times an image is as long as wide, or as wide as long, from which on it is told."""

_GRAY = ("1", "L", "LA")


@dataclass(frozen=True)
class ImageFacts:
    """One image.

    Attributes:
        file, pixels: digests of the bytes of the file, and of the pixels that a model sees before they are
            resized.
        width, height: in pixels.
        bits: of a stored value, as the file says.
        highest: the largest stored value of an image that is scaled by its depth; None of any other.
        colour: whether its channels differ.
        mean, brightest: mean and maximum of the gray levels (or channels) that a model sees, 0 to 255.
        modality: of a DICOM image, empty where it states none; None of any other.
    """

    file: bytes
    pixels: bytes
    width: int
    height: int
    bits: int
    highest: int | None
    colour: bool
    mean: float
    brightest: int
    modality: str | None = None


def inspect(data: bytes, name: str, color: bool, bits: int | None = None) -> ImageFacts:
    """Open an image and describe it; arguments and errors as in `suture.data.decoding.decode_image`."""
    opened = open_image(data, name, bits)
    with readable(name):
        pixels = opened.pixels(color)
        colour = _in_colour(opened.image)
    height, width = pixels.shape[:2]
    return ImageFacts(
        file=_digest(data),
        pixels=_digest(f"{pixels.shape}".encode() + pixels.tobytes()),
        width=width,
        height=height,
        bits=opened.bits,
        highest=opened.highest,
        colour=colour,
        mean=float(pixels.mean()),
        brightest=int(pixels.max()),
        modality=opened.modality,
    )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _in_colour(image: Image.Image) -> bool:
    """Whether the channels differ: many files of gray images have three that are equal."""
    if image.mode in _GRAY:
        return False
    channels = np.asarray(image.convert("RGB"))
    return bool((channels != channels[..., :1]).any())


@dataclass(frozen=True)
class Sample:
    """What a few images of a site show.

    Attributes:
        depth: that 16-bit images have in truth, with the reason; None for all 16. An image that turns out to
            have a larger value cannot be read with it.
        colour: whether nearly all are in colour.
        side: the longer side in pixels, in the median; 0 where none can be opened.
    """

    depth: tuple[int, str] | None = None
    colour: bool = False
    side: int = 0


def sample(root: Path, images: Collection[str]) -> Sample:
    """Open at most `SAMPLE` images of a folder, evenly over their sorted names."""
    names = sorted(images)[:: -(-len(images) // SAMPLE)]
    highest, sides, coloured = [], [], 0
    with ImageSource(root) as source:
        for name in names:
            try:
                opened = open_image(source.raw(name), name)
            except DataError:
                continue  # `check` names it
            if opened.bits == 16 and opened.highest is not None:
                highest.append(opened.highest)
            coloured += _in_colour(opened.image)
            sides.append(max(opened.image.size))
    colour, side = coloured >= _NEARLY_ALL * len(sides) > 0, int(median(sides or [0]))
    if not highest or needed_bits(max(highest)) == 16:
        return Sample(None, colour, side)
    why = f"of {len(names):,} images looked at, {len(highest):,} store 16 bits; their largest value is "
    return Sample((needed_bits(max(highest)), f"{why}{max(highest):,}"), colour, side)


def size_notes(sizes: Collection[tuple[str, int, int]], side: int) -> list[str]:
    """Return what of the sizes of images a person should look at: that some are small, that some are narrow.

    They are read all the same, in training as in prediction.

    Args:
        sizes: name, width and height of each image, in pixels.
        side: of the square that a model reads, in pixels.
    """
    notes = []
    if small := [(max(w, h), name, w, h) for name, w, h in sizes if max(w, h) * _ENLARGED < side]:
        _, name, width, height = min(small)
        notes.append(
            f"{number_of(len(small), 'image')} enlarged more than {_ENLARGED} times to the {side} "
            f"pixels that the model reads; they contain no finer detail. The smallest: {name}, {width} "
            f"× {height}"
        )
    if narrow := [
        (min(w, h) / max(w, h), name, w, h) for name, w, h in sizes if min(w, h) * _LONG < max(w, h)
    ]:
        share, name, width, height = min(narrow)
        notes.append(
            f"{number_of(len(narrow), 'image')} more than {_LONG} times as long as wide, or as wide as "
            f"long. The narrowest: {name}, {width} × {height}, whose shorter side the model reads in "
            f"{number_of(max(1, round(share * side)), 'pixel')}"
        )
    return notes


def stated_modalities(facts: Iterable[ImageFacts]) -> Counter[str]:
    """Return how many DICOM images are of each modality; an empty one is that of images that state none."""
    return Counter(one.modality for one in facts if one.modality is not None)


def counted_modalities(stated: Counter[str]) -> str:
    """Return modalities with the number of their images, the most frequent first."""
    ordered = sorted(stated.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{modality or 'not stated'} ({n:,})" for modality, n in ordered)


def depth_warnings(facts: Iterable[ImageFacts], bits: int | None) -> list[str]:
    """Return what seems wrong with the depth by which the images of a site are scaled.

    Args:
        bits: the depth that the site has set.
    """
    facts = list(facts)
    highest = [one.highest for one in facts if one.bits == 16 and one.highest is not None]
    if not highest and bits is not None:
        return [f"[data] bits = {bits} has no effect: no image stores 16 bits"]
    if highest and bits is None and (needed := needed_bits(max(highest))) < 16:
        dark = f"[data] bits = {needed}, or the model sees them {2 ** (16 - needed)} times too dark"
        top = f"{max(highest):,}"
        return [f"{len(highest):,} images store 16 bits and have no value above {top}: write {dark}"]
    if facts and (brightest := max(one.brightest for one in facts)) < _DARK:
        return [f"no pixel of any image is brighter than {brightest} of 255"]
    return []
