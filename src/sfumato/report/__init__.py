"""What runs leave behind as one page: statements, plots with their numbers, samples, config. Reads files only."""

from sfumato.report.assemble import Report, report

__all__ = ["Report", "report"]
