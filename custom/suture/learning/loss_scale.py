"""The scale of the loss in fp16, where small gradients would be 0 (Micikevicius et al., ICLR 2018)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from suture.core.errors import SutureError

LOSS_SCALE = "loss scale"
"""In place of a parameter's name, in the optimiser's state."""

_STATE = {f"{LOSS_SCALE}/scale": "scale", f"{LOSS_SCALE}/steps": "_growth_tracker"}
"""The tensors of a site's state: the scale, and how many steps it has been the same; their names in torch."""


class GradientOverflow(SutureError):
    """In fp16 the gradients of a round were beyond the range of numbers, so its steps were skipped.

    Args:
        scale: of the loss, after the round.
    """

    def __init__(self, text: str, scale: float) -> None:
        super().__init__(text)
        self.scale = scale


class LossScale:
    """Takes the steps of a round; in other precisions than fp16 the loss is not scaled.

    A step whose gradients overflow is skipped, and the scale halved. The next round begins with the last one.

    Args:
        half: the short type of mixed precision; None for none.
        optimiser_state: of the round before.
        first: the scale to begin with in place of that round's last one; None for that.
    """

    def __init__(
        self,
        half: torch.dtype | None,
        device: torch.device,
        optimiser_state: Mapping[str, Tensor],
        first: float | None = None,
    ) -> None:
        self._scaler = torch.amp.GradScaler(device.type, enabled=half == torch.float16)
        if self._scaler.is_enabled():
            saved = {name: t.item() for name, t in optimiser_state.items() if name in _STATE}
            own = {_STATE[name]: value for name, value in saved.items()}
            own |= {} if first is None else {"scale": first}
            self._scaler.load_state_dict(self._scaler.state_dict() | own)
        self._before = self._scaler.get_scale()

    def step(self, loss: Tensor, optimiser: torch.optim.Optimizer) -> None:
        """Take the step that lowers the loss, a scalar."""
        optimiser.zero_grad(set_to_none=True)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self._scaler.is_enabled():
            self._scaler.unscale_(optimiser)  # before the optimiser clips
        self._scaler.step(optimiser)
        self._scaler.update()

    def state(self, site: str, round_: int, steps: int) -> dict[str, Tensor]:
        """Return what the next round begins with; nothing in other precisions.

        Raises:
            GradientOverflow: none of the `steps` was taken, or gradients overflow that are not scaled at all.
        """
        state = self._scaler.state_dict()
        if not state:
            return {}
        scale, all_skipped = state["scale"], self._before * state["backoff_factor"] ** steps
        if steps and (scale <= all_skipped or scale < 1):
            raise GradientOverflow(
                f"{site}: the gradients of round {round_} overflow in fp16, and "
                f"{'every step was' if scale <= all_skipped else 'steps were'} skipped; set half = "
                '"bf16" under [training], let the round have more steps, or look for broken images',
                scale,
            )
        return {name: torch.tensor(state[key]) for name, key in _STATE.items()}
