"""FLARE's messages, as the submitter reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from suture.federation.ownership import NotOwner, Submitter, claim
from suture_admin.remote import explain, refusals

META = {"status": "FINISHED:ABNORMAL", "submitter_role": "lead", "job_deploy_detail": ["server: OK"]}
# As FLARE 2.9 writes it.
LISTED = (
    "nvflare.fuel.common.excepts.ComponentNotAuthorized: Error processing ['/x/config_fed_client.json'] in "
    "JSON element {'path': 'suture.flare.executor.SiteExecutor'}: path: executors.#1.executor, exception: "
    "ComponentNotAuthorized: component not authorized: Component 'suture.flare.executor.SiteExecutor' at "
    "config path 'executors.#1.executor' is not in allow_list"
)


CRASHED = {"status": "FINISHED:EXECUTION_EXCEPTION"}
DATED = "2026-11-28 18:02:49,777 - ServerRunner - INFO - "
ENDED = f"{DATED}[identity=trial, run=j-1] - Server runner finished.\n"


def said(detail: list[str] | None = None, logs: dict[str, str] | None = None) -> str:
    return "\n".join(refusals({**META, "job_deploy_detail": detail}, logs or {}))


def test_refused_code_names_party_right_role_and_file() -> None:
    text = said(["server: OK", "harbor: BYOC not permitted", "num_ok_sites 2 < required_min_sites 3"])
    for word in ("harbor", "--bundle", "launcher_spec", '"byoc"', "permissions.lead", "authorization.json"):
        assert word in text
    assert "server" not in text
    assert text.count("\n") == 0


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            LISTED,
            ["harbor", "suture.flare.executor.SiteExecutor", "class_allow_list", "local/resources.json"],
        ),
        ("ModuleNotFoundError: No module named 'suture.flare'", ["harbor", "Install suture"]),
        (
            "suture.core.errors.ConfigError: site 'harbor' has no suture.toml; looked at /x",
            ["harbor: site 'harbor' has no suture.toml"],
        ),
        (
            "FATAL_SYSTEM_ERROR: the server runs another version of suture (ab) than the job was made with "
            "(cd); install the same version, or export the job again",
            ["(ab)", "install the same version, or export the job again"],
        ),
        (
            "FATAL_SYSTEM_ERROR: this party runs another version of suture, or of the method's package, (ab) "
            "than the job was made with (cd); install the same version, or export the job again (unknown "
            "method 'prox'; it is one of: a, b)",
            ["harbor: this party runs", "(unknown method 'prox'; it is one of: a, b)"],
        ),
        (
            "FATAL_SYSTEM_ERROR: harbor does not allow the method 'prox' (near.Prox of near 1.0); its "
            "administrator can allow it with `suture policy /kit --allow near.`, which adds the package to "
            "class_allow_list in local/resources.json",
            ["harbor does not allow the method 'prox'", "`suture policy /kit --allow near.`"],
        ),
    ],
)
def test_logs_are_translated(log: str, words: list[str]) -> None:
    text = said(logs={"harbor": f"12:00 - INFO - hello\n{log}\nmore"})
    for word in words:
        assert word in text


def test_a_refusal_of_anothers_experiment_is_told(tmp_path: Path) -> None:
    claim(tmp_path / "trial", Submitter("lead@a.org", "a"), ())
    with pytest.raises(NotOwner) as refusal:
        claim(tmp_path / "trial", Submitter("lead@b.org", "b"), ())
    text = said(logs={"server": f"12:00 - ERROR - FATAL_SYSTEM_ERROR: {refusal.value}\n{DATED} more"})
    assert text.endswith(f"server: {refusal.value}")


def test_other_refusals_keep_flares_words() -> None:
    assert "harbor did not accept the job: disk full" in said(["harbor: disk full"])
    assert "did not answer" in said(["harbor: no reply (deployment timeout)"])
    assert "does not know the sites x,y" in said(["invalid_clients: x,y"])
    assert said(["server: OK", "harbor: OK"], {"server": "all is well"}) == ""


def test_an_end_without_words_says_where_to_look() -> None:
    text = explain("j-1", META, {}, {})
    assert text.startswith("job j-1 ended as FINISHED:ABNORMAL")
    assert "j-1/log.txt" in text
    assert "aborted" in explain("j-1", {"status": "FINISHED:ABORTED"}, {}, {})
    failed = explain("j-1", META, {}, {"error": "harbor: FLARE answered EXECUTION_EXCEPTION"})
    assert "suture doctor" in failed
    assert "two sites are needed" in explain("j-1", META, {}, {"error": "two sites are needed"})


@pytest.mark.parametrize(
    ("logs", "run", "party"),
    [
        ({"server": f"{DATED} round 3\n"}, {}, "at the server"),
        ({"server": "", "harbor": "suture.core.errors.DataError: row 3"}, {}, "at the server"),
        ({"server": ENDED}, {}, "at a site"),
        ({"server": f"{DATED}asked to abort - triggered abort_signal"}, {}, "at a site"),
        ({}, {"status": "interrupted", "error": "the job was aborted"}, "at a site"),
        ({}, {}, "at a site or at the server"),
    ],
)
def test_the_party_whose_process_was_killed_is_named(
    logs: dict[str, str], run: dict[str, str], party: str
) -> None:
    """A killed process of the server was said to be one at a site."""
    text = explain("j-1", CRASHED, logs, run, "go on")
    assert f"- a process {party} failed, or was killed for lack of memory" in text
    assert text.endswith("\n- go on")


def test_a_panic_of_the_server_is_told_whole_and_nothing_is_to_be_continued() -> None:
    """Before its folder is open, the controller has no other place for it than FLARE's log."""
    log = f"{DATED}Aborting due to FATAL_SYSTEM_ERROR received: plan.json is damaged\nrow 3\n{ENDED}"
    text = explain("j-1", CRASHED, {"server": log}, {}, "go on")
    assert text == "job j-1 ended as FINISHED:EXECUTION_EXCEPTION:\n- server: plan.json is damaged; row 3"


def test_an_error_of_labels_is_not_said_to_be_one_of_memory() -> None:
    """FLARE gives the job that the server ended for it the status of a crash."""
    why = "these names of different sites are nearly the same: 'Nodul' (beta) and 'Nodule' (alpha)"
    text = explain("j-1", CRASHED, {}, {"error": why})
    assert text == f"job j-1 ended as FINISHED:EXECUTION_EXCEPTION:\n- {why}"
