"""What everything stands on: errors, names, labels and their vocabulary, seeds, files, validation."""
