"""The course of a run as FLARE's events at its server, for FLARE's monitoring, metric files and tracking.

They carry what the run folder holds, and stay at the server: no site streams anything.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsData, AnalyticsDataType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType

from suture.protocol.records import Metrics, Round, read_history, read_metrics, read_run
from suture.simulation.progress import Progress

_OTHER = re.compile(r"[^\w\- .]|^\.|^ ")
"""What a part of a name may not have; MLflow refuses it."""

event_log = logging.getLogger(f"custom.{__name__}")
"""FLARE writes the INFO lines of loggers with this first name into log_fl.txt."""


class RunEvents:
    """Fires FLARE's events of a run: ROUND_STARTED, ROUND_DONE, and each figure of a round as analytics.

    Args:
        component: of the job; it fires the events.
        folder: of the run; figures come from its history and metrics, each once.
    """

    def __init__(self, component: FLComponent, fl_ctx: FLContext, folder: Path) -> None:
        self._component, self._fl_ctx, self._folder = component, fl_ctx, folder
        self._progress = Progress("", "")
        self._sent: list[Round] = []

    def take(self, event: Mapping[str, Any]) -> None:
        """Follow an event of the record; a failure is logged, and does not fail the round."""
        try:
            if line := self._progress.take(dict(event)):
                event_log.info("%s", line)
            kind = event["event"]
            if kind == "round":
                self._fire(AppEventType.ROUND_STARTED, event["round"])
            elif kind in ("committed", "unchanged"):
                self._fire(AppEventType.ROUND_DONE, event["round"])
            elif kind in ("validated", "rolled_back"):
                self._send_rounds()
            elif kind == "finished":
                self._send_rounds()
                run, metrics = read_run(self._folder), read_metrics(self._folder)
                if metrics and run.status != "running":
                    self._send(metrics.selected_round or run.rounds, of_test(metrics))
        except Exception as error:  # noqa: BLE001 - a widget of the job may raise anything
            event_log.warning("FLARE's events of the run failed (%s: %s)", type(error).__name__, error)

    def _send_rounds(self) -> None:
        """Send the committed rounds that are new; all of them where the run went back to an earlier one."""
        rounds = [line for line in read_history(self._folder) if line.status == "committed"]
        new = len(self._sent) if rounds[: len(self._sent)] == self._sent else 0
        for line in rounds[new:]:
            self._send(line.round, of_round(line))
        self._sent = rounds

    def _send(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, number in scalars.items():
            data = AnalyticsData(name, number, AnalyticsDataType.SCALAR, global_step=step)
            figure = data.to_dxo().to_shareable()
            self._fl_ctx.set_prop(FLContextKey.EVENT_DATA, figure, private=True, sticky=False)
            self._component.fire_event(ANALYTIC_EVENT_TYPE, self._fl_ctx)
        model = FLModel(metrics=dict(scalars), current_round=step)
        self._fl_ctx.set_prop(AppConstants.AGGREGATION_RESULT, model, private=True, sticky=False)
        self._fire(AppEventType.AFTER_AGGREGATION, step)

    def _fire(self, event_type: str, round_: int) -> None:
        self._fl_ctx.set_prop(AppConstants.CURRENT_ROUND, round_, private=True, sticky=True)
        self._component.fire_event(event_type, self._fl_ctx)


def part_of_name(name: str) -> str:
    """Return a name as a part of a path that MLflow takes: ``Mass (left)`` is ``Mass _28_left_29_``."""
    return _OTHER.sub(lambda found: f"_{ord(found[0]):x}_", name)


def of_round(line: Round) -> dict[str, float]:
    """Return the numbers of a committed round by name: its validation, costs, and those of each site."""
    accepted = sum(site.status == "accepted" for site in line.sites.values())
    found = {
        **_named("validation", vars(line.validation)),
        **_named("round", {"seconds": line.seconds, "accepted": accepted}),
        **_named("round", {"bytes_down": line.bytes_down, "bytes_up": line.bytes_up}),
    }
    for name, site in line.sites.items():
        found |= _named(f"sites/{part_of_name(name)}", {**site.scalars, **vars(site)})
    return found


def of_test(metrics: Metrics) -> dict[str, float]:
    """Return the final figures by name: over all classes, by class, group and site."""
    found = {
        **_named("test", {"mean_auroc": metrics.mean_auroc, "loss": metrics.loss}),
        **_named("test/auroc", metrics.auroc),
        **_named("test/recall", metrics.recall),
        **_named("test/groups", metrics.groups),
        **_named("test/overall", metrics.overall),
    }
    for site, values in metrics.sites.items():
        found |= _named(f"test/sites/{part_of_name(site)}", values)
    return found


def _named(prefix: str, values: Mapping[str, object]) -> dict[str, float]:
    """The numbers among some values, by name."""
    numbers = {key: float(value) for key, value in values.items() if isinstance(value, (int, float))}
    return {f"{prefix}/{part_of_name(key)}": number for key, number in numbers.items()}
