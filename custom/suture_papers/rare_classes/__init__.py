"""A few classes have most images: losses and re-training for the others."""
