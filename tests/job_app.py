"""The files that FLARE puts into the config folder of a job's app at a party."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext

from suture.core.files import write_json
from suture.flare import PLAN, SCHEDULE


def place_app(fl_ctx: FLContext, plan: Any, schedule: Any = None) -> FLContext:
    """Write plan.json, and schedule.json where there is one, for a party; return its context.

    Args:
        plan, schedule: as objects or as plain values.
    """
    workspace = fl_ctx.get_engine().get_workspace()
    config = Path(workspace.get_app_config_dir(fl_ctx.get_job_id()))
    config.mkdir(parents=True, exist_ok=True)
    for name, given in ((PLAN, plan), (SCHEDULE, schedule)):
        if given is not None:
            write_json(config / name, given if isinstance(given, dict) else given.to_dict())
    return fl_ctx
