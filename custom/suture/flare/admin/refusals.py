"""Why a job did not run, and what to change: FLARE's own messages, translated for the submitter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NOT_LISTED = re.compile(r"Component '([\w.]+)' at config path '[^']*' is not in allow_list")
_NO_MODULE = re.compile(r"No module named '(suture[\w.]*)'")
_OWN_ERROR = re.compile(r"suture\.core\.errors\.(?:ConfigError|DataError|FederationError): (.+)")
_PANIC = re.compile(r"(the server runs another version of suture .+?; install the same one)")


def refusals(meta: Mapping[str, Any], logs: Mapping[str, str]) -> list[str]:
    """One sentence for each party that did not take the job.

    Args:
        meta: FLARE's facts of the job.
        logs: of each party, as far as the submitter may read them.
    """
    found = [_deployment(str(line), meta) for line in meta.get("job_deploy_detail") or ()]
    for party, text in sorted(logs.items()):
        found += [_log(party, text)]
    return list(dict.fromkeys(sentence for sentence in found if sentence))


def _deployment(line: str, meta: Mapping[str, Any]) -> str | None:
    """A line such as ``harbor: BYOC not permitted``."""
    party, separator, text = line.partition(": ")
    if party == "invalid_clients":
        return f"the server does not know the sites {text}; `suture status` names those that are connected"
    if text == "OK" or not separator:
        return None
    if "BYOC not permitted" in text:
        role = meta.get("submitter_role", "ROLE")
        return (
            f"{party} refuses jobs that bring their code. Submit with --no-bundle, with suture installed at "
            f'every party; or, at {party}, set "byoc" to "any" under permissions.{role} in '
            "local/authorization.json and start it anew"
        )
    if "no reply" in text:
        return f"{party} did not answer while the job was handed out; see whether it runs (`suture status`)"
    return f"{party} did not take the job: {text}"


def _log(party: str, text: str) -> str | None:
    """The first thing in a party's log that explains the end of a job."""
    if listed := _NOT_LISTED.search(text):
        return (
            f'{party} does not allow {listed[1]}. At {party}, add "{listed[1]}" to class_allow_list in '
            "local/resources.json (`suture policy WORKSPACE` does it); or submit with --bundle"
        )
    if module := _NO_MODULE.search(text):
        return f"{party} has no {module[1]}. Install suture there, or submit with --bundle"
    if error := _PANIC.search(text) or _OWN_ERROR.search(text):
        return f"{party}: {error[1].strip()}"
    return None


def explain(job_id: str, meta: Mapping[str, Any], logs: Mapping[str, str], run: Mapping[str, Any]) -> str:
    """Why a job ended as it did, for a person.

    Args:
        run: the server's run.json; empty where the job did not get that far.
    """
    status = str(meta.get("status"))
    reasons = refusals(meta, logs) + ([str(run["error"])] if run.get("error") else [])
    if "EXECUTION_EXCEPTION" in f"{status} {reasons}":
        reasons.append(
            "a process at a site failed, or was killed for its memory; its words stay there: in "
            f"WORKSPACE/{job_id}/log.txt, or the system's log; `suture doctor` there may tell too"
        )
    if not reasons and "ABORTED" in status:
        reasons = ["it was aborted"]
    if not reasons:
        reasons = [
            "no party says why to the submitter. The reason is in the log of the party that ended it, "
            f"WORKSPACE/{job_id}/log.txt; `suture doctor` there may tell, and a project_admin sees more: "
            f"`suture results {job_id}`"
        ]
    return f"job {job_id} ended as {status}:\n" + "\n".join(f"- {reason}" for reason in reasons)
