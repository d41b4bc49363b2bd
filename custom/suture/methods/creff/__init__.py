"""CReFF."""
