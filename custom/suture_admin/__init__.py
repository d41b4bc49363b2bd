"""Administration of a federation: startup kits, policies, doctor, POC, jobs, and a site's own ledger."""
