"""FLARE's abort signal reaches what a site computes."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from rounds import conformant
from suture.core.runtime import moved
from suture.flare import PLAN
from suture.flare.codec import to_shareable
from suture.flare.executor import ALLOWED, EgressFilter, SiteExecutor
from suture.models import ModelSpec
from suture.protocol.messages import TaskData
from suture.protocol.packing import pack
from suture_synthetic.trial import Trial


def test_a_site_answers_that_its_task_was_aborted() -> None:
    """As FLARE's runner calls it: in a thread, with a signal that the run's abort triggers."""

    class Endless:
        def answer(self, task: TaskData) -> Any:
            while True:
                time.sleep(0.01)
                moved(torch.ones(1), "cpu")

    run, fl_ctx = Signal(), FLContext()
    signal = Signal(parent=run)
    with Trial(conformant("surgical"), ModelSpec("cnn", size=16), "multilabel") as trial:
        executor = SiteExecutor(PLAN, 1, bell=False)
        executor._site = Endless()  # type: ignore[assignment]
        task = trial.payload("alpha")
    threading.Timer(0.1, lambda: run.trigger(True)).start()
    reply = executor.execute("train", to_shareable(pack(task)), fl_ctx, signal)
    assert reply.get_return_code() == ReturnCode.TASK_ABORTED
    assert fl_ctx.get_prop(ALLOWED) is None
    assert EgressFilter().process(reply, fl_ctx).get_return_code() == ReturnCode.TASK_ABORTED
