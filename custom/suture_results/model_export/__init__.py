"""What leaves Suture: a model, its predictions and its description as files that need no Suture."""
