"""Fed-MAS."""
