"""Experiments as data: a table or figure of a paper, run and rendered from one file."""
