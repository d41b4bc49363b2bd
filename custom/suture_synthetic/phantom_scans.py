"""Three hospitals whose scanners see phantoms: who annotates what, and images with all their labels.

Many images are drawn in two processes. The other one, `python -m suture_synthetic.phantom_scans`, imports no
torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import IO, Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from suture.core.errors import SutureError
from suture.core.processes import python_child, usable_cores
from suture_synthetic.phantom import FINDINGS, Anatomy, Image, Rng, chest

_MANY = 2_000
"""Images from which on another process draws: its imports take as long as 700 images."""

_PREVALENCE: dict[str, float] = {
    "Atelectasis": 0.14,
    "Cardiomegaly": 0.18,
    "Consolidation": 0.14,
    "Edema": 0.10,
    "Emphysema": 0.14,
    "Mass": 0.13,
    "Nodule": 0.17,
    "Pleural Effusion": 0.14,
    "Pneumothorax": 0.13,
    "Support Devices": 0.15,
}

_TOGETHER: dict[tuple[str, str], float] = {
    ("Cardiomegaly", "Pleural Effusion"): 0.22,
    ("Cardiomegaly", "Edema"): 0.25,
    ("Pleural Effusion", "Atelectasis"): 0.18,
    ("Edema", "Consolidation"): 0.12,
    ("Pneumothorax", "Support Devices"): 0.25,
    ("Emphysema", "Pneumothorax"): 0.10,
}
"""How much more likely the second finding is where the first one is."""


@dataclass(frozen=True)
class Scanner:
    """How a site acquires its images; the default changes nothing but for noise.

    Attributes:
        blur: of the detector, in pixels of a 64 px image.
        gamma, gain, offset: contrast and brightness.
        noise: standard deviation, of a range of 1.
    """

    blur: float = 0.0
    gamma: float = 1.0
    gain: float = 1.0
    offset: float = 0.0
    noise: float = 0.03

    def between(self, strength: float) -> Scanner:
        """Interpolate between the neutral scanner (strength 0) and this one (1), or extrapolate."""
        pairs = zip(asdict(Scanner()).values(), asdict(self).values(), strict=True)
        return Scanner(*(neutral + strength * (mine - neutral) for neutral, mine in pairs))

    def take(self, image: Image, rng: Rng) -> NDArray[np.uint8]:
        """The radiograph as this scanner stores it."""
        seen = gaussian_filter(image, self.blur * image.shape[0] / 64) if self.blur > 0 else image
        seen = np.clip(seen, 0, 1) ** self.gamma * self.gain + self.offset
        noisy = seen + rng.standard_normal(image.shape).astype(np.float32) * self.noise
        return (np.clip(noisy, 0, 1) * 255).astype(np.uint8)


@dataclass(frozen=True)
class Hospital:
    """A phantom site: what it annotates, and its scanner."""

    name: str
    labels: tuple[str, ...]
    scanner: Scanner


HOSPITALS: tuple[Hospital, ...] = (
    Hospital(
        "harbor",
        ("Cardiomegaly", "Pleural Effusion", "Pneumothorax", "Nodule", "Mass", "Edema"),
        Scanner(blur=0.0, gamma=0.95, gain=1.0, offset=0.0, noise=0.035),
    ),
    Hospital(
        "lakeside",
        ("Cardiomegaly", "Pleural Effusion", "Pneumothorax", "Consolidation", "Emphysema", "Atelectasis"),
        Scanner(blur=0.28, gamma=1.05, gain=0.95, offset=0.03, noise=0.03),
    ),
    Hospital(
        "northfield",
        ("Cardiomegaly", "Pleural Effusion", "Nodule", "Consolidation", "Support Devices"),
        Scanner(blur=0.15, gamma=1.12, gain=1.05, offset=-0.015, noise=0.04),
    ),
)


@dataclass(frozen=True)
class PhantomSpec:
    """The number of phantoms, and how difficult they are.

    Attributes:
        images: number of images at each site.
        held_out: number of images at the server, fully labelled, from all scanners.
        size: pixels of a side.
        contrast: how strongly findings are drawn; lower is harder.
        shift: how different the sites' scanners are; with 0 they are all the same.
        every_label: each site annotates every finding: the reference for partial labels.
    """

    images: int = 1500
    held_out: int = 1500
    size: int = 64
    contrast: float = 1.0
    shift: float = 1.0
    every_label: bool = False


Part = tuple[NDArray[np.uint8], NDArray[np.float32], tuple[str, ...]]
"""Images ``[n, size, size]``, labels ``[n, len(FINDINGS)]`` (all known), and the patient of each."""


def findings_of(rng: Rng, before: frozenset[str] | None = None, prevalence: float = 1.0) -> frozenset[str]:
    """Draw an image's findings, `prevalence` times the demo's; a follow-up shows most of those `before`."""
    found: set[str] = set()
    for name in sorted(_PREVALENCE, key=lambda n: n not in {first for first, _ in _TOGETHER}):
        more = sum(add for (first, second), add in _TOGETHER.items() if second == name and first in found)
        chance = prevalence * (_PREVALENCE[name] + more)
        if before is not None:
            chance = 0.85 if name in before else 0.2 * chance
        if rng.random() < chance:
            found.add(name)
    return frozenset(found)


@dataclass(frozen=True)
class Order:
    """Images of one scanner that are to be drawn, with all their labels."""

    scanner: Scanner
    n: int
    spec: PhantomSpec
    seed: int
    prefix: str = "p"

    def draw(self) -> Part:
        """Draw the images."""
        rng, spec, person = np.random.default_rng(self.seed), self.spec, 0
        images = np.empty((self.n, spec.size, spec.size), dtype=np.uint8)
        y = np.zeros((self.n, len(FINDINGS)), dtype=np.float32)
        patients: list[str] = []
        while len(patients) < self.n:
            anatomy, seen, person = Anatomy.draw(rng), None, person + 1
            for _ in range(int(rng.integers(1, 4))):
                if len(patients) == self.n:
                    break
                seen = findings_of(rng, seen)
                i = len(patients)
                images[i] = self.scanner.take(chest(anatomy, seen, spec.size, spec.contrast, rng), rng)
                y[i] = [name in seen for name in FINDINGS]
                patients.append(f"{self.prefix}{person:05d}")
        return images, y, tuple(patients)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Order:
        """Read an order from its JSON."""
        return cls(
            **{**values, "scanner": Scanner(**values["scanner"]), "spec": PhantomSpec(**values["spec"])}
        )


def drawn(
    site: str, labels: Sequence[str], n: int, size: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return images ``[n, 1, size, size]`` of a site, and labels ``[n, c]`` of its classes."""
    order = Order(HOSPITALS[0].scanner, n, PhantomSpec(size=size), crc32(site.encode()))
    images, y, _ = order.draw()
    return images[:, None], y[:, [FINDINGS.index(name) for name in labels]]


@contextmanager
def drawing(orders: Sequence[Order]) -> Iterator[Iterator[Part]]:
    """Give the images of each order, in turn; of many, another process draws all but the first order."""
    if usable_cores() < 2 or len(orders) < 2 or sum(order.n for order in orders) < _MANY:
        yield (order.draw() for order in orders)
        return
    with python_child("suture_synthetic.phantom_scans", stdin=subprocess.PIPE) as other:
        yield _draw(orders, other)


def _draw(orders: Sequence[Order], other: subprocess.Popen[bytes]) -> Iterator[Part]:
    assert other.stdin is not None
    assert other.stdout is not None
    with suppress(BrokenPipeError), other.stdin:  # its end is told below
        other.stdin.write(json.dumps([asdict(order) for order in orders[1:]]).encode())
    yield orders[0].draw()
    for order in orders[1:]:
        if (part := _read(other.stdout, order)) is None:
            raise SutureError(
                f"the process that draws images ended with code {other.wait()}; see its output above"
            )
        yield part


def _write(part: Part, to: IO[bytes]) -> None:
    """Write a line of JSON, the patients, and the numbers of images and labels."""
    images, y, patients = part
    to.write(f"{json.dumps(patients)}\n".encode())
    to.write(images.tobytes())
    to.write(y.tobytes())
    to.flush()


def _read(source: IO[bytes], order: Order) -> Part | None:
    """Read the answer to an order; None where it is not whole."""
    shapes = (order.n, order.spec.size, order.spec.size), (order.n, len(FINDINGS))
    line = source.readline()
    images, y = np.empty(shapes[0], np.uint8), np.empty(shapes[1], np.float32)
    for array in (images, y):
        content = source.read(array.nbytes)
        if len(content) < array.nbytes:
            return None
        array[:] = np.frombuffer(content, array.dtype).reshape(array.shape)
    return images, y, tuple(json.loads(line))


def main() -> None:
    """Draw what the standard input asks for, and write it to the standard output."""
    orders = [Order.of(values) for values in json.load(sys.stdin)]
    with suppress(BrokenPipeError):  # the process that asked has ended
        for order in orders:
            _write(order.draw(), sys.stdout.buffer)


if __name__ == "__main__":
    main()
