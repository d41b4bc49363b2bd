"""FLARE's recipes with packages that every party has installed.

FLARE 2.9.0: an export copies into the job what the file of a component imports, unless the job names
their package as installed; a recipe offers no way to say so, and its job is private.
Where: nvflare/job_config/fed_job_config.py: _get_custom_file
Where: nvflare/recipe/spec.py: execute
Expires with: test_a_recipe_copies_installed_packages_into_its_job
"""

from __future__ import annotations

from collections.abc import Sequence

from nvflare.recipe.spec import Recipe

OWN = ("suture", "suture_encoders", "suture_papers", "suture_synthetic")


def installed(recipe: Recipe, packages: Sequence[str] = OWN) -> None:
    """Let a job of FLARE's recipe carry no copy of packages that its parties have installed."""
    recipe._job.set_app_packages([*packages])
