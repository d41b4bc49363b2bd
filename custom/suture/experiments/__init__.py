"""Tables and figures of papers as data: their runs, tests and plots."""
