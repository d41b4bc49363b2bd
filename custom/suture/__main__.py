"""`python -m suture`."""

from __future__ import annotations

import os
import sys

if sys.path and sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path:
    del sys.path[0]  # `-m` looks for every module in the working directory first, which may be anybody's

from suture.cli.app import main

if __name__ == "__main__":
    main()
