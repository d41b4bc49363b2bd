"""Sites differ in scanners and patients: FedProx and MOON."""
