"""The only room that imports nvflare: it carries packed messages, and knows nothing of what they mean.

Only `compat` uses what is inside of FLARE; the rest uses FLARE's public interfaces.
"""

GROUP = "suture"
"""Group of FLARE's statistics (`show_stats`) in which the events of a running job are."""

EXPERIMENT = "suture_experiment"
"""Key of the experiment's name in a job's meta.json."""

SHARED_WITH = "suture_shared_with"
"""Key of a job's meta.json: the users with whom its submitter shares the experiment."""

PLAN, SCHEDULE = "plan.json", "schedule.json"
"""Files in the config folder of an app: `Plan.to_dict()` in each, `Schedule.to_dict()` in the server's."""

FINGERPRINT = "suture.plan"
"""Header of a task with the digest of the server's plan."""
