"""One site: its data, its state and its answers."""
