"""The server: site registry, update collector, global model, selection, the end of a run."""
