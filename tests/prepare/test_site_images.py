"""suture_prepare.site_images: what differs between the images of sites, and what is at several of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from suture.data.config import SiteConfig
from suture.data.inspection import ImageFacts
from suture_prepare.quality import Findings, Picture
from suture_prepare.site_images import describe, differences, find_shared, summarise


def picture(name: str, split: str = "train", **facts: Any) -> Picture:
    plain: dict[str, Any] = {
        "file": f"file {name}".encode(),
        "pixels": f"pixels {name}".encode(),
        "width": 100,
        "height": 80,
        "bits": 8,
        "highest": None,
        "colour": False,
        "mean": 100.0,
        "brightest": 255,
    }
    return Picture(name, split, (), ImageFacts(**plain | facts))


def sites(**pictures: Sequence[Picture]) -> dict[str, Findings]:
    return {site: Findings(pictures=tuple(of)) for site, of in pictures.items()}


def config(**data: Any) -> SiteConfig:
    return SiteConfig.model_validate({"data": {"dataset": "hospital", "root": "r", "table": "t"} | data})


SAME = {"pixels": b"the same"}


@pytest.mark.parametrize(
    ("a", "b", "torn"),
    [
        ("train", "test", 1),
        ("validation", "train", 1),
        ("train", "train", 0),
        ("validation", "test", 0),
    ],
)
def test_an_image_at_two_sites_is_torn_between_training_and_measuring(a: str, b: str, torn: int) -> None:
    found = find_shared(sites(alpha=[picture("1", a, **SAME), picture("2")], beta=[picture("x", b, **SAME)]))
    assert (found.images, found.torn) == (1, torn)
    assert describe(found) == f"1 image is at several sites: '1' of alpha ({a}) = 'x' of beta ({b})"


def test_images_of_one_site_alone_are_not_shared() -> None:
    alpha = [picture("1", "train", **SAME), picture("2", "test", **SAME)]
    assert find_shared(sites(alpha=alpha, beta=[picture("x")])).images == 0


def test_the_torn_ones_are_named_first_and_only_a_few() -> None:
    alpha = [picture(f"a{i}", pixels=bytes([i])) for i in range(5)]
    beta = [picture(f"b{i}", "test" if i == 4 else "train", pixels=bytes([i])) for i in range(5)]
    found = find_shared(sites(alpha=alpha, beta=beta))
    assert (found.images, found.torn, len(found.examples)) == (5, 1, 3)
    assert describe(found).startswith(
        "5 images are at several sites: 'a4' of alpha (train) = 'b4' of beta (test)"
    )
    assert describe(found).endswith("; …")


def test_the_same_file_read_differently_is_the_same_image() -> None:
    alpha, beta = picture("1", file=b"f", pixels=b"as 12 bits"), picture("x", file=b"f", pixels=b"as 16 bits")
    assert find_shared(sites(alpha=[alpha], beta=[beta])).images == 1
    both = {"file": b"f", "pixels": b"p"}
    assert find_shared(sites(alpha=[picture("1", **both)], beta=[picture("x", **both)])).images == 1


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"width": 9, "height": 9},
            "c: the longer side of its images has 9 pixels in the median, elsewhere 100:",
        ),
        ({"mean": 20.0}, "c: the mean gray level of its images is 20, elsewhere 100"),
        ({"bits": 16, "highest": 60000}, "stored with 8 bits: a, b; with more: c."),
    ],
)
def test_a_difference_names_the_site(facts: dict[str, Any], said: str) -> None:
    [warning] = differences(sites(a=[picture("1")], b=[picture("2")], c=[picture("3", **facts)]))
    assert warning.startswith(said)
    assert list(differences(sites(a=[picture("1")], c=[picture("3", **facts)]))), "and of two sites, one"


def test_like_sites_differ_in_nothing() -> None:
    alike = sites(a=[picture("1")], b=[picture("2", mean=130.0, width=150)], text=[])
    assert list(differences(alike)) == []
    assert list(differences(sites(a=[picture("1")]))) == []
    assert list(differences({})) == []


def test_a_summary_says_how_the_images_are_read() -> None:
    deep = {"bits": 16, "highest": 4000}
    found = Findings(
        pictures=(picture("1", **deep), picture("2", width=20, height=10, colour=True, mean=50.0))
    )
    summary = summarise(found, config(bits=12))
    assert summary is not None
    assert summary["pixels"] == "20 × 10 to 100 × 80"
    assert summary["depth"] == "1 of 8 bits, 1 of 16 bits, read as 12; values to 4,000"
    assert summary["channels"] == "1 of 2 in colour, read as gray"
    assert summary["gray levels"] == "mean 75; images from 50 to 100"
    assert summarise(Findings(), config()) == {}
