"""What the server and the sites agree on."""

METHOD = "pmfl"
SETTINGS = {"batches": 4}
MODEL = {"encoder": "lstm"}  # of the paper's width
LABELS = ["Target"]
TASKS = {"site-1": "effusion", "site-2": "edema"}  # what it means to each site
SITES = dict.fromkeys(TASKS, LABELS)
