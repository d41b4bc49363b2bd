"""FedProx: minimise L + mu/2 ||w - w_received||^2 (Li et al., MLSys 2020, Eq. 2); rows over their owners."""

from typing import Annotated

from pydantic import Field

from suture import About, LabelUse, LocalAveraging, hyperparameters


@hyperparameters
class FedProx(LocalAveraging):
    """FedProx; `mu` holds the local model near the received one."""

    about = About("fedprox", "FedProx", "Li et al., MLSys 2020")
    labels = LabelUse(view="own")
    mu: Annotated[float, Field(ge=0)] = 0.01

    def objective(self, model, batch, reference):
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        distance = sum((w - received).square().sum() for w, received in pairs)
        return super().objective(model, batch, reference) + self.mu / 2 * distance
