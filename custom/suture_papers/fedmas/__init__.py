"""Fed-MAS, its priors, and one of its data sets, HyperKvasir."""
