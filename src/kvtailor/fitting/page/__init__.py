"""The page of a fit: one HTML file that works offline, made from the result alone."""

from kvtailor.fitting.page.document import page

__all__ = ["page"]
