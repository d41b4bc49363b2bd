"""A federation from first to last: plan, order of steps, state on disk, differential privacy."""
