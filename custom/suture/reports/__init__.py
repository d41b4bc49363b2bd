"""A run folder as page, tables and plots."""
