"""Used by everyone: files, progress, seeds, spectral operators, boundaries."""
