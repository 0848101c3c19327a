"""Checks of `flexcache doctor`, one module per subject.

findings     one line of the report: ok, warning or error, with a remedy
subject      what is examined: settings, directories, vLLM's options
machine memory gpu packages agreement endpoints stores directories
             checks, each `Subject -> findings`; none changes anything
gpu          runs child processes (child): nvidia lists GPUs, gpu_trial copies on one; their
             answers are gpu_records, and gpu_table shows them
pools        contents of SSD tier directories; can verify, repair and clear
examination  the table of checks
"""
