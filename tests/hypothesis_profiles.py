"""How many examples a property is tried with: the fast profile, unless HYPOTHESIS_PROFILE is ``complete``."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

NAME = os.environ.get("HYPOTHESIS_PROFILE", "fast")
"""``fast`` or ``complete``."""

settings.register_profile("fast", max_examples=15, deadline=None)
settings.register_profile("complete", max_examples=100, deadline=None)
settings.load_profile(NAME)


def examples(n: int, **more: Any) -> settings:
    """Another number in the complete profile: fewer of dear examples, or more where faults are rare."""
    return settings(max_examples=n if NAME == "complete" else min(n, settings().max_examples), **more)
