"""FedLSM (Deng et al., MICCAI 2023)."""
