"""The only room that imports nvflare: it carries packed messages, and knows nothing of what they mean.

Only `compat` uses what is inside of FLARE; the rest uses FLARE's public interfaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATS_GROUP = "suture"
"""Group of FLARE's statistics (`show_stats`) in which the events of a running job are."""

EXPERIMENT = "suture_experiment"
"""Key of the experiment's name in a job's meta.json, where the job names one; see `named_by`."""

SHARED_WITH = "suture_shared_with"
"""Key of a job's meta.json: the users with whom its submitter shares the experiment."""

PLAN, SCHEDULE = "plan.json", "schedule.json"
"""Files in the config folder of an app: `Plan.to_dict()` in each, `Schedule.to_dict()` in the server's."""

CODE, FINGERPRINT = "suture.code", "suture.plan"
"""Headers of a task: the hash of the code that the server's plan has, and the digest of that plan."""


def named_by(meta: Mapping[str, Any], job_id: str) -> str:
    """Return the experiment of a job that names none: each submission begins one, and FLARE's clone goes on.

    Args:
        meta: FLARE's facts of the job. A submitter can invent where it was cloned from; see `claim`.
    """
    return f"{meta.get('name')}-{meta.get('cloned_from') or job_id}"
