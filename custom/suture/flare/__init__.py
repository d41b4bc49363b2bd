"""The only room that imports nvflare: it carries packed messages, and knows nothing of what they mean.

Only `compat` uses what is inside of FLARE; the rest uses FLARE's public interfaces.
"""

from pathlib import Path

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

# A party's resources.json names suture.flare.launcher, .plain_json and .stale_jobs: names that stay valid
# when a file moves, or every party would have to be changed.
__path__.append(str(Path(__file__).with_name("compat")))
