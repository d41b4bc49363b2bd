import math
import re
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest

from suture.core.errors import DataError
from suture_results.cooccurrence import Contingency, Frequency
from suture_results.plots import (
    brief,
    embed,
    plot_contingencies,
    plot_cooccurrence,
    plot_embedding,
    plot_frequencies,
)

NAN = math.nan
TABLES = {
    "NIH": {"Edema": Frequency(20, 80, 0), "Mass": Frequency(30, 70, 0)},
    "CheXpert": {"Edema": Frequency(1, 9999, 0), "Lung Lesion": Frequency(0, 0, 50)},
}
PAIR = Contingency("Mass", "Lung Lesion", ((1200, 300), (100, 400)))
NEVER = Contingency("Mass", "Lung Lesion", ((5, 1), (0, 0)), "never predicted: Mass")
BLANK = Contingency("Mass", "Edema", ((NAN, NAN), (NAN, NAN)), "no threshold: Edema")
POINTS = np.random.default_rng(0).normal(size=(12, 2))
SOURCES = ["NIH", "CheXpert", "MIMIC-LT"] * 4

PLOTS: list[Callable[[], bytes]] = [
    lambda: plot_frequencies(TABLES),
    lambda: plot_cooccurrence(("Edema", "Mass"), [[1, 0.25], [NAN, NAN]]),
    lambda: plot_contingencies([PAIR, NEVER, BLANK]),
    lambda: plot_embedding(POINTS, SOURCES),
]


def written(svg: bytes) -> list[str]:
    """The texts of a plot, which is whole XML."""
    return [part.text or "" for part in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def bold(svg: bytes) -> set[str]:
    """The names of classes in bold."""
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return {part.text or "" for part in texts if part.get("class") == "bold"}


@pytest.mark.parametrize("plot", PLOTS)
def test_the_same_input_gives_the_same_bytes(plot: Callable[[], bytes]) -> None:
    first = plot()
    assert first.startswith(b"<svg")
    assert first == plot()


def test_frequencies_are_in_percent_with_the_most_frequent_class_first() -> None:
    texts = written(plot_frequencies(TABLES))
    assert texts.index("Mass") < texts.index("Edema") < texts.index("Lung Lesion")
    assert {"How often each class occurs", "NIH", "CheXpert", "30.0", "20.0"} <= set(texts)
    assert "<0.1" in texts  # one in ten thousand is not none
    assert texts.count("–") == 3  # Mass at CheXpert, Lung Lesion at both


def test_classes_that_all_of_several_data_sets_label_are_bold() -> None:
    assert bold(plot_frequencies(TABLES)) == {"Edema"}
    assert bold(plot_frequencies({"NIH": TABLES["NIH"]})) == set()
    skin = {"Melanoma": Frequency(1, 9, 0)}
    assert bold(plot_frequencies({"NIH": TABLES["NIH"], "HAM10000": skin})) == set()


def test_cooccurrence_is_in_percent_and_undefined_is_a_dash() -> None:
    texts = written(plot_cooccurrence(("Edema", "Mass"), [[1, 0.25], [NAN, NAN]]))
    assert {"100", "25"} <= set(texts)
    assert texts.count("–") == 2
    assert texts.count("Edema") == 2


def test_contingencies_have_counts_and_their_share_of_the_row() -> None:
    text = "\n".join(written(plot_contingencies([PAIR])))
    assert "1,200\n80.0 %" in text
    assert "400\n80.0 %" in text
    assert "Mass and Lung Lesion, predicted" in text
    assert "P(Lung Lesion | Mass) = 80.0 %" in text
    assert "P(Mass | Lung Lesion) = 57.1 %" in text


def test_undefined_contingencies_say_why() -> None:
    text = "\n".join(written(plot_contingencies([NEVER, BLANK])))
    assert "never predicted: Mass" in text
    assert "no threshold: Edema" in text
    assert "nan" not in text


def test_every_source_has_a_colour_and_its_number_of_points() -> None:
    svg = plot_embedding(POINTS, SOURCES)
    assert {"NIH (4)", "CheXpert (4)", "MIMIC-LT (4)"} <= set(written(svg))
    dots = [
        part.get("class") for part in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}circle")
    ]
    assert {tone: dots.count(tone) for tone in set(dots)} == {f"faint t{i}": 4 for i in range(3)}


def test_more_sources_than_colours_are_drawn() -> None:
    names = [f"hospital {i}" for i in range(10)]
    texts = written(plot_embedding(np.arange(2.0 * len(names)).reshape(-1, 2), names))
    assert {f"{name} (1)" for name in names} <= set(texts)
    shares = {name: {"Edema": Frequency(1, 1, 0)} for name in names}
    assert set(names) <= set(written(plot_frequencies(shares)))


def test_signs_in_a_name_are_no_formula() -> None:
    assert "$\\frac$ & <b>" in written(plot_frequencies({"x": {"$\\frac$ & <b>": Frequency(1, 1, 0)}}))


def test_nothing_to_draw_is_named() -> None:
    with pytest.raises(DataError, match="no class to plot"):
        plot_frequencies({"NIH": {}})


@pytest.mark.complete
@pytest.mark.parametrize("width", [2, 60])
def test_tsne_keeps_groups_apart_and_follows_the_seed(width: int) -> None:
    rng = np.random.default_rng(1)
    group = np.repeat([0, 1], 30)
    features = rng.normal(size=(60, width)) + 20 * group[:, None]
    at = embed(features, seed=0)
    assert at.shape == (60, 2)
    np.testing.assert_array_equal(at, embed(features, seed=0))
    away = np.linalg.norm(at[:, None] - at[None], axis=2) + np.diag([np.inf] * 60)
    assert (group[away.argmin(axis=1)] == group).all()


def test_five_points_are_enough() -> None:
    assert np.isfinite(embed(np.eye(5), seed=0)).all()
    with pytest.raises(DataError, match="at least 5 images"):
        embed(np.eye(4), seed=0)


def test_features_that_cannot_be_laid_out_are_named() -> None:
    with pytest.raises(DataError, match="2 dimensions"):
        embed(np.ones((9, 1)), seed=0)
    with pytest.raises(DataError, match="not finite"):
        embed(np.full((9, 3), NAN), seed=0)
    with pytest.raises(DataError, match="the same features"):
        embed(np.ones((9, 3)), seed=0)


def test_a_long_name_does_not_drive_the_plot_away() -> None:
    long = "Zustand nach Versorgung einer Fraktur " * 5
    for plot in (
        plot_cooccurrence(["Mass", long], np.full((2, 2), 0.5)),
        plot_frequencies({"a": {"Mass": Frequency(1, 2, 3), long: Frequency(1, 2, 3)}}),
    ):
        (width,) = re.findall(r'<svg[^>]* width="(\d+)', plot.decode())
        assert int(width) < 900
        assert long not in plot.decode()
        assert brief(long) in plot.decode()
