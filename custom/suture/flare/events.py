"""The course of a run as FLARE's events at its server, for FLARE's monitoring, metric files and tracking.

They carry what the run folder holds, and stay at the server: no site streams anything.
"""

from __future__ import annotations

import logging
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

from suture.simulation.progress import Progress
from suture.simulation.tracking import Facts, Tracking

log = logging.getLogger(f"custom.{__name__}")
"""FLARE writes the INFO lines of loggers with this first name into log_fl.txt."""


class RunEvents:
    """Fires FLARE's events of a run: ROUND_STARTED, ROUND_DONE, and each figure of a round as analytics.

    Args:
        component: of the job; it fires the events.
        folder: of the run; figures come from its history and metrics, each once.
    """

    def __init__(self, component: FLComponent, fl_ctx: FLContext, folder: Path) -> None:
        self._component, self._fl_ctx = component, fl_ctx
        self._progress = Progress("", "")
        self._tracking = Tracking(folder, self)

    def take(self, event: Mapping[str, Any]) -> None:
        """Follow an event of the record; a failure is logged, and does not fail the round."""
        try:
            if line := self._progress.take(dict(event)):
                log.info("%s", line)
            kind = event["event"]
            if kind == "round":
                self._fire(AppEventType.ROUND_STARTED, event["round"])
            elif kind in ("committed", "unchanged"):
                self._fire(AppEventType.ROUND_DONE, event["round"])
            elif kind in ("validated", "rolled_back"):
                self._tracking.update()
            elif kind == "finished":
                self._tracking.finish()
        except Exception as error:  # noqa: BLE001 - a widget of the job may raise anything
            log.warning("FLARE's events of the run failed (%s: %s)", type(error).__name__, error)

    def begin(self, facts: Facts) -> None:
        """Begin, as a `Sink`: what was sent before cannot be taken back."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the numbers of a round, as a `Sink`."""
        for name, number in scalars.items():
            data = AnalyticsData(name, number, AnalyticsDataType.SCALAR, global_step=step)
            figure = data.to_dxo().to_shareable()
            self._fl_ctx.set_prop(FLContextKey.EVENT_DATA, figure, private=True, sticky=False)
            self._component.fire_event(ANALYTIC_EVENT_TYPE, self._fl_ctx)
        model = FLModel(metrics=dict(scalars), current_round=step)
        self._fl_ctx.set_prop(AppConstants.AGGREGATION_RESULT, model, private=True, sticky=False)
        self._fire(AppEventType.AFTER_AGGREGATION, step)

    def close(self, status: str) -> str:
        """End, as a `Sink`."""
        return status

    def _fire(self, event_type: str, round_: int) -> None:
        self._fl_ctx.set_prop(AppConstants.CURRENT_ROUND, round_, private=True, sticky=True)
        self._component.fire_event(event_type, self._fl_ctx)
