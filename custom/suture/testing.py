"""Checks for what others write: `from suture.testing import check_method, check_dataset, check_encoder`.

The package suture_synthetic has them.
"""

from typing import TYPE_CHECKING, Any

from suture.core.entry_points import public_name

if TYPE_CHECKING:
    from suture_synthetic.dataset_checks import check_dataset
    from suture_synthetic.encoder_checks import check_encoder
    from suture_synthetic.method_checks import CHECKS, Subject, check_method, subject_of

__all__ = ["CHECKS", "Subject", "check_dataset", "check_encoder", "check_method", "subject_of"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return public_name(name)
