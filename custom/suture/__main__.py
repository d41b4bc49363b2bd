"""`python -m suture`."""

from __future__ import annotations

from suture.cli.app import main

if __name__ == "__main__":
    main()
