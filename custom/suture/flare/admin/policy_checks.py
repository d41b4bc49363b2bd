"""What a party's policy files permit, and whether a job of suture can run under them."""

from __future__ import annotations

from collections.abc import Iterator

from suture.core.errors import ConfigError
from suture.flare.admin.findings import Finding, error, ok, warning
from suture.flare.admin.kit import Kit, read_json
from suture.flare.admin.policy import code_rights, missing_classes, policy_file, survives
from suture.flare.admin.strict import ways_round

_RESTORE = "restore it from the startup kit's archive"


def check_policy(kit: Kit) -> list[Finding]:
    """resources.json, authorization.json and privacy.json of one party."""
    return [*_code(kit), *_survival(kit), *_logs(kit), *_privacy(kit)]


def _code(kit: Kit) -> Iterator[Finding]:
    """Whose code may run: the installed package's, code that travels with jobs, both or none."""
    try:
        missing = missing_classes(kit)
    except ConfigError as problem:
        yield error("resources.json", str(problem), _RESTORE)
        return
    try:
        granted = [role for role, right in code_rights(kit).items() if right != "none"]
    except ConfigError as problem:
        yield error("authorization.json", str(problem), _RESTORE)
        return
    path, rights = policy_file(kit, "resources"), policy_file(kit, "authorization")
    allow = (
        f"suture policy {kit.folder}: adds {', '.join(missing)} to class_allow_list in local/resources.json"
    )
    if not missing:
        yield ok("installed code", f"{path} allows suture's classes")
    elif granted:
        yield warning(
            "installed code", f"{path} does not allow suture's classes: jobs must bring the package", allow
        )
    else:
        yield error(
            "installed code", f"{path} does not allow suture's classes, and jobs may bring no code", allow
        )
    if not granted:
        yield ok("code of jobs", f"{rights} refuses it (byoc)")
    elif kit.role == "site":
        yield warning(
            "code of jobs",
            f"{rights} lets jobs of {', '.join(granted)} bring code (byoc); it can bypass the filter",
            f"suture policy {kit.folder} --refuse-code: sets byoc to none for every role",
        )
    else:
        yield ok("code of jobs", f"{rights} lets jobs of {', '.join(granted)} bring code (byoc)")


def _survival(kit: Kit) -> Iterator[Finding]:
    """Whether the death of a process ends more than it must."""
    try:
        prepared = survives(kit)
    except ConfigError:
        return  # `_code` has said so
    lost = "a killed job process ends the whole job, or a lost request is noticed after five minutes"
    what = lost if kit.role == "site" else "jobs of before a crash stay"
    if prepared:
        yield ok("killed processes", "are started again" if kit.role == "site" else "leave no job as RUNNING")
    else:
        yield warning(
            "killed processes", what, f"suture policy {kit.folder} --survive, where suture is installed"
        )


def _logs(kit: Kit) -> Iterator[Finding]:
    """A site's error log may name files and patients."""
    if kit.role != "site":
        return
    path = policy_file(kit, "resources")
    if read_json(path).get("allow_log_streaming", False) if path.exists() else False:
        yield warning(
            "logs",
            f"{path} sends the site's error log to the server; it may name files",
            f"suture policy {kit.folder} --keep-logs: sets allow_log_streaming to false",
        )
    else:
        yield ok("logs", "stay at the site")


def _privacy(kit: Kit) -> Iterator[Finding]:
    """Whether what leaves a site is what the method of a job declares, whatever the job says."""
    if kit.role != "site":
        return
    try:
        ways = list(ways_round(kit))
    except ConfigError as problem:
        if "privacy.json" in str(problem):  # `_code` has told of the others
            yield error("filter", str(problem), "mend it, or move it away")
        return
    if ways:
        yield warning(
            "filter",
            f"a job could send what its method does not declare: {'; '.join(ways)}",
            f"suture policy {kit.folder} --strict, where all jobs are suture's",
        )
    else:
        yield ok("filter", "nothing leaves that a method does not declare, and no job can change that")
