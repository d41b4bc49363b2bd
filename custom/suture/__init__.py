"""Suture: one model that knows every label any site knows, trained where the data lies."""

__version__ = "0.1.0"
