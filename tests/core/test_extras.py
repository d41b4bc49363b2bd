"""What an optional package reads or draws names the extra that has it, before any work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from suture.core.errors import SutureError
from suture.models.encoders import efficientnet_lite0
from suture_results.example_images import example_images
from suture_results.model_export.pictures import explain_files

NOWHERE = Path("nowhere")
USES: list[tuple[str, str, Callable[[], object]]] = [
    ("plots", "matplotlib", lambda: explain_files(NOWHERE, [NOWHERE], NOWHERE)),
    ("plots", "matplotlib", lambda: example_images(NOWHERE)),
    ("lite", "efficientnet_lite_pytorch", lambda: efficientnet_lite0(32, None)),
]


@pytest.mark.parametrize(("extra", "package", "use"), USES)
def test_a_missing_package_is_one_error_that_names_the_extra(
    extra: str, package: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SutureError, match=rf'pip install "suture\[{extra}\]"'):
        use()
