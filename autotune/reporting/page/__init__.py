"""One self-contained HTML page about plans, records and runs. Pure: objects in, text out.

All text is untrusted (names, prompts, reasons come from files), so markup is only built by `html.h`, which escapes it.
Charts are SVG: no charting library, whose script (4.6 MiB for plotly) would be in every page and be written anew at
each preview of a run; and its charts could be read neither by keyboard nor without script.
"""
