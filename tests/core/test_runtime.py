"""Devices: what torch cannot compute on, full memory, the order of results; and a job that is aborted."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rounds import configured
from suture.core.errors import Aborted, ConfigError
from suture.core.runtime import device_name, out_of_memory, repeatable, unusable
from suture.data.batch import abortable, check_abort, moved
from suture.federation.server.aggregator import HeldOut
from suture.federation.site.abstention import reason_of
from suture.federation.site.site import Site, check_consent
from suture.learning.training import retry_in_smaller_batches
from suture.methods.surgical import SurgicalAggregation
from suture.protocol.messages import SiteInfo, TaskData
from suture_results.finetuning import FineTuning, tune
from world import refused


def test_what_cannot_compute_correctly_says_why_in_one_line() -> None:
    assert unusable("cpu") == ""
    for device in ("gpu", "cuda:99", "", "cpu:x", "mps", "mps:0", "meta", "xpu", "hpu"):
        assert unusable(device)
        assert "\n" not in unusable(device)


FULL: list[Exception] = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]

OTHER: list[Exception] = [
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ValueError("out of memory"),
    OSError(errno.ENOSPC, "No space left on device"),
]


@pytest.mark.parametrize("error", FULL, ids=repr)
def test_every_way_to_say_that_memory_is_full(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert out_of_memory(error)
    assert reason_of(error) == "out_of_memory"
    assert retry_in_smaller_batches(lambda size: fails(error) if size > 2 else size, 8) == 2
    if isinstance(error, RuntimeError):
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: fails(error))
        assert unusable("cuda") == ""
    for other in OTHER:
        assert not out_of_memory(other)
        with pytest.raises(type(other)):
            retry_in_smaller_batches(lambda _, other=other: fails(other), 8)


def fails(error: Exception) -> Any:
    raise error


def test_another_device_is_refused_at_a_site_at_the_server_and_in_fine_tuning(
    tiny: Any, tmp_path: Path
) -> None:
    site = tiny(SurgicalAggregation()).sites()["alpha"]
    check_consent("alpha", site.plan, site.config)
    for device in ("gpu", "mps"):
        config = configured(site, training={"device": device}).config
        with refused("alpha", f"'{device}'", by=ConfigError):
            check_consent("alpha", site.plan, config)
        with refused("server", f"'{device}'", by=ConfigError):
            HeldOut(config, site.plan)
        with refused(f"'{device}'", by=ConfigError):
            next(tune(tmp_path, config, "Mass", FineTuning(), 1))
    # Groups of classes are the server's, and do nothing at a site.
    with refused("alpha", "[data.groups]", by=ConfigError):
        check_consent("alpha", site.plan, configured(site, data={"groups": {"head": ("Mass",)}}).config)


def choices() -> list[bool]:
    cudnn = torch.backends.cudnn
    return [not cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled()]


def test_on_a_gpu_results_do_not_depend_on_the_order_in_which_it_computes() -> None:
    before = choices()
    for device, expected in (("cuda:1", [True] * 3), ("cpu", before)):
        with repeatable(device):
            assert choices() == expected
        assert choices() == before


@pytest.mark.parametrize("task", ["handshake", "train", "evaluate"])
def test_so_a_site_answers(task: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site, seen = tiny(SurgicalAggregation()).sites()["alpha"], list[list[bool]]()
    site = configured(site, training={"device": "cuda"})
    monkeypatch.setattr("suture.federation.site.site.check_device", lambda *_: None)

    def look(*_: Any) -> None:
        seen.append(choices())
        raise ConfigError("looked")

    monkeypatch.setattr("suture.federation.site.trainer.Trainer.layout", look)
    monkeypatch.setattr(Site, "_allow", look)
    site.answer(TaskData(task))
    assert seen == [[True] * 3]


ENTRIES = ("cli.run", "flare.executor", "flare.simulate", "federation.workers")


@pytest.mark.complete
def test_no_import_starts_cuda_and_what_it_reads_at_its_start_is_set() -> None:
    """Other processes are forked from such a one, in which CUDA must not have been started."""
    program = f"""
import importlib, os, torch
def started(*_): raise SystemExit("CUDA was started")
torch._C._cuda_init = torch._C._cuda_getDeviceCount = started
for entry in {ENTRIES}:
    if not (child := os.fork()):
        importlib.import_module(f"suture.{{entry}}")
        from suture.federation.site import site
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        break
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit(f"{{entry}}: {{code}}")
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUBLAS")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_name_of_a_gpu_may_leave_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Quadro (R) 8000+"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        found = device_name("cuda:1")
        assert found == name.replace("+", " ")
        assert SiteInfo(("Mass",), {}, 1, "c", computed_on=f"{found}, bf16").computed_on.endswith(", bf16")
    assert device_name("cpu") == "cpu"


def test_an_aborted_job_ends_at_the_next_batch_in_its_own_thread_alone() -> None:
    """FLARE's simulator may run several sites in the threads of one process."""
    ended: list[str] = []

    def work() -> None:
        check_abort()
        ended.append("whole")

    with abortable(lambda: True):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with pytest.raises(Aborted):
            moved(torch.ones(2), "cpu")
        with abortable(lambda: False):  # the innermost signal counts, and then the one before
            moved(torch.ones(2), "cpu")
        with pytest.raises(Aborted):
            check_abort()
    moved(torch.ones(2), "cpu")
    assert ended == ["whole"]
