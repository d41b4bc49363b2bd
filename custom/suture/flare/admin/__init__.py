"""Administration of a FLARE system: startup kits, policies, POC, remote runs, the doctor."""
