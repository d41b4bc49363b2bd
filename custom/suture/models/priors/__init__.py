"""The registry of priors: frozen networks of which every site has the same copy, never trained or sent.

A prior on disk is prior.safetensors, the backbone alone, and prior.json, which holds everything else.

Its features of an image are the same for every party. They are cached on disk: each input is read once, by
whatever runs share the folder. An entry is one file: the features of all inputs of a party, named by a hash
of them and of everything else that the numbers depend on. It is a NumPy array with a digest of each input
and a SHA-256 behind it, written a batch at a time and then mapped, so memory does not grow with the number
of inputs. A new entry takes what it can from others of the same network: other splits of the same images,
or a table that has grown. Features tell of patients: only the owner of the files may read them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass as validated
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor, nn

from suture.core import VERSION
from suture.core.entry_points import PRIOR_GROUP, Registry
from suture.core.errors import ConfigError, DataError, check_known
from suture.core.files import (
    atomic_write,
    make_folder,
    named_regular,
    only_maker,
    open_regular,
    parse_json,
    read_bounded,
    replacing,
    write_json,
)
from suture.core.runtime import device_name, seed_torch
from suture.core.validation import NAMED_FILE, STRICT, parse
from suture.data.batch import Preprocessing, by_channel, moved
from suture.models import MODELS, ModelSpec
from suture.models.classifier import Classifier
from suture.protocol.packing import read_tensors

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in a gray image (ITU-R BT.601, as in Pillow)."""


class PriorWidth(ConfigError):
    """A site's prior and the model's projection have different widths."""


@dataclasses.dataclass(frozen=True, eq=False)
class Prior:
    """A network from images to features that is never trained.

    It is not a module, so its tensors are never among those of a model that holds it, and never sent.

    Attributes:
        network: images ``[n, channels, size, size]`` to ``[n, width]``.
        width: number of features.
        preprocessing: of the network's pretraining.
        digest: of the tensors and the preprocessing; equal digests mean equal priors.
        description: as text.
    """

    network: nn.Module
    width: int
    preprocessing: Preprocessing
    digest: str
    description: str

    @torch.no_grad()  # not inference mode: a loss against these features keeps them for its backward pass
    def features(self, images: Tensor, half: torch.dtype | None = None) -> Tensor:
        """Return float32 features ``[n, width]``.

        Args:
            half: short type in which the network computes; None for single precision.
            images: ``[n, 1 or 3, h, w]`` of any size, uint8 or (after augmentation, say) float in [0, 1].
                Gray ones are repeated where the network takes three channels, others made gray where it
                takes one.
        """
        self.network.eval()  # a model that holds it may have been put into training mode
        x = images.float() if images.dtype == torch.uint8 else images.float() * 255
        if x.shape[1] > self.preprocessing.channels:
            x = (x * by_channel(LUMA, x.device)).sum(1, keepdim=True)
        side = (self.preprocessing.size,) * 2
        if x.shape[-2:] != side:
            # Without antialiasing a reduced image would be a sample of its pixels, with all their noise.
            x = F.interpolate(x, side, mode="bilinear", antialias=True)
        x = self.preprocessing(x)
        with torch.autocast(x.device.type, half, enabled=half is not None):
            out: Tensor = self.network(x)
        return out.float()

    def to(self, device: torch.device | str) -> Prior:
        """Return the prior on another device; its network is moved, as modules are."""
        return dataclasses.replace(self, network=self.network.to(device))


def check_width(prior: Prior, model: Classifier, site: str) -> None:
    """Check that a prior is as wide as the model's projection.

    Raises:
        PriorWidth: naming the site and the remedy.
    """
    if model.projected != prior.width:
        raise PriorWidth(
            f"{site}: the prior {prior.description!r} has {prior.width} features, but the model has "
            f"{model.projected}; set model.projection={prior.width}"
        )


def freeze(kind: str, network: nn.Module, width: int, preprocessing: Preprocessing, text: str) -> Prior:
    """Return a network as a prior: in eval mode, without gradients of its parameters.

    Args:
        kind: the architecture.
    """
    network.eval().requires_grad_(False)
    return Prior(network, width, preprocessing, digest_of(kind, network.state_dict(), preprocessing), text)


def digest_of(kind: str, tensors: Mapping[str, Tensor], preprocessing: Preprocessing) -> str:
    """Return the SHA-256 of kind, preprocessing, and names, types, shapes and bytes of the sorted tensors."""
    facts = [kind, dataclasses.asdict(preprocessing)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        # As plain bytes: numpy does not know every type of torch.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


LOG = logging.getLogger(__name__)

_CACHE_FORMAT = 3
"""The format of an entry; a new number invalidates every older entry."""

BATCH = 64
"""Inputs at a time; constant, because another number gives other sums. With it features do not depend on what
else is in a batch (a test compares bytes); a party of fewer inputs shares nothing."""

MESSAGE_PAUSE = 30.0
"""Seconds between two messages about progress."""

MOST_BYTES = 16 * 2**30
"""Bytes of the entries of a folder: beyond them, those that were not used for longest are deleted."""

_SUFFIX = ".features"

_Compute = Callable[[Tensor], Tensor]
"""Returns features of the inputs of these numbers, at most `BATCH`."""

_DIGEST = 16
"""Bytes of an input's digest."""


def cached_features(
    prior: Prior, images: Tensor, folder: Path | None, device: torch.device | str, site: str
) -> Tensor:
    """Return the prior's features of images without augmentation, from the cache where it has them.

    Args:
        prior: on `device`.
        images: uint8 ``[n, 1 or 3, h, w]``, perhaps memory-mapped.
        folder: of the cache, made if it does not exist; None caches nothing.
        site: name of the site, for messages.

    Returns:
        float32 ``[n, prior.width]``, on the CPU.

    Raises:
        DataError: the folder cannot be written (full, read-only); nothing is then left in it.
    """

    def features(rows: Tensor) -> Tensor:
        return prior.features(moved(images[rows], device))

    shape = (len(images), prior.width)
    how = key("prior", _CACHE_FORMAT, prior.digest, device_name(device), torch.get_num_threads())
    return cache(folder, how, digests({"image": images}), shape, features, site, "the prior")


def cache(
    folder: Path | None,
    how: str,
    of: np.ndarray,
    shape: tuple[int, ...],
    features: _Compute,
    site: str,
    reader: str,
) -> Tensor:
    """Return features from an entry of a cache; one that is missing or damaged is made and written.

    Args:
        folder: made if it does not exist; None caches nothing.
        how: a `key` of all that the numbers depend on but the inputs.
        of: the `digests` of the inputs.
        shape: of the features, float32 ``[n, d]`` or of several views ``[n, k, d]``.
        site, reader: names of the site, and of what computes the features, for messages.

    Returns:
        the features, memory-mapped from a folder. Writing to the tensor does not reach the file.

    Raises:
        DataError: the folder cannot be written (full, read-only); nothing is then left in it.
    """
    if not shape[0]:
        return torch.empty(shape)
    if folder is None:
        return torch.cat([*in_batches(shape[0], torch.arange(shape[0]), features, site, reader)])
    path = folder / f"{how}-{hashlib.sha256(of.data).hexdigest()[:16]}{_SUFFIX}"
    try:
        make_folder(folder.parent, private=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        if (found := _read(path, shape, of)) is not None:
            return found
        with only_maker(path):  # another process may be doing just that
            found = _read(path, shape, of)
            if found is None:
                _write(path, shape, of, _with_others(path, shape, of, features, site, reader))
                _limit(path)
                found = _read(path, shape, of)
    except OSError as error:
        size = math.prod(shape) * 4 / 1e6
        raise DataError(
            f"site {site!r}: cannot write {size:.0f} MB of features to {path.parent}: {error}; "
            "make room, as with `suture clean`, or set [storage] cache to another folder"
        ) from error
    if found is None:
        raise DataError(f"site {site!r}: {path} changes while it is read; check the disk of {path.parent}")
    return found


def key(kind: str, *facts: object) -> str:
    """Return the beginning of the names of entries whose numbers depend on these facts."""
    return f"{kind}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


def digests(inputs: Mapping[str, Tensor]) -> np.ndarray:
    """Return a digest of each input: uint8 ``[n, 16]``.

    Args:
        inputs: tensors ``[n, ...]`` on the CPU, perhaps memory-mapped.
    """
    tensors = [(f"{name} {t.dtype} {tuple(t.shape[1:])} ".encode(), t) for name, t in sorted(inputs.items())]
    rows = range(len(tensors[0][1]))
    return digests_of(b"".join(form + t[row].numpy().tobytes() for form, t in tensors) for row in rows)


def digests_of(contents: Iterable[bytes]) -> np.ndarray:
    """Return a digest of each content: uint8 ``[n, 16]``."""
    found = b"".join(hashlib.blake2b(content, digest_size=_DIGEST).digest() for content in contents)
    return np.frombuffer(found, np.uint8).reshape(-1, _DIGEST)


def in_batches(n: int, wanted: Tensor, features: _Compute, site: str, reader: str) -> Iterator[Tensor]:
    """Yield the features of some of n inputs, `BATCH` at a time, on the CPU; a log line tells of progress."""
    reported = time.monotonic()
    for done, rows in enumerate(torch.split(wanted, BATCH)):
        filled = min(n, BATCH) - len(rows)  # the last batch has the size of the others
        yield features(torch.cat([rows, torch.arange(filled)]))[: len(rows)].cpu()
        if time.monotonic() - reported > MESSAGE_PAUSE:
            reported = time.monotonic()
            read = done * BATCH + len(rows)
            # A warning, because a plain loop shows nothing below that level, and this may take minutes.
            LOG.warning("site %r: %s has read %d of %d images", site, reader, read, len(wanted))


def _with_others(
    path: Path, shape: tuple[int, ...], of: np.ndarray, features: _Compute, site: str, reader: str
) -> Iterator[np.ndarray]:
    """Yield an entry's features, `BATCH` at a time: those that another entry has are not computed."""
    n = shape[0]
    entry, row, others = np.full(n, -1), np.zeros(n, int), list[np.ndarray]()
    group = path.name.removesuffix(_SUFFIX).rpartition("-")[0]
    for other in sorted(path.parent.glob(f"{group}-*{_SUFFIX}")) if n >= BATCH else ():
        opened = None if other == path or (entry >= 0).all() else _open(other)
        if opened is None or len(opened[0]) < BATCH or opened[0].shape[1:] != shape[1:]:
            continue
        where = {digest.tobytes(): k for k, digest in enumerate(opened[1])}
        for k in np.flatnonzero(entry < 0):
            if (at := where.get(of[k].tobytes())) is not None:
                entry[k], row[k] = len(others), at
        others.append(opened[0])
    lacking = torch.from_numpy(np.flatnonzero(entry < 0))
    computed = (one for batch in in_batches(n, lacking, features, site, reader) for one in batch.numpy())
    for start in range(0, n, BATCH):
        batch = slice(start, start + BATCH)
        yield np.stack(
            [
                next(computed) if source < 0 else others[source][at]
                for source, at in zip(entry[batch], row[batch], strict=True)
            ]
        )


def _open(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Return an entry's features, mapped, and the digests of its inputs; None where it is damaged."""
    try:
        with named_regular(path, own=True) as opened, open_regular(path, own=True) as file:
            found = np.load(opened, mmap_mode="c", allow_pickle=False)
            file.seek(-(len(found) * _DIGEST + 32), os.SEEK_END)
            of = file.read(len(found) * _DIGEST)
            whole = hashlib.sha256(found.data)
            whole.update(of)
            if whole.digest() == file.read() and found.dtype == np.float32:
                return found, np.frombuffer(of, np.uint8).reshape(-1, _DIGEST)
    except (ValueError, OSError, EOFError):
        pass
    LOG.warning("cache entry %s is damaged; it is made again", path)
    return None


def _read(path: Path, shape: tuple[int, ...], of: np.ndarray) -> Tensor | None:
    """Return the features of an entry; None where it is missing, damaged, or of other inputs."""
    if not path.is_file():
        return None
    opened = _open(path)
    if opened is None:
        return None
    if opened[0].shape != shape or not np.array_equal(opened[1], of):
        LOG.warning("cache entry %s is damaged; it is made again", path)
        return None
    os.utime(path)
    return torch.from_numpy(opened[0])


def _write(path: Path, shape: tuple[int, ...], of: np.ndarray, batches: Iterator[np.ndarray]) -> None:
    """Write an entry, to a file rather than to memory that is mapped: a full disk is then an error."""
    whole = hashlib.sha256()
    with replacing(path, private=True) as temporary, temporary.open("xb") as file:
        described = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, described)
        for content in itertools.chain(batches, [of]):
            whole.update(content.data)
            file.write(content.data)
        file.write(whole.digest())


def _limit(path: Path) -> None:
    """Delete the entries beside this one that were not used for longest, beyond `MOST_BYTES`."""
    known = {one: one.stat() for one in path.parent.glob(f"*{_SUFFIX}") if one != path}
    kept = path.stat().st_size
    for one, facts in sorted(known.items(), key=lambda pair: pair[1].st_mtime, reverse=True):
        kept += facts.st_size
        if kept > MOST_BYTES:
            LOG.warning("%s is deleted: the cache holds more than %d GB", one, MOST_BYTES / 1e9)
            one.unlink(missing_ok=True)


_FORMAT = 1

_NAME = "prior"


def save_prior(folder: Path, kind: str, prior: Prior, licence: str | None, facts: Mapping[str, Any]) -> Path:
    """Write a prior; the .json is written last and marks it as complete.

    Args:
        kind: name of the backbone in the registry of models.
        licence: under which others may use it.
        facts: how it was trained.

    Returns:
        the path of the .json.
    """
    description = folder / f"{_NAME}.json"
    description.unlink(missing_ok=True)  # it would describe other tensors for a moment
    tensors = {key: tensor.contiguous() for key, tensor in prior.network.state_dict().items()}
    # Not `save_file`: what it writes is readable by its owner alone, and a prior is for others.
    atomic_write(folder / f"{_NAME}.safetensors", save(tensors))
    write_json(
        description,
        {
            "format": _FORMAT,
            "suture": VERSION,
            "backbone": kind,
            "size": prior.preprocessing.size,
            "color": prior.preprocessing.color,
            "width": prior.width,
            "preprocessing": dataclasses.asdict(prior.preprocessing),
            "digest": prior.digest,
            "description": prior.description,
            "licence": licence,
            **facts,
        },
    )
    return description


def read_prior(folder: Path, size: int | None = None, name: str = _NAME) -> Prior:
    """Read a prior that `save_prior` wrote.

    Args:
        size: side of the images that it reads; None for that of its training.

    Raises:
        ConfigError: the folder holds no prior, or a damaged one.
    """
    path, weights = folder / f"{name}.json", folder / f"{name}.safetensors"
    if not path.is_file():
        raise ConfigError(
            f"{folder} does not contain {name}.json; set prior.path to the folder that `suture pretrain` "
            "wrote"
        )
    try:
        facts = parse_json(read_bounded(path))
        kind, digest = facts["backbone"], facts["digest"]
        preprocessing = parse(Preprocessing, facts["preprocessing"], str(path))
        network, width = MODELS[kind].build(ModelSpec(kind, preprocessing.size, preprocessing.color), None)
        tensors = read_tensors(weights)
        network.load_state_dict(tensors)
        description = str(facts["description"])
    except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} cannot be read as a prior: {error}; copy {path.name} and {weights.name} again"
        ) from error
    found = digest_of(kind, tensors, preprocessing)
    if (found, width) != (digest, facts.get("width")):
        raise ConfigError(
            f"{weights} does not match {path.name} (SHA-256 {found[:12]}..., not "
            f"{str(digest)[:12]}...); copy both again"
        )
    if size is not None:
        preprocessing = dataclasses.replace(preprocessing, size=size)
    return freeze(kind, network, width, preprocessing, description)


@dataclasses.dataclass(frozen=True)
class PriorEntry:
    """An entry of the registry.

    Attributes:
        text: description for `suture list`.
        load: reads the prior from `PriorSpec.path`, where it needs one, for images of `PriorSpec.size`.
        width: number of features; None where its folder defines it.
        size: side of the images in its training, in pixels; None where its folder defines it.
        licence: of its weights, as text.
        needs: what the path names; None for a prior that comes with a package.
    """

    text: str
    load: Callable[[Path, int | None], Prior]
    width: int | None
    size: int | None
    licence: str
    needs: str | None = None

    def __str__(self) -> str:
        """Return the line for `suture list`."""
        width = f"{self.width} features of {self.size} px" if self.width else "its backbone's features"
        needs = f"; needs {self.needs}" if self.needs else ""
        return f"{self.text}: {width}{needs}; weights: {self.licence}"


PRIORS: Registry[PriorEntry] = Registry(
    PRIOR_GROUP,
    "prior",
    {
        "phantoms": PriorEntry(
            "small CNN, MoCo v2 on the demo's synthetic images; inside this package",
            lambda _path, size: read_prior(Path(__file__).parent, size, "phantoms"),
            128,
            64,
            "Apache-2.0",
        ),
        "checkpoint": PriorEntry(
            "what `suture pretrain` wrote",
            read_prior,
            None,
            None,
            "as stated by --licence",
            "the folder that it wrote",
        ),
    },
    "a suture.models.priors.Entry",
    lambda entry: isinstance(entry, PriorEntry),
)


@validated(frozen=True, config=STRICT)
class PriorSpec:
    """Which prior.

    Attributes:
        name: a name of the registry.
        path: of its file or folder in a simulation; at a real site its bare name in the folder ``[storage]
            files``. None for a prior that comes with a package.
        size: side of the images that it reads, in pixels; None for that of its training.
    """

    name: str = "phantoms"
    path: Annotated[str | None, NAMED_FILE] = None
    size: Annotated[int, Field(ge=32, le=1024)] | None = None

    def __post_init__(self) -> None:
        check_known("prior", self.name, PRIORS.names())


def load_prior(spec: PriorSpec) -> Prior:
    """Return the prior of a specification, on the CPU; no global state changes.

    Raises:
        ConfigError: its file is missing or does not fit, its package is not installed, or it takes no path
            or no other size.
    """
    entry = PRIORS.find(spec.name)
    if entry.needs and spec.path is None:
        raise ConfigError(f"prior.path is missing: {spec.name} needs {entry.needs}")
    if spec.path is not None and not entry.needs:
        raise ConfigError(f"prior.path: {spec.name} comes with a package; remove it, or set prior.name")
    with seed_torch(
        0
    ):  # a network draws its first weights, which are then replaced, from the global generator
        return entry.load(Path(spec.path or "").expanduser(), spec.size)
