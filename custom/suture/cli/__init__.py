"""The command line; each module has the commands of one purpose."""

from __future__ import annotations

from suture.cli.app import app as app
from suture.cli.app import main as main
from suture.cli.run import run_job_file as run_job_file
