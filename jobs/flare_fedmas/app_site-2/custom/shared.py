"""What the server and the sites agree on."""

METHOD = "fedmas"
SETTINGS = {"local": {"lr": 1e-3, "batch_size": 16, "epochs": 1}}  # the prior is the package's, of phantoms
MODEL = {"encoder": "densenet121", "size": 32, "projection": 128}  # MONAI's; the paper has ResNet-18, 224 px
