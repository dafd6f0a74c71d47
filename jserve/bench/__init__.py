"""Benchmarks: `jserve bench one-batch | offline | serving | compare`.

workload.py what is asked → arrivals.py when → load.py through a target (targets.py, http.py)
→ samples.py what was seen → report.py JSON
"""
