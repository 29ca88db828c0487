"""Used by everyone: files, progress, text, devices."""
