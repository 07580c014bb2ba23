"""One self-contained HTML page about plans, records and runs. Pure: objects in, text out.

All text is untrusted (names, prompts, reasons come from files), so markup is only built by
`html.h`, which escapes it. Charts are drawn by plotly, the extra `report`, whose script is in the
page once. What plotly lacks, reading a chart by keyboard and the colors of light and dark,
`page.js` adds; captions, tables and some readings tell it without script.
"""
