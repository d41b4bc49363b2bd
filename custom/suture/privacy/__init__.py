"""Protection beyond the plain way of a round: secure sums, differential privacy, robust merges."""
