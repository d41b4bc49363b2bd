"""What the server and the sites agree on."""

METHOD = "surgical"
SETTINGS = {"local": {"lr": 1e-3, "batch_size": 16}}
MODEL = {"encoder": "densenet121", "size": 32}  # MONAI's; the paper's size is 224
SITES = {"site-1": ["Mass", "Nodule"], "site-2": ["Edema", "Nodule"]}  # the classes that each annotates
LABELS = ["Edema", "Mass", "Nodule"]
