"""The pages of a report: HTML, Markdown, CSV, LaTeX and the terminal."""
