"""The base of all rooms: errors, names, labels, vocabulary, seeds, files, validation, environment."""

VERSION = "0.1.0"
