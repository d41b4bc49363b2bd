"""Made-up hospitals, trial federations, and the checks of what others write.

Images are drawn, so that a demo and a test need no data of anybody. A trial federation is of a few random
tensors: the checks of a method train dozens of them in seconds.
"""
