"""What the server and the sites agree on."""

METHOD = "surgical"
SETTINGS = {"local": {"lr": 1e-3, "batch_size": 16}}
MODEL = {"encoder": "densenet121", "size": 32}  # MONAI's; the paper's size is 224
