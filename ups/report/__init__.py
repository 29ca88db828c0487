"""The report: page, figures, model card."""
