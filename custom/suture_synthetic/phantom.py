"""Chest-like radiographs drawn from random numbers: the data of the demo and of the tests.

They contain no image of a person. A phantom has lungs, heart, mediastinum, spine, ribs and collar bones that
vary from patient to patient, and findings that are drawn into them with a size, side, position and
contrast of their own. The same seed gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Image = NDArray[np.float32]
Rng = np.random.Generator

AIR, TISSUE, HEART = 0.04, 0.60, 0.76


@dataclass(frozen=True)
class Anatomy:
    """A patient's chest, in units of half the image's side; x grows to the right, y downwards."""

    lung_x: float
    lung_width: float
    lung_height: float
    lung_y: float
    heart_width: float
    heart_height: float
    heart_x: float
    ribs: int
    rib_phase: float
    rib_contrast: float
    tilt: float
    air: float

    @classmethod
    def draw(cls, rng: Rng) -> Anatomy:
        """A new patient."""
        return cls(
            lung_x=rng.uniform(0.36, 0.42),
            lung_width=rng.uniform(0.25, 0.32),
            lung_height=rng.uniform(0.56, 0.70),
            lung_y=rng.uniform(-0.10, 0.02),
            heart_width=rng.uniform(0.22, 0.28),
            heart_height=rng.uniform(0.20, 0.28),
            heart_x=rng.uniform(0.04, 0.12),
            ribs=int(rng.integers(6, 9)),
            rib_phase=rng.uniform(0, 6.28),
            rib_contrast=rng.uniform(0.04, 0.09),
            tilt=rng.uniform(-0.06, 0.06),
            air=rng.uniform(0.21, 0.31),
        )


@dataclass
class _Canvas:
    """An image while it is drawn, with the masks that findings need."""

    x: Image
    y: Image
    image: Image
    lungs: tuple[Image, Image]
    anatomy: Anatomy
    contrast: float

    def side(self, rng: Rng) -> tuple[Image, float]:
        """One of the two lungs and the sign of its x."""
        left = int(rng.integers(0, 2))
        return self.lungs[left], (-1.0, 1.0)[left]

    def spot(self, rng: Rng, sign: float, reach: float = 0.7) -> tuple[float, float]:
        """A point inside a lung."""
        a, turn, far = self.anatomy, rng.uniform(0, 2 * np.pi), np.sqrt(rng.uniform(0, 1)) * reach
        return sign * a.lung_x + far * a.lung_width * np.cos(turn), a.lung_y + far * a.lung_height * np.sin(
            turn
        )

    def add(self, mask: Image, amount: float) -> None:
        """Makes the image brighter (or darker) where the mask is, by the finding's contrast."""
        self.image += mask * np.float32(amount * self.contrast)

    def blend(self, mask: Image, value: float, opacity: float) -> None:
        """Moves the image towards a value where the mask is."""
        weight = mask * np.float32(min(1.0, opacity * self.contrast))
        self.image += weight * (np.float32(value) - self.image)


def _ellipse(x: Image, y: Image, cx: float, cy: float, rx: float, ry: float, soft: float = 0.06) -> Image:
    """1 inside, 0 outside, with a soft edge."""
    distance = np.sqrt(((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2)
    return np.clip((1 - distance) / (2 * soft) + 0.5, 0, 1).astype(np.float32)


def _texture(rng: Rng, size: int, scale: float) -> Image:
    """Smooth noise of unit range."""
    field = gaussian_filter(rng.standard_normal((size, size)).astype(np.float32), scale * size / 64)
    low, high = field.min(), field.max()
    unit: Image = ((field - low) / (high - low + 1e-6)).astype(np.float32)
    return unit


def chest(anatomy: Anatomy, findings: frozenset[str], size: int, contrast: float, rng: Rng) -> Image:
    """One radiograph ``[size, size]`` in [0, 1], before acquisition.

    Args:
        findings: names among `FINDINGS`.
        contrast: how strongly findings are drawn; 1 is the demo's.
    """
    y, right = _grid(size)
    x: Image = right + np.float32(anatomy.tilt) * y
    wide = rng.uniform(1.15, 1.5) if "Cardiomegaly" in findings else 1.0
    grown = rng.uniform(1.03, 1.13) if "Emphysema" in findings else 1.0
    a = anatomy
    body = _ellipse(x, y, 0, 0.35, 0.98, 1.35, 0.03)
    image = AIR + body * np.float32(TISSUE - AIR)
    height = a.lung_height * grown
    lungs = [
        _ellipse(x, y, sign * a.lung_x, a.lung_y + (height - a.lung_height) * 0.6, a.lung_width, height)
        for sign in (-1, 1)
    ]
    air = a.air - (rng.uniform(0.03, 0.06) * contrast if "Emphysema" in findings else 0.0)
    for lung in lungs:
        image += lung * np.float32(air - TISSUE)
    _skeleton(image, x, y, a, body)
    both = np.maximum(*lungs)
    image += both * (_texture(rng, size, 1.2) - 0.5) * np.float32(0.08)
    reach = 1 + (wide - 1) * contrast
    heart_width = a.heart_width * reach * (0.92 if "Emphysema" in findings else 1)
    heart = _ellipse(x, y, a.heart_x, 0.34, heart_width, a.heart_height * (1 + (reach - 1) * 0.4), 0.1)
    image += heart * (np.float32(HEART) - image)
    canvas = _Canvas(x, y, image.astype(np.float32), (lungs[0], lungs[1]), a, contrast)
    for name, draw in _DRAWN.items():
        if name in findings:
            draw(canvas, rng)
    return np.clip(canvas.image, 0, 1).astype(np.float32)


@cache
def _grid(size: int) -> tuple[Image, Image]:
    """Centres of the pixels, downwards and to the right, in units of half the side."""
    axis = ((np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1).astype(np.float32)
    down, right = np.meshgrid(axis, axis, indexing="ij")
    return down, right


def _skeleton(image: Image, x: Image, y: Image, a: Anatomy, body: Image) -> None:
    """Spine, ribs and collar bones."""
    image += np.exp(-((x / 0.11) ** 2)).astype(np.float32) * body * np.float32(0.13)
    arcs = y + 0.55 * (np.abs(x) - 0.4) ** 2
    ribs = np.maximum(0, np.cos(arcs * a.ribs * np.pi + a.rib_phase) - 0.35)
    image += (ribs * body * (np.abs(x) > 0.12)).astype(np.float32) * np.float32(a.rib_contrast * 1.6)
    collar = np.exp(-(((y + 0.72 + 0.18 * np.abs(x)) / 0.035) ** 2)) * (np.abs(x) < 0.75)
    image += collar.astype(np.float32) * np.float32(0.12)


def _pleural_effusion(c: _Canvas, rng: Rng) -> None:
    """Fluid at the base of one lung, its surface rising towards the chest wall."""
    lung, sign = c.side(rng)
    a = c.anatomy
    level = a.lung_y + a.lung_height * rng.uniform(0.45, 0.85)
    outwards = np.clip((sign * c.x - a.lung_x) / a.lung_width, -1, 1)
    depth = np.clip((c.y - level + 0.12 * outwards) / 0.1 + 0.5, 0, 1)
    c.blend(lung * depth.astype(np.float32), TISSUE + 0.06, rng.uniform(0.4, 0.75))


def _pneumothorax(c: _Canvas, rng: Rng) -> None:
    """Air outside the lung: a dark rim at the side and top, and the lung's thin edge."""
    lung, sign = c.side(rng)
    a = c.anatomy
    width = rng.uniform(0.1, 0.32)
    inner = _ellipse(
        c.x,
        c.y,
        sign * a.lung_x * (1 - 0.35 * width),
        a.lung_y + 0.25 * width,
        a.lung_width * (1 - width),
        a.lung_height * (1 - 0.5 * width),
    )
    upper = np.clip((0.45 - c.y) / 0.3, 0, 1).astype(np.float32)
    c.blend(lung * (1 - inner) * upper, AIR + 0.08, 0.75)
    edge = np.exp(-(((inner - 0.5) / 0.25) ** 2)).astype(np.float32)
    c.add(lung * edge * upper, 0.1)


def _consolidation(c: _Canvas, rng: Rng) -> None:
    """A patchy opacity of a lung zone."""
    lung, sign = c.side(rng)
    x, y = c.spot(rng, sign)
    spread = rng.uniform(0.14, 0.24)
    zone = np.exp(-(((c.x - x) / spread) ** 2 + ((c.y - y) / (1.3 * spread)) ** 2)).astype(np.float32)
    c.add(lung * zone * (0.4 + _texture(rng, c.x.shape[0], 2.0)), rng.uniform(0.2, 0.32))


def _nodule(c: _Canvas, rng: Rng) -> None:
    """One or two small round opacities."""
    for _ in range(int(rng.integers(1, 3))):
        lung, sign = c.side(rng)
        x, y = c.spot(rng, sign, 0.85)
        radius = rng.uniform(0.055, 0.095)
        c.add(lung * _ellipse(c.x, c.y, x, y, radius, radius, 0.2), rng.uniform(0.26, 0.4))


def _mass(c: _Canvas, rng: Rng) -> None:
    """A large round opacity."""
    lung, sign = c.side(rng)
    x, y = c.spot(rng, sign, 0.75)
    radius = rng.uniform(0.13, 0.22)
    shape = _ellipse(c.x, c.y, x, y, radius, radius * rng.uniform(0.8, 1.25), 0.15)
    c.add(np.maximum(lung, 0.3) * shape, rng.uniform(0.16, 0.3))


def _atelectasis(c: _Canvas, rng: Rng) -> None:
    """Plates of collapsed lung: thin bands, mostly in the lower zones."""
    for _ in range(int(rng.integers(1, 4))):
        lung, sign = c.side(rng)
        x, _y = c.spot(rng, sign, 0.4)
        y = c.anatomy.lung_y + c.anatomy.lung_height * rng.uniform(0.1, 0.7)
        slope, length = rng.uniform(-0.45, 0.45), rng.uniform(0.14, 0.26)
        band = np.exp(-(((c.y - y - slope * (c.x - x)) / 0.03) ** 2) - ((c.x - x) / length) ** 2)
        c.add(lung * band.astype(np.float32), rng.uniform(0.18, 0.3))


def _edema(c: _Canvas, rng: Rng) -> None:
    """A haze around both hila, like wings."""
    amount, reach = rng.uniform(0.05, 0.12), rng.uniform(0.2, 0.3)
    haze = _texture(rng, c.x.shape[0], 1.5)
    for lung, sign in zip(c.lungs, (-1.0, 1.0), strict=True):
        near = np.exp(-(((c.x - sign * 0.2) / reach) ** 2 + ((c.y - 0.05) / (1.3 * reach)) ** 2))
        c.add(lung * near.astype(np.float32) * (0.5 + haze), amount)


def _support_devices(c: _Canvas, rng: Rng) -> None:
    """A thin bright line from the collar bone down into the heart, or a tube along the middle."""
    sign = rng.choice([-1.0, 1.0])
    top, end = sign * rng.uniform(0.0, 0.5), rng.uniform(-0.1, 0.12)
    bottom = rng.uniform(0.0, 0.4)
    t = np.clip((c.y + 0.95) / (bottom + 0.95), 0, 1)
    path = top + (end - top) * t ** rng.uniform(0.6, 1.6)
    line = np.exp(-(((c.x - path) / 0.022) ** 2)) * (c.y < bottom)
    c.add(line.astype(np.float32), rng.uniform(0.14, 0.28))


_DRAWN: dict[str, Callable[[_Canvas, Rng], None]] = {
    "Edema": _edema,
    "Consolidation": _consolidation,
    "Mass": _mass,
    "Nodule": _nodule,
    "Atelectasis": _atelectasis,
    "Pleural Effusion": _pleural_effusion,
    "Pneumothorax": _pneumothorax,
    "Support Devices": _support_devices,
}

FINDINGS: tuple[str, ...] = tuple(sorted([*_DRAWN, "Cardiomegaly", "Emphysema"]))
"""All findings that can be drawn; the first two shapes above change the anatomy itself."""
