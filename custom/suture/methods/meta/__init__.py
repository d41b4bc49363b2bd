"""MetaFL, PMFL and the FedAvg that they are compared with."""
