"""What leans on the inside of FLARE. Nothing else in this package does.

Each file says which behaviour of FLARE it works around, and in which version that was seen; where it is in
FLARE's source; and the test that fails when FLARE no longer behaves so. Then the file can go. These tests
(tests/flare/compat) run FLARE's code without the workaround. `suture.simulation.simulator` and
`suture.simulation.start_watch` say the same of the processes of FLARE's simulator; they import nothing of
it.
"""
