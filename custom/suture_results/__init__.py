"""A run or a model for people: report, card, plots, trackers, predictions, evaluation, comparison, export."""
