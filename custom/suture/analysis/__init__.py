"""Saved models on labelled data: how good they are, how they differ, what they learned together."""
