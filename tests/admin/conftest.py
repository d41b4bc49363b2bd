"""Startup kits, and a server, for the tests of this folder."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from flare_server import KIT, Serve
from startup_kits import Authority, MakeKit, write_kit


@pytest.fixture(scope="session")
def authority() -> Authority:
    """One project for all kits."""
    return Authority()


@pytest.fixture
def make_kit(tmp_path: Path, authority: Authority) -> MakeKit:
    """Makes a startup kit in PROJECT/prod_00 of the test's folder."""

    def make(role: str = "site", name: str = "harbor", **more: Any) -> Path:
        return write_kit(tmp_path / "trial" / "prod_00" / name, authority, role, name, **more)

    return make


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    def serve(server: Any) -> Any:
        monkeypatch.setattr("suture_admin.session.connect", lambda _: nullcontext(server))
        monkeypatch.setattr("suture_admin.kits.admin_kit", lambda *_, **__: KIT)
        return server

    return serve
