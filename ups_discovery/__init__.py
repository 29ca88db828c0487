"""Equations of fields from their films. Needs torch and NumPy alone, and knows no package that uses it."""
