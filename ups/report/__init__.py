"""The report: page, figures, animations, summary, model card."""
