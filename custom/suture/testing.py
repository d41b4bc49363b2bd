"""Checks for what others write: `from suture.testing import check_method`."""

from suture.simulation.method_checks import CHECKS, Subject, check_method, subject_of

__all__ = ["CHECKS", "Subject", "check_method", "subject_of"]
