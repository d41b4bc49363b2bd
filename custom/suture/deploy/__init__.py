"""Beyond the simulator: startup kits, site policies, a federation of processes on this machine, remote runs."""
