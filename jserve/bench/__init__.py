"""Benchmarks: `jserve bench one-batch | offline | serving | compare | program`.

workload.py what is asked (texts.py: of a file) → arrivals.py when → load.py through a target
(targets.py, over wire.py) → samples.py what was seen → report.py JSON
"""
