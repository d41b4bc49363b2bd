"""The digests of the sites' ledgers that a server holds over all experiments."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from suture.federation.server.record import LEDGERS, SiteLedgers


@pytest.mark.complete
def test_jobs_at_the_same_time_lose_no_digest_of_a_site(tmp_path: Path) -> None:
    children = []
    for job in range(4):
        child = os.fork()
        if not child:
            for number in range(20):
                SiteLedgers(tmp_path / LEDGERS).note({f"site-{job}": f"{number:064x}"})
            os._exit(0)
        children.append(child)
    assert {os.waitpid(child, 0)[1] for child in children} == {0}
    assert SiteLedgers(tmp_path / LEDGERS).read() == {f"site-{job}": f"{19:064x}" for job in range(4)}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b'{"a": "0"}', b"\xff"])
def test_a_damaged_file_is_warned_of_and_written_anew(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = SiteLedgers(tmp_path / LEDGERS)
    assert held.read() == {}
    assert not caplog.messages
    held.path.write_bytes(content)
    held.note({"b": "0" * 64})
    assert "is damaged" in caplog.messages[0]
    assert held.read() == {"b": "0" * 64}
