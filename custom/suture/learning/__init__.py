"""Training and measuring a model: losses, the one loop, optimiser state, prediction, metrics."""
