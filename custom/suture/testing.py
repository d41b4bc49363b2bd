"""Checks for what others write: `from suture.testing import check_method, check_dataset`."""

from suture.data.dataset_checks import check_dataset
from suture.simulation.method_checks import CHECKS, Subject, check_method, subject_of

__all__ = ["CHECKS", "Subject", "check_dataset", "check_method", "subject_of"]
