"""Speed, memory and error of every op, beside the code people would otherwise use.

`python -m bench` measures on this machine and prints a table; bench/results holds the results of
record, which `python -m bench --record bench/results` renews (about a quarter of an hour on two
quiet cores), and `python -m bench.report` prints the README's table from them. Nothing here is
part of the installed package.

case.py says what a benchmark is, cases/ has one file per op, peers.py the other projects'
functions; runner.py checks and times, timing.py and memory.py take the numbers, report.py and
plots.py show them.
"""
