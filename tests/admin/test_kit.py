"""Reading startup kits."""

from __future__ import annotations

from pathlib import Path

import pytest
from startup_kits import MakeKit

from suture.core.errors import ConfigError
from suture.flare.kit import admin_kit, kits_in, project_admin, read_kit
from suture_admin.session import connect


@pytest.mark.parametrize("role", ["server", "site", "admin"])
def test_a_kit_says_whose_it_is(role: str, make_kit: MakeKit) -> None:
    kit = read_kit(make_kit(role, "someone", port=8123))
    assert (kit.role, kit.name, kit.project) == (role, "someone", "trial")
    assert (kit.server, kit.scheme) == ("localhost:8123", "http")


def test_no_kit_and_a_broken_kit_are_named(make_kit: MakeKit, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a startup kit"):
        read_kit(tmp_path)
    folder = make_kit()
    (folder / "startup" / "fed_client.json").write_text("{")
    with pytest.raises(ConfigError, match=r"fed_client\.json is not valid JSON"):
        read_kit(folder)
    (folder / "startup" / "fed_client.json").write_text('{"servers": []}')
    with pytest.raises(ConfigError, match="provision the kit again"):
        read_kit(folder)


def test_a_poc_runs_experiments_as_its_lead(
    make_kit: MakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As whom they were run by hand before: another user's experiment cannot be continued."""
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(tmp_path))
    make_kit("admin", "admin@a.org")
    make_kit("admin", "boss@a.org", right="lead")
    assert admin_kit(None).name == "boss@a.org"
    assert admin_kit(tmp_path / "trial" / "prod_00" / "admin@a.org").name == "admin@a.org"
    assert project_admin(tmp_path).name == "admin@a.org"


def test_the_administrator_of_a_poc_is_found(
    make_kit: MakeKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(tmp_path))
    with pytest.raises(ConfigError, match="suture poc up"):
        admin_kit(None)
    site = make_kit("site")
    with pytest.raises(ConfigError, match="project_admin"):
        admin_kit(None)
    make_kit("admin", "boss@a.org")
    assert admin_kit(None).name == "boss@a.org"
    assert set(kits_in(tmp_path)) == {"harbor", "boss@a.org"}
    with pytest.raises(ConfigError, match="kit of a site"):
        admin_kit(site)
    with pytest.raises(ConfigError, match="--startup-kit"):
        admin_kit(None, "prod")


def test_a_relay_runs_no_jobs_and_is_left_out(make_kit: MakeKit, tmp_path: Path) -> None:
    site = make_kit("site")
    relay = site.parent / "gate" / "startup"
    relay.mkdir(parents=True)
    with pytest.raises(ConfigError, match="is not a startup kit"):
        kits_in(tmp_path)
    (relay / "fed_relay.json").write_text("{}")
    assert set(kits_in(tmp_path)) == {"harbor"}


@pytest.mark.parametrize(
    ("dates", "says"),
    [
        ({"begins": -20, "ends": -1}, r"client\.crt expired on 20\d\d-.*ask the project's administrator"),
        ({"begins": 1}, r"client\.crt is valid from .* set the clock"),
    ],
)
def test_an_expired_kit_is_one_line_with_the_date(
    dates: dict[str, int], says: str, make_kit: MakeKit
) -> None:
    kit = read_kit(make_kit("admin", "lead@trial.org", **dates))
    with pytest.raises(ConfigError, match=says), connect(kit):
        pass
