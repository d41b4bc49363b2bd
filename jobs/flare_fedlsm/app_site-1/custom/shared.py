"""What the server and the sites agree on."""

METHOD = "fedlsm"
SETTINGS = {
    "local": {"lr": 1e-4, "batch_size": 16, "iterations": 3},
    "teaching": {"positive": 0.6, "negative": 0.2},  # the paper's .85 and .005 are for a trained teacher
}
MODEL = {"encoder": "densenet121", "size": 32}  # MONAI's; the paper's size is 320
