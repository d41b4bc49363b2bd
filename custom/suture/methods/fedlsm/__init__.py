"""FedLSM."""
