"""Checks for what others write: `from suture.testing import check_method, check_dataset, check_encoder`."""

from suture.data.dataset_checks import check_dataset
from suture.models.encoders.checks import check_encoder
from suture.simulation.method_checks import CHECKS, Subject, check_method, subject_of

__all__ = ["CHECKS", "Subject", "check_dataset", "check_encoder", "check_method", "subject_of"]
