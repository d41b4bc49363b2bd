import pytest

from suture_results import formatting as formats

THIN = "\u202f"


def test_undefined_is_an_em_dash() -> None:
    assert (
        formats.area(None) == formats.interval(None) == formats.count(None) == formats.duration(None) == "—"
    )
    assert formats.date_time(None) == "—"


def test_numbers_have_sensible_digits() -> None:
    assert formats.area(0.81249) == "0.812"
    assert formats.interval((0.7, 0.85)) == "0.700–0.850"
    assert formats.count(12480) == "12,480"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (28_100_000, "28.1 MB"), (2e9, "2 GB")]
)
def test_bytes_find_their_unit(value: float, text: str) -> None:
    assert formats.size(value) == text.replace(" ", THIN)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4567, "0.457 s"), (119, "119 s"), (125, "2 min 5 s"), (7199.9, "2 h 0 min"), (9000, "2 h 30 min")],
)
def test_time_spans_find_their_units(seconds: float, text: str) -> None:
    assert formats.duration(seconds) == text.replace(" s", f"{THIN}s").replace(" min", f"{THIN}min").replace(
        " h", f"{THIN}h"
    )


def test_neighbouring_rounds_are_joined() -> None:
    assert formats.spans([5, 1, 3, 4, 8, 9]) == "1, 3–5, 8–9"


def test_settings_are_text_or_json() -> None:
    assert [formats.setting(v) for v in ("adam", 1e-4, True, None, [1, 2])] == [
        "adam",
        "0.0001",
        "true",
        "null",
        "[1, 2]",
    ]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.001, "<1 %"), (0.625, "62 %"), (0.9999, ">99 %"), (1.0, "100 %"), (None, "—")],
)
def test_a_share_is_never_rounded_to_none_or_all(share: float | None, text: str) -> None:
    assert formats.percent(share) == text.replace(" ", THIN)
