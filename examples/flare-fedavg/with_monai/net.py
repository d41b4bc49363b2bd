"""A small DenseNet of MONAI, whose last layer is `class_layers.out`."""

from monai.networks.nets import DenseNet

HEAD = "class_layers.out"


class Net(DenseNet):
    """Maps grey images ``[n, 1, h, w]`` to logits ``[n, classes]``."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__(
            spatial_dims=2,
            in_channels=1,
            out_channels=classes,
            init_features=8,
            growth_rate=4,
            block_config=(2, 2),
        )
