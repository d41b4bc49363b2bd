"""The messages between server and sites, what may leave a site and its check, and the records of a run."""
