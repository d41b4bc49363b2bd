"""Sites annotate different classes: the methods that FedLSM is compared with, and later ones."""
