"""Studies: comparisons of all methods whose plans were fixed before their runs."""
