"""A run or a model for people: report, card, plots, predictions, evaluation, comparison, export."""
