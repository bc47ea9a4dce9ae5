"""The pictures of a report, as SVG text and as a file of matplotlib."""
