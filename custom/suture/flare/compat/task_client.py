"""The client to which a task goes, by its token.

FLARE 2.9.0: a task goes to the client whose token came with the request. A filter sees the name that this
client states itself, in the context that it sends, and FLARE does not compare the two: changed code of a
site can state the name of another site.
Where: nvflare/private/fed/server/server_commands.py: process
Where: nvflare/private/fed/server/server_runner.py: process_task_request
Expires with: test_flare_gives_a_task_to_a_site_that_states_another_name
"""

from __future__ import annotations

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable


def client_of(task: Shareable, fl_ctx: FLContext) -> str | None:
    """Return the name of the client to which a task goes; None if the task has ended meanwhile."""
    communicator = fl_ctx.get_prop(FLContextKey.RUNNER).current_wf.controller.communicator
    found = communicator.process_task_check(task.get_header(ReservedHeaderKey.TASK_ID), fl_ctx)
    return found and str(found.client.name)
