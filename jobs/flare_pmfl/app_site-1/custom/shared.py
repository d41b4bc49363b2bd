"""What the server and the sites agree on."""

METHOD = "pmfl"
SETTINGS = {"batches": 4}
MODEL = {"encoder": "lstm"}  # of the paper's width
