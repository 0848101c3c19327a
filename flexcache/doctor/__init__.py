"""Checks of `flexcache doctor`, each `Subject -> findings`; none changes anything.

They examine a machine and its settings before a start. A running router tells its own trouble
(`flexcache status`).

subject      settings, directories and vLLM's options to examine; findings: one line of the report
checks       the table of checks; those of settings, packages and what engines must agree on
machine endpoints directories
             checks; the contents of directories can also be verified, repaired and cleared
gpu          checks GPUs by child processes: gpu_driver lists them, gpu_trial copies on one
"""
