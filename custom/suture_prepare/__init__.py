"""Own data: what an unknown table or folder means, whether it can be trained on, what sites have in common.

`suture init` guesses and writes, a person corrects, `suture check` says what stops a run. No party of a
federation needs it.
"""
