"""MetaFL and PMFL: clinical text at sites of one disease each."""
