"""A paper's table as data: its runs, tests, statistics and figures."""
