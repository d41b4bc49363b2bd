"""What the progress display says of an event."""

from __future__ import annotations

from suture.reports.progress import Progress


def test_a_site_that_is_gone_and_back_has_a_line_each() -> None:
    progress = Progress("demo", "poc")
    assert progress.take({"event": "gone", "site": "harbor"}) == "harbor fetches no task"
    assert progress.take({"event": "back", "site": "harbor"}) == "harbor is back"
