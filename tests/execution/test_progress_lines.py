"""What the progress display says of an event."""

from __future__ import annotations

from suture.execution.progress import Progress


def test_a_site_that_is_waited_for_gone_and_back_has_a_line_each() -> None:
    progress = Progress("demo", "poc")
    waiting = {"event": "waiting", "sites": ["northfield", "westbank"], "seconds": 125}
    line = progress.take({**waiting, "lost": []})
    assert line == "waiting for northfield, westbank for 2 min"
    assert progress.take({**waiting, "lost": ["northfield"]}) == f"{line}; not heard from: northfield"
    assert "harbor is gone" in str(progress.take({"event": "gone", "site": "harbor"}))
    assert progress.take({"event": "back", "site": "harbor"}) == "harbor is back"


def test_figures_stand_with_the_round_whose_model_they_measure() -> None:
    progress = Progress("demo", "local")
    begin = {"event": "begin", "round": 0, "rounds": 2, "sites": ["a", "b"], "labels": ["Mass"]}
    events = [
        begin | {"refused": {}},
        {"event": "round", "round": 1},
        {"event": "committed", "round": 1, "seconds": 4.0},
        {"event": "round", "round": 2},
        {"event": "validated", "round": 1, "loss": 0.5, "auroc": 0.75, "sites": ["a"]},
        {"event": "committed", "round": 2, "seconds": 4.0},
        {"event": "validated", "round": 2, "loss": 0.25, "auroc": None, "sites": ["a", "b"]},
        {"event": "finished", "selected": 2},
    ]
    lines = [line for event in events if (line := progress.take(event))]
    assert lines[1:] == [
        "round 1/2  4.0 s  0:00 left",
        "round 1: validation loss 0.5000, AUROC 0.750  (1 of 2 sites)",
        "round 2/2  4.0 s",
        "round 2: validation loss 0.2500",
    ]


def test_a_round_that_nobody_measures_has_no_figures_and_the_servers_own_are_named() -> None:
    progress = Progress("demo", "local")
    nothing = {"event": "validated", "round": 1, "loss": None, "auroc": None, "sites": []}
    assert progress.take(nothing) is None
    assert progress.take(nothing | {"server_auroc": 0.5}) == "round 1: AUROC at the server 0.500"
