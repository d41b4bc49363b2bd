"""Ark, read as a federated method: a benchmark."""
