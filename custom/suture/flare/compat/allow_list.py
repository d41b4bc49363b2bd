"""What a party's class_allow_list permits, by FLARE's own reading of it.

FLARE 2.9.0: it applies the list (NVIDIA/NVFlare#4701) when the process of a job builds its components,
after the job was accepted: the submitter learns no more than EXECUTION_EXCEPTION. What a component imports,
as a method of another package, is not looked at. There is no public call that says whether a class is
allowed.
Where: nvflare/app_common/widgets/component_path_authorizer.py: handle_event
Expires with: test_flare_deploys_an_app_with_a_component_that_is_not_allowed
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.workspace import Workspace
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.app_common.widgets.component_path_authorizer import (
    _COMPONENT_PATH_PATTERN,
    CLASS_ALLOW_LIST,
    ComponentPathAuthorizer,
)

from suture.core.files import read_regular

_AUTHORIZER = ComponentPathAuthorizer()  # one, because each writes the same warnings into the audit log once


def refusal(component: Mapping[str, Any], **party: Any) -> str | None:
    """Return FLARE's refusal of a component by the party's class_allow_list; None where it is allowed.

    Args:
        party: its ``workspace``, or the ``fl_ctx`` of a job; with that, a job that brings code is allowed.
    """
    try:
        _AUTHORIZER.authorize_component_config(component, **party)
    except UnsafeComponentError as error:
        return str(error)
    return None


def allowing(entries: Sequence[str]) -> dict[str, Any]:
    """Return a resources.json that allows what FLARE does by default, and more."""
    return {"format_version": 2, CLASS_ALLOW_LIST: [*entries, *DEFAULT_CLASS_ALLOW_LIST]}


def list_unlisted(app: Path) -> Iterator[str]:
    """Yield FLARE's refusal of each component that the party's class_allow_list lacks.

    FLARE itself refuses it when the job's process starts, where the submitter learns no more than
    EXECUTION_EXCEPTION. An app that brings code is left to it: for such a job FLARE has another right.

    Args:
        app: the folder of a deployed app, ``WORKSPACE/JOB_ID/APP``. It may have the other role's part, of
            which FLARE builds nothing here.
    """
    root = app.parents[1]
    if (app / "custom").is_dir() or not any((root / "local").glob("resources.json*")):
        return
    workspace = Workspace(str(root))
    role = "server" if (root / "startup" / "fed_server.json").is_file() else "client"
    for path in (app / "config").glob(f"config_fed_{role}.json"):
        for component in _components(json.loads(read_regular(path))):
            if why := refusal(component, workspace=workspace):
                yield f"config/{path.name}: {why}"


def _components(value: object) -> Iterator[dict[str, Any]]:
    """Yield what FLARE takes for a component in a configuration: a table with the dotted path of a class."""
    if isinstance(value, dict):
        path = value.get("path", value.get("class_path"))
        if isinstance(path, str) and _COMPONENT_PATH_PATTERN.fullmatch(path):
            yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _components(inner)
