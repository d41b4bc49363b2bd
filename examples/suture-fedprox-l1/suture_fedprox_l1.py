"""FedProx with the L1 norm: minimise L + mu ||w - w_received||_1; rows over their owners."""

from typing import Annotated

from pydantic import Field

from suture.sdk import About, LabelUse, LocalAveraging, hyperparameters


@hyperparameters
class FedProxL1(LocalAveraging):
    """FedProx with the L1 norm; `mu` holds the local model near the received one."""

    about = About("fedprox_l1", "FedProx with the L1 norm", "after Li et al., MLSys 2020, Eq. 2")
    labels = LabelUse(view="own")
    mu: Annotated[float, Field(ge=0)] = 1e-4

    def objective(self, model, batch, reference):
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        distance = sum((w - received).abs().sum() for w, received in pairs)
        return super().objective(model, batch, reference) + self.mu * distance
