"""What crosses between server and sites, what may leave and its check; and the records of a run."""
