"""What `flexcache doctor` looks at, one module per subject.

findings     a line: ok, warning or error, and what to do
subject      what is looked at: settings, directories, what vLLM is started with
machine memory gpu packages agreement endpoints stores directories
             checks, each `Subject -> findings`; none changes anything
pools        what is in directories of the SSD tier; may verify, repair, clear
examination  the table of checks
command      the command itself
"""
