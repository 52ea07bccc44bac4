"""A report that people look at: one HTML file on how good the shortlists of a dataset's families are.

Needs `foretune[report]`: matplotlib draws, jinja2 fills the page.
"""

from __future__ import annotations

from .make import Report, check_installed, make_report

__all__ = ["Report", "check_installed", "make_report"]
