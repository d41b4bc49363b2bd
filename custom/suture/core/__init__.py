"""The base of all rooms: errors, names, labels, vocabulary, seeds, files, validation, environment."""
