"""A frozen encoder reads each image once; what sites train on then is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_site import samples_of
from torch import Tensor

import suture.models.priors as cache
from between import Between
from rounds import conformant
from suture.core.errors import ConfigError
from suture.core.files import read_records
from suture.core.labels import LabelSet
from suture.data.batch import FEATURES, MILD, ROW, STRONG, Augmentation, Samples
from suture.data.config import load_site_config
from suture.federation.loop import federate
from suture.federation.server.aggregator import HeldOut
from suture.federation.server.global_model import initial
from suture.learning.features import FeatureStore
from suture.learning.training import LocalTraining
from suture.methods import METHODS
from suture.methods.surgical import SurgicalAggregation
from suture.models import MODELS, ModelSpec, build
from suture.models.classifier import ENCODER, Classifier
from suture.protocol.messages import TaskData
from suture.protocol.packing import Packed, load
from suture_synthetic.method_checks import SMALL
from suture_synthetic.trial import SITES, Trial
from world import refused

HEAD = replace(SMALL, train="head")
IMAGES_EACH_STEP = replace(HEAD, views=0)
Store = Callable[..., FeatureStore]


def model(spec: ModelSpec = HEAD, seed: int = 0) -> Classifier:
    return build(spec, LabelSet(("A", "B")), seed, pretrained=False).eval()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    def make(part: Samples | None = None, network: Classifier | None = None, **spec: object) -> FeatureStore:
        parts = {"train": part or samples_of(128), "test": samples_of(0)}
        return FeatureStore(
            network or model(), replace(HEAD, **spec), parts, tmp_path / "cache" / "features", "alpha"
        )

    return make


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "features").iterdir())


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images the encoder has read, a number for each pass."""
    found: list[int] = []
    encode = Classifier.encode

    def counted(self: Classifier, inputs: dict[str, Tensor]) -> Tensor:
        found.append(len(inputs[self.reads[0]]))
        return encode(self, inputs)

    monkeypatch.setattr(Classifier, "encode", counted)
    return found


@torch.no_grad()
def test_features_are_those_of_the_images(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store()
    inputs = kept.samples["train"].inputs
    network, image = model(), HEAD.preprocessing(samples_of(128).inputs["image"])
    torch.testing.assert_close(inputs[FEATURES], network.encode({"image": image}), rtol=0, atol=1e-6)
    torch.testing.assert_close(network(inputs), network({"image": image}), rtol=0, atol=1e-6)
    assert torch.equal(inputs[ROW], torch.arange(128))
    assert kept.samples["test"].inputs[FEATURES].shape == (0, 128)
    # A package may normalise otherwise since, under the same settings and weights.
    entry = replace(MODELS["cnn"], normalisation=((0.1,), (0.2,)))
    monkeypatch.setattr("suture.models.encoder_of", lambda _: entry)
    image = (samples_of(128).inputs["image"] / 255 - 0.1) / 0.2
    after = store().samples["train"].inputs[FEATURES]
    torch.testing.assert_close(after, model().encode({"image": image}), rtol=0, atol=1e-6)


def test_a_view_is_one_of_those_kept(store: Store) -> None:
    """Each of the three is drawn, of each image its own, and no other."""
    network, rows = model(), torch.tensor([127, 3, 3])
    kept, noise = store(views=3), torch.Generator().manual_seed(0)
    drawn = torch.stack([kept.view(network, STRONG, rows, noise) for _ in range(60)])
    found = [{tuple(view.tolist()) for view in drawn[:, i]} for i in range(3)]
    assert [len(views) for views in found] == [3, 3, 3]
    assert found[1] == found[2]
    assert not found[0] & found[1]


@torch.no_grad()
def test_a_view_is_an_augmented_image(store: Store) -> None:
    """A mirror has two results, whatever is drawn: the feature of the image, or of its mirror image."""
    network, image = model(), HEAD.preprocessing(samples_of(128).inputs["image"])
    both = [network.encode({"image": x}) for x in (image, image.flip(-1))]
    seen = store().view(network, Augmentation(flip=0.5), torch.arange(128), torch.Generator())
    near = torch.stack([(seen - one).abs().amax(dim=1) < 1e-5 for one in both])
    assert near.any(dim=0).all()
    assert near.any(dim=1).all()


def test_an_image_is_read_once_for_all_runs(store: Store, reads: list[int], tmp_path: Path) -> None:
    rows = torch.arange(5)
    for _ in range(2):
        kept = store()
        for augmentation in (MILD, STRONG):
            kept.view(model(), augmentation, rows, torch.Generator())
        assert sum(reads) == 128 * (1 + 2 * 4)
    before = len(entries(tmp_path))
    other = samples_of(128)
    other.inputs["image"][127, 0, 15, 15] ^= 1
    store(other)
    store(network=model(seed=1))
    store(mean=(0.4,))
    assert len(entries(tmp_path)) == before + 3
    kept = store(views=2)
    for augmentation in (MILD, replace(MILD, zoom=0.2)):
        kept.view(model(), augmentation, rows, torch.Generator())
    assert len(entries(tmp_path)) == before + 3 + 2
    # Only the owner may read them.
    folder = tmp_path / "cache" / "features"
    folder.chmod(0o755)
    store()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in entries(tmp_path)} == {0o600}


def test_an_image_has_the_same_views_in_every_split(store: Store, reads: list[int]) -> None:
    """Seeds split the same images in other ways: none is read again, and its views are the same."""
    first, network = samples_of(128), model()
    split = first.rows(torch.arange(127, 27, -1))
    here, there = torch.arange(40, 60), torch.arange(87, 67, -1)
    drawn = [
        store(part, network).view(network, STRONG, rows, torch.Generator().manual_seed(3))
        for part, rows in ((first, here), (split, there))
    ]
    assert torch.equal(*drawn)
    assert sum(reads) == 128 * (1 + 4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["cnn", "resnet_small", "efficientnet_lite0", "timm:vit_tiny_patch16_224"])
def test_features_do_not_depend_on_what_else_is_in_a_batch(name: str) -> None:
    spec = ModelSpec(name, size=32, train="head")
    noise = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (cache.BATCH, 1, 32, 32), generator=noise).to(torch.uint8)
    network, order = model(spec), torch.randperm(cache.BATCH, generator=noise)
    found = [network.encode({"image": spec.preprocessing(x)}) for x in (images, images[order])]
    assert torch.equal(found[0][order], found[1])


def test_a_run_that_ends_leaves_no_part_of_an_entry(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            store()
    assert entries(tmp_path) == []
    (tmp_path / "cache" / "features" / "whole").touch()
    store()
    for path in entries(tmp_path):
        path.write_bytes(path.read_bytes()[:-5])
    assert store().samples["train"].inputs[FEATURES].shape == (128, 128)


@pytest.mark.complete
@pytest.mark.parametrize("name", ["afl", "fedalign", "metafl", "moon", "pfl"])
def test_a_federation_is_the_same_as_without_the_store(name: str, reads: list[int]) -> None:
    """Of methods that take the features of a batch in different ways."""
    method = conformant(name)
    block = {"hidden": 4} if name == "pfl" else {}
    found = []
    for spec in (IMAGES_EACH_STEP, HEAD):
        reads.clear()
        with Trial(method, replace(spec, **block), method.labels.types[0], rounds=2) as trial:
            trial.run()
            found.append(trial.server.model)
    for part in ("shared", "head", "channels"):
        torch.testing.assert_close(getattr(found[1], part), getattr(found[0], part), rtol=0, atol=1e-6)
    assert sum(reads) == len(SITES) * (18 + 6)


@pytest.mark.complete
@pytest.mark.parametrize("name", ["fedlsm", "fedmlp", "fixmatch", "fssl"])
def test_methods_draw_their_views_from_the_store(name: str, reads: list[int]) -> None:
    """Three sites, each image as it is and in four views of each augmentation, in any number of rounds."""
    method = conformant(name)
    with Trial(method, HEAD, method.labels.types[0], rounds=4) as trial:
        trial.run()
    augmentations = (sum(reads) / len(SITES) - 6 - 18) / (4 * 18)
    assert augmentations in (1, 2)


@pytest.mark.complete
def test_a_method_that_needs_pixels_says_so() -> None:
    for name in (name for name, method in METHODS.items() if method.about.pixels):
        method = conformant(name)
        with refused("model.views=0", by=ConfigError):
            Trial(method, HEAD, method.labels.types[0])
        with Trial(method, IMAGES_EACH_STEP, method.labels.types[0]) as trial:
            trial.run()
    with refused("model.views", by=ConfigError):  # without a frozen encoder there are none
        model(replace(SMALL, views=8))


@pytest.mark.complete
def test_a_site_that_lost_its_encoder_gets_it_again(tiny: Any) -> None:
    federation = tiny(SurgicalAggregation(), model=HEAD, rounds=3)
    server, sites = federation.server(), federation.sites()

    def lose(site: str, task: TaskData, answer: Packed) -> Packed:
        if site == "beta" and task.task == "train" and task.round == 1:
            (sites["beta"].folder / "encoder.safetensors").unlink()
            sites["beta"].states._encoder_of = None  # a new process
        return answer

    federate(server, Between(sites, lose))
    reasons = [
        line["sites"]["beta"]["reason"] for line in read_records(server.record.folder / "history.jsonl")
    ]
    assert "missing_state (MissingState)" in reasons
    assert server.round == 3


@pytest.mark.complete
def test_a_continued_run_ends_like_one_without_a_break(tiny: Any) -> None:
    method = SurgicalAggregation(local=LocalTraining(lr=1e-2, batch_size=8))
    whole = tiny(method, model=HEAD, rounds=4).run("whole")
    tiny(method, model=HEAD, rounds=2).run("cut")
    cut = tiny(method, model=HEAD, rounds=4).run("cut")
    assert cut.round == 4
    assert all(torch.equal(cut.model.head[name], rows) for name, rows in whole.model.head.items())
    states = list((cut.record.folder / "sites").glob("*/round-*.safetensors"))
    assert states
    states += (cut.record.folder / "state").glob("round-*.safetensors")
    assert not [path for path in states if any(ENCODER in name for name in load(path).tensors)]


def test_the_servers_own_data_are_read_once(
    tmp_path: Path, hospital: Callable[..., Path], reads: list[int], tiny: Any
) -> None:
    config = load_site_config(hospital(tmp_path / "held", ("Mass", "Nodule"), 25, 0, "all"))
    figures = []
    for spec in (IMAGES_EACH_STEP, HEAD):
        plan = tiny(SurgicalAggregation(), model=spec).plan
        first, held = initial(plan, ("Mass", "Nodule")), HeldOut(config, plan)
        figures.append(held.validate(first))
        reads.clear()
        figures.append(held.validate(first))
    assert reads == []
    assert figures[0] == figures[1] == figures[2] == figures[3]


@torch.no_grad()
def test_texts_have_features_and_no_views(tmp_path: Path) -> None:
    tokens = torch.randint(1, 50, (6, 9), dtype=torch.int32)
    part = Samples({"tokens": tokens, "length": torch.full((6,), 9)}, torch.zeros(6, 1), tuple("abcdef"))
    spec = ModelSpec("lstm", train="head")
    network = build(spec, LabelSet(("A",)), 0, pretrained=False).eval()
    kept = FeatureStore(network, spec, {"train": part}, tmp_path, "alpha")
    plain = kept.samples["train"].inputs
    drawn = kept.view(network, MILD, torch.tensor([2, 0]), torch.Generator())
    assert torch.equal(drawn, plain[FEATURES][[2, 0]])
    torch.testing.assert_close(network(plain), network(part.inputs))
