"""Here, so that tests of server and site find the helpers beside it."""
