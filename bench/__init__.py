"""Speed, memory and error of every op, beside the code people would otherwise use.

`python -m bench` measures on this machine and prints a table; bench/results holds the results of
record. Nothing here is part of the installed package.
"""
