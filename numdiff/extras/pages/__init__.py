"""Pages for a browser: `numdiff report` shows runs, `numdiff serve` samples from a model.

runs.py      what a run folder holds, thinned to what a page shows
report.py    one self-contained HTML file of it, its charts by bokeh
server.py    a small HTTP server that answers its own pages alone
live.py      the report of runs that are being written
studio.py    a page on which one samples from a model
report_command.py, serve_command.py   the two commands
"""
