"""Beyond the simulator: startup kits, policies, a federation of processes here, remote runs."""
