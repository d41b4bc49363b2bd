"""Suture: one model that knows every label any site knows, trained where the data lies.

    import suture
    results = suture.run("demo", rounds=3)         # or a suture.Job(...); env="sim" is FLARE's simulator
    results.classes                                # figures of every class, as a pandas frame
    results.model().predict("images/")             # probabilities of images

A study of your own, as the commands do it:

    suture.init("study", {"alpha": "alpha.csv", "beta": "beta/"})
    suture.check("study").problems
    results = suture.run("study")
    suture.evaluate(results.folder, "external.csv").classes

Names are imported as they are first used, so that `import suture` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from suture.core import VERSION

if TYPE_CHECKING:
    from suture import testing as testing
    from suture.core.errors import SutureError as SutureError
    from suture.data.batch import Augmentation as Augmentation
    from suture.execution.job import Job as Job
    from suture.execution.job import load_job as load_job
    from suture.execution.notebook import known_methods as known_methods
    from suture.execution.notebook import register as register
    from suture.execution.notebook import run as run
    from suture.learning.training import LocalTraining as LocalTraining
    from suture.methods.averaging import LocalAveraging as LocalAveraging
    from suture.methods.base import About as About
    from suture.methods.base import LabelUse as LabelUse
    from suture.methods.base import Method as Method
    from suture.methods.base import hyperparameters as hyperparameters
    from suture.models import ModelSpec as ModelSpec
    from suture_prepare.actions import check as check
    from suture_prepare.actions import init as init
    from suture_results.actions import compare as compare
    from suture_results.actions import decide as decide
    from suture_results.actions import evaluate as evaluate
    from suture_results.actions import explain as explain
    from suture_results.actions import export as export
    from suture_results.actions import finetune as finetune
    from suture_results.frames import Results as Results
    from suture_results.frames import open_results as open_results
    from suture_results.prediction import Model as Model
    from suture_results.prediction import open_model as load_model  # noqa: F401
    from suture_synthetic.phantom_hospitals import PhantomSites as PhantomSites

__version__ = VERSION

_HOMES = {
    "About": "suture.methods.base:About",
    "Augmentation": "suture.data.batch:Augmentation",
    "Job": "suture.execution.job:Job",
    "LabelUse": "suture.methods.base:LabelUse",
    "LocalAveraging": "suture.methods.averaging:LocalAveraging",
    "LocalTraining": "suture.learning.training:LocalTraining",
    "Method": "suture.methods.base:Method",
    "ModelSpec": "suture.models:ModelSpec",
    "SutureError": "suture.core.errors:SutureError",
    "hyperparameters": "suture.methods.base:hyperparameters",
    "load_job": "suture.execution.job:load_job",
    "known_methods": "suture.execution.notebook:known_methods",
    "register": "suture.execution.notebook:register",
    "run": "suture.execution.notebook:run",
    "testing": "suture.testing",
}

_BESIDE = (
    *("Model", "PhantomSites", "Results", "check", "compare", "decide", "evaluate", "explain", "export"),
    *("finetune", "init", "load_model", "open_results"),
)
"""Names that other packages of this distribution add."""

__all__ = sorted((*_HOMES, *_BESIDE))


def __getattr__(name: str) -> Any:
    if name in _BESIDE:
        from suture.core.entry_points import public_name

        value = public_name(name)
    elif name in _HOMES:
        module, _, attribute = _HOMES[name].partition(":")
        home = import_module(module)
        value = getattr(home, attribute) if attribute else home
    else:
        raise AttributeError(f"module 'suture' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
