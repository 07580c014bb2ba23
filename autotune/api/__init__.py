"""The functions behind `import autotune`: everything that a command does, for notebooks and
programs.

The command line is thin over exactly these. What long work tells goes to `on_event`; errors are
`AutotuneError`s.
"""
